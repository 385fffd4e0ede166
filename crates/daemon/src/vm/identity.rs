//! Who a guest is, and telling it.

use super::agent_link::{AgentLink, LinkError, identify};
use super::{Vm, Who};
use crate::daemon::Daemon;
use crate::time::unix_ns;
use dayfly_api::agent::{Identity, Request};
use dayfly_units::VmId;

/// Bytes of entropy given to a guest each time.
const ENTROPY_BYTES: usize = 128;

/// Random bytes from the host's kernel.
///
/// # Panics
/// Before the kernel's generator is seeded, which it is once a daemon can be started.
#[must_use]
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    #[expect(
        clippy::expect_used,
        reason = "getrandom(2) does not fail on a seeded kernel with a valid buffer"
    )]
    getrandom::fill(&mut bytes).expect("getrandom(2) gives bytes once the kernel's generator is seeded");
    bytes
}

/// Somebody new.
#[must_use]
pub fn fresh(vm: &Vm) -> Who {
    Who { hostname: hostname(vm.name.as_str(), vm.id), machine_id: hex::encode(random::<16>()) }
}

/// The hostname of a VM of that name: names may have dots and dashes where hostnames may not.
fn hostname(name: &str, id: VmId) -> String {
    let labels: Vec<&str> =
        name.split('.').map(|label| label.trim_matches('-')).filter(|label| !label.is_empty()).collect();
    if labels.is_empty() { id.to_string() } else { labels.join(".") }
}

/// Tells a guest who it is (calling `connected` once it listens), what time it is, and reseeds its random numbers; ends its seal. One that has been told before stays
/// who it was. What is to come `next` goes with it, and is answered over the link that is given.
///
/// # Errors
/// [`LinkError`].
pub async fn give(
    daemon: &Daemon,
    vm: &Vm,
    next: Option<&Request>,
    connected: impl FnOnce(),
) -> Result<AgentLink, LinkError> {
    let who = vm.update(|live| live.who.get_or_insert_with(|| fresh(vm)).clone());
    // What time it is, as late as possible.
    identify(&vm.dir.vsock(), daemon.config.deadlines.agent, next, || {
        connected();
        Identity {
            hostname: who.hostname,
            machine_id: who.machine_id,
            wall_clock_ns: unix_ns(),
            entropy: hex::encode(random::<ENTROPY_BYTES>()),
            number: vm.facts.fork.number,
            network: vm.wires(|wires| wires.identity()),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::Name;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_name_gives_a_hostname_that_an_agent_takes(name in "[a-z0-9][a-z0-9._-]{0,62}") {
            let id = VmId::random();
            prop_assert!(name.parse::<Name>().is_ok());
            let host = hostname(&name, id);
            prop_assert!((1..=64).contains(&host.len()));
            // As the agent checks it (`agent::identity`).
            for label in host.split('.') {
                prop_assert!(!label.is_empty() && !label.starts_with('-') && !label.ends_with('-'), "{name} gives {host}");
                prop_assert!(label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_')));
            }
            if !name.contains(['.', '-']) {
                prop_assert_eq!(host, name);
            }
        }
    }

    #[test]
    fn nobody_is_somebody_else() {
        let vms: std::collections::HashSet<[u8; 16]> = (0..1000).map(|_| random()).collect();
        assert_eq!(vms.len(), 1000);
    }
}
