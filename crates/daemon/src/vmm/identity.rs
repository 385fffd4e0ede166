//! The identity of a guest, and giving it to the guest.

use crate::base::random::random;
use crate::base::time::unix_ns;
use crate::model::facts::GuestIdentity;
use crate::model::live::CpusOnline;
use crate::vm::Vm;
use crate::vmm::agent_link::{AgentLink, LinkError, identify};
use dayfly_api::agent::{Identity, Request, protocol_of};
use dayfly_units::VmId;
use std::time::Duration;

/// Bytes of entropy that a guest gets with each identity.
const ENTROPY_BYTES: usize = 128;

/// A new identity for `vm`, with a random machine-id.
#[must_use]
pub fn fresh(vm: &Vm) -> GuestIdentity {
    GuestIdentity {
        hostname: hostname(vm.name.as_str(), vm.id),
        machine_id: hex::encode(random::<16>()),
    }
}

/// The hostname for a VM's name. Names may have dots and dashes where hostnames may not.
fn hostname(name: &str, id: VmId) -> String {
    let labels: Vec<&str> = name
        .split('.')
        .map(|label| label.trim_matches('-'))
        .filter(|label| !label.is_empty())
        .collect();
    if labels.is_empty() { id.to_string() } else { labels.join(".") }
}

/// Gives a guest its identity, the time and entropy, which unseals the agent. Calls `connected`
/// once the agent accepts the connection. A guest that had an identity keeps it. The request `next`
/// is sent in the same packet, and its reply is read from the returned link. `within` limits all of
/// it.
///
/// # Errors
/// [`LinkError`].
pub async fn give(
    within: Duration,
    vm: &Vm,
    next: Option<&Request>,
    connected: impl FnOnce(),
) -> Result<AgentLink, LinkError> {
    let (identity, protocol, starts_vcpus) = vm.update(|live| {
        let identity = live.identity.get_or_insert_with(|| fresh(vm)).clone();
        (identity, protocol_of(&live.agent_version), live.starts_vcpus)
    });
    let cpus = starts_vcpus.then(|| u32::from(vm.facts.vcpus));
    let next = next.map(|request| (request, protocol));
    // The wall clock is read last, right before the request is sent.
    let (link, online) = identify(&vm.dir.vsock(), within, next, || {
        connected();
        Identity {
            hostname: identity.hostname,
            machine_id: identity.machine_id,
            wall_clock_ns: unix_ns(),
            entropy: hex::encode(random::<ENTROPY_BYTES>()),
            number: vm.facts.fork.number,
            network: vm.attachment(|attachment| attachment.identity()),
            answer_ms: u64::try_from(within.as_millis()).ok(),
            cpus,
        }
    })
    .await?;
    if let Some(online) = online {
        started_vcpus(vm, online);
    }
    Ok(link)
}

/// Notes which of the VM's vCPUs its guest has started. The VM lives with fewer, too.
fn started_vcpus(vm: &Vm, online: CpusOnline) {
    let differs = online.count != vm.facts.vcpus;
    if differs {
        tracing::warn!(vm = %vm.id, "{}", online.warning(vm.facts.vcpus));
    }
    vm.update(|live| {
        live.starts_vcpus = false;
        live.cpus_online = Some(online).filter(|_| differs);
    });
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
            // The rules of the agent (`agent::identity`).
            for label in host.split('.') {
                let is_trimmed = !label.starts_with('-') && !label.ends_with('-');
                prop_assert!(!label.is_empty() && is_trimmed, "{name} gives {host}");
                let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
                prop_assert!(label.bytes().all(allowed));
            }
            if !name.contains(['.', '-']) {
                prop_assert_eq!(host, name);
            }
        }
    }

    #[test]
    fn every_machine_id_is_unique() {
        let vms: std::collections::HashSet<[u8; 16]> = (0..1000).map(|_| random()).collect();
        assert_eq!(vms.len(), 1000);
    }
}
