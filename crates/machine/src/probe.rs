//! Detects whether KVM can run a stock kernel on this host.

use crate::rights;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// The result of [`probe`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// KVM works and uses the CPU's own virtualisation.
    Native {
        /// `VMX` or `SVM`.
        extension: String,
    },
    /// There is no `/dev/kvm`.
    NoDevice {
        /// Whether the CPU supports virtualisation, so that loading the module would help.
        cpu_could: bool,
    },
    /// This user may not open `/dev/kvm`.
    NoPermission {
        /// The command that changes that, if the CPU supports virtualisation.
        command: Option<String>,
    },
    /// `/dev/kvm` works by emulation (PVM) or otherwise without VMX or SVM, so only tiny guests
    /// run.
    NoExtension {
        /// The KVM vendor modules that are loaded.
        modules: Vec<String>,
    },
    /// `/dev/kvm` exists, but does not answer as KVM does.
    Broken {
        /// The answer or error.
        why: String,
    },
}

impl Probe {
    /// Whether stock kernels run on this host.
    #[must_use]
    pub fn is_native(&self) -> bool {
        matches!(self, Self::Native { .. })
    }
}

impl std::fmt::Display for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Native { extension } => write!(f, "/dev/kvm works with the CPU's {extension}"),
            Self::NoDevice { cpu_could: true } => {
                write!(f, "no /dev/kvm, though the CPU has VMX or SVM: load kvm_intel or kvm_amd")
            }
            Self::NoDevice { cpu_could: false } => {
                write!(f, "no /dev/kvm, and the CPU shows neither VMX nor SVM")
            }
            Self::NoPermission { command: Some(command) } => {
                write!(f, "/dev/kvm may not be opened by this user: as root, run: {command}")
            }
            Self::NoPermission { command: None } => {
                write!(
                    f,
                    "/dev/kvm may not be opened by this user, and the CPU shows neither VMX nor SVM"
                )
            }
            Self::NoExtension { modules } => {
                let modules =
                    if modules.is_empty() { "none".to_owned() } else { modules.join(", ") };
                write!(
                    f,
                    "/dev/kvm opens, but the CPU shows neither VMX nor SVM (KVM vendor module: \
                     {modules}), so stock kernels cannot run on it"
                )
            }
            Self::Broken { why } => write!(f, "/dev/kvm: {why}"),
        }
    }
}

/// Examines `/dev/kvm`, the CPU's flags and the KVM modules. The result is right inside a machine
/// too, because its CPUs show SVM.
#[must_use]
pub fn probe() -> Probe {
    judge(
        &open_kvm(),
        &fs::read_to_string("/proc/cpuinfo").unwrap_or_default(),
        &["kvm_intel", "kvm_amd", "kvm_pvm"]
            .map(|m| (m, Path::new("/sys/module").join(m).exists())),
    )
}

/// The result of `KVM_GET_API_VERSION` (ioctl 0xAE00), or the error.
fn open_kvm() -> Result<i32, io::Error> {
    let file = File::options().read(true).write(true).open("/dev/kvm")?;
    // SAFETY: the ioctl takes no argument and returns a number.
    let version = unsafe { libc::ioctl(file.as_raw_fd(), 0xAE00, 0) };
    if version < 0 { Err(io::Error::last_os_error()) } else { Ok(version) }
}

/// How QEMU runs the machine's CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// By KVM, and the machine then has a KVM too.
    Kvm,
    /// By translating instructions, some twenty times slower.
    Emulation,
}

/// Chooses how the machine runs: by KVM if this user may open `/dev/kvm`, it runs stock kernels,
/// and it can nest, so that the machine has a `/dev/kvm` as well.
#[must_use]
pub fn accelerator() -> Accelerator {
    let nested = ["kvm_intel", "kvm_amd"].map(|module| {
        fs::read_to_string(format!("/sys/module/{module}/parameters/nested")).unwrap_or_default()
    });
    choose(&probe(), &nested)
}

fn choose(probe: &Probe, nested: &[String]) -> Accelerator {
    let nests = nested.iter().any(|value| matches!(value.trim(), "Y" | "1"));
    if probe.is_native() && nests { Accelerator::Kvm } else { Accelerator::Emulation }
}

fn judge(kvm: &Result<i32, io::Error>, cpuinfo: &str, modules: &[(&str, bool)]) -> Probe {
    let flags = cpuinfo.lines().find(|l| l.starts_with("flags")).unwrap_or_default();
    let has = |flag: &str| flags.split_whitespace().any(|f| f == flag);
    let extension = [("vmx", "VMX"), ("svm", "SVM")]
        .into_iter()
        .find(|(flag, _)| has(flag))
        .map(|(_, name)| name);
    let loaded: Vec<String> =
        modules.iter().filter(|(_, there)| *there).map(|(name, _)| (*name).to_owned()).collect();
    match kvm {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ENODEV)) => {
            Probe::NoDevice { cpu_could: extension.is_some() }
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            Probe::NoPermission { command: extension.map(|_| rights::kvm_command()) }
        }
        Err(e) => Probe::Broken { why: e.to_string() },
        Ok(version) if *version != 12 => {
            Probe::Broken { why: format!("API version: expected 12, got {version}") }
        }
        Ok(_) => match extension {
            // PVM can be loaded on a CPU with VMX; then PVM is the module that answers.
            Some(_) if loaded == ["kvm_pvm"] => Probe::NoExtension { modules: loaded },
            Some(extension) => Probe::Native { extension: extension.to_owned() },
            None => Probe::NoExtension { modules: loaded },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_runs_the_machine_only_if_it_runs_stock_kernels_and_nests() {
        let native = Probe::Native { extension: "VMX".to_owned() };
        let nested = |value: &str| [value.to_owned(), String::new()];
        for (probe, value, expected) in [
            (&native, "Y\n", Accelerator::Kvm),
            (&native, "1\n", Accelerator::Kvm),
            (&native, "N\n", Accelerator::Emulation),
            (&native, "", Accelerator::Emulation),
            (&Probe::NoPermission { command: None }, "Y\n", Accelerator::Emulation),
            (&Probe::NoExtension { modules: vec![] }, "Y\n", Accelerator::Emulation),
        ] {
            assert_eq!(choose(probe, &nested(value)), expected, "{probe:?} {value:?}");
        }
    }

    #[test]
    fn every_kind_of_host_is_told_apart() {
        let none = [("kvm_intel", false), ("kvm_amd", false), ("kvm_pvm", false)];
        let amd = [("kvm_intel", false), ("kvm_amd", true), ("kvm_pvm", false)];
        let pvm = [("kvm_intel", false), ("kvm_amd", false), ("kvm_pvm", true)];
        let os = |n| Err(io::Error::from_raw_os_error(n));
        let svm = "processor : 0\nflags\t\t: fpu svm npt\n";
        let bare = "processor : 0\nflags\t\t: fpu svmish\n";
        assert_eq!(judge(&Ok(12), svm, &amd), Probe::Native { extension: "SVM".to_owned() });
        assert_eq!(
            judge(&Ok(12), svm, &none),
            Probe::Native { extension: "SVM".to_owned() },
            "built in"
        );
        assert_eq!(
            judge(&Ok(12), bare, &pvm),
            Probe::NoExtension { modules: vec!["kvm_pvm".to_owned()] }
        );
        assert_eq!(
            judge(&Ok(12), svm, &pvm),
            Probe::NoExtension { modules: vec!["kvm_pvm".to_owned()] }
        );
        assert_eq!(judge(&os(libc::ENOENT), bare, &none), Probe::NoDevice { cpu_could: false });
        assert_eq!(judge(&os(libc::ENOENT), svm, &none), Probe::NoDevice { cpu_could: true });
        for error in [libc::EACCES, libc::EPERM] {
            let Probe::NoPermission { command } = judge(&os(error), svm, &amd) else {
                panic!("error {error}")
            };
            assert!(command.is_some_and(|command| !command.is_empty()));
            assert_eq!(judge(&os(error), bare, &pvm), Probe::NoPermission { command: None });
        }
        assert!(matches!(judge(&Ok(11), svm, &amd), Probe::Broken { .. }));
        assert!(matches!(judge(&os(libc::EBUSY), svm, &amd), Probe::Broken { .. }));
    }
}
