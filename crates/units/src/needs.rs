//! What tests need of the host, and what it means when that is absent.
//!
//! A test that cannot run says so and passes, unless [`VARIABLE`] lists what it needs: then it
//! fails. CI lists everything (`.ci/run`), so no test passes there by doing nothing.

use std::path::Path;

/// The environment variable with the needs that must be met: names, separated by commas.
pub const VARIABLE: &str = "DAYFLY_REQUIRE";

/// Something of the host that a test needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The test runs as root.
    Root,
    /// `/dev/kvm`, which runs the microguest.
    Kvm,
    /// Stock kernels run in the machine, not on this host itself.
    Machine,
    /// The kernel has Landlock.
    Landlock,
    /// Debian's `docker-registry` and `skopeo`.
    Registry,
    /// Control groups that limit CPU time, memory and processes (`dayfly_host::groups`).
    Groups,
}

impl Need {
    const ALL: [(&'static str, Self); 6] = [
        ("root", Self::Root),
        ("kvm", Self::Kvm),
        ("machine", Self::Machine),
        ("landlock", Self::Landlock),
        ("registry", Self::Registry),
        ("groups", Self::Groups),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, need)| *need == self).map_or("?", |(name, _)| name)
    }
}

/// Whether the test of this thread may run, where `there` says whether its need is met. If not,
/// prints that nothing was tested.
///
/// # Panics
/// The need is absent and [`VARIABLE`] lists it, or [`VARIABLE`] has a name that is no need's.
#[must_use]
pub fn met(need: Need, there: bool) -> bool {
    let listed = std::env::var(VARIABLE).unwrap_or_default();
    let thread = std::thread::current();
    match judge(need, there, &listed) {
        Ok(true) => true,
        Ok(false) => {
            let test = thread.name().unwrap_or("a test");
            eprintln!("{test}: this host has no {}: nothing was tested", need.name());
            false
        }
        Err(why) => panic!("{why}"),
    }
}

/// [`met`] with the value of [`VARIABLE`].
fn judge(need: Need, there: bool, listed: &str) -> Result<bool, String> {
    let known = || Need::ALL.map(|(name, _)| name).join(", ");
    let listed: Vec<&str> = listed.split(',').filter(|name| !name.is_empty()).collect();
    for name in &listed {
        if !Need::ALL.iter().any(|(known, _)| known == name) {
            return Err(format!("{VARIABLE}: expected some of {}, got {name:?}", known()));
        }
    }
    if !there && listed.contains(&need.name()) {
        let name = need.name();
        return Err(format!(
            "{VARIABLE} lists {name:?}, and this host has none; without {name} in it, this test is \
             left out"
        ));
    }
    Ok(there)
}

/// Whether this process is root; see [`met`].
#[must_use]
pub fn root() -> bool {
    met(Need::Root, rustix::process::geteuid().is_root())
}

/// Whether there is a `/dev/kvm`; see [`met`].
#[must_use]
pub fn kvm() -> bool {
    met(Need::Kvm, Path::new("/dev/kvm").exists())
}

/// Whether there are `docker-registry` and `skopeo`; see [`met`].
#[must_use]
pub fn registry() -> bool {
    let programs = ["/usr/bin/docker-registry", "/usr/bin/skopeo"];
    met(Need::Registry, programs.iter().all(|path| Path::new(path).exists()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_need_that_is_listed_and_absent_is_an_error() {
        assert_eq!(judge(Need::Kvm, true, "root,kvm"), Ok(true));
        assert_eq!(judge(Need::Kvm, false, ""), Ok(false));
        assert_eq!(judge(Need::Kvm, false, "root"), Ok(false));
        assert!(judge(Need::Kvm, false, "root,kvm").unwrap_err().contains("\"kvm\""));
        let unknown = judge(Need::Kvm, true, "kvm,rooot").unwrap_err();
        assert!(unknown.contains("rooot") && unknown.contains("root, kvm, machine"), "{unknown}");
    }
}
