//! Where the daemon keeps things, and how long it waits for them.
//!
//! ```text
//! <run>/dayflyd.sock            the API
//! <run>/dayflyd.lock            held by the daemon as long as it lives
//! <run>/netns                   the network namespace of VMs, mounted ([`crate::net`])
//! <run>/vms/<id>/vm.json        what the next daemon must know ([`crate::vm::record`])
//! <run>/vms/<id>/control.sock   the VMM's control socket
//! <run>/vms/<id>/console.log    what the guest wrote to its console
//! <run>/vms/<id>/exit.json      why the VMM ended
//! <run>/vms/<id>/root/          the jail's root: vsock.sock, vsock.sock_1025 during a boot, vsock.sock_1026 where it may fork itself
//! <state>/                      the store: images, kernels, layers, snapshots, staging
//! ```

use crate::net::Prefix;
use dayfly_units::VmId;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The two roots, and the program that is a VMM.
#[derive(Debug, Clone)]
pub struct Config {
    /// Folder of images, kernels, layers and snapshots.
    pub state: PathBuf,
    /// Folder of sockets and of the folders of VMs; may be on a tmpfs.
    pub run: PathBuf,
    /// The `dayfly-vmm` program.
    pub vmm: PathBuf,
    /// How much memory VMs may have in all, in percent of what the host has.
    pub overcommit: u32,
    /// How many shells and clones wait at most.
    pub pool: usize,
    /// The addresses of VMs; `None`: they have no network.
    pub network: Option<Prefix>,
    /// How long things may take.
    pub deadlines: Deadlines,
}

/// How long the daemon waits before it gives up and undoes.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// From a cold boot's first instruction to the agent's `Ready`.
    pub boot: Duration,
    /// For the agent to take an identity, to seal, or to answer.
    pub agent: Duration,
    /// For a guest to take a connection to one of its ports. Shorter than what the VMM gives a guest (`ANSWER_TIME`): what it says then is
    /// what it says of a port where nobody listens.
    pub port: Duration,
    /// For a question on the side (`Stat`), after which it is left out of an answer.
    pub stat: Duration,
    /// For an answer of the VMM's control socket, apart from `Save`.
    pub control: Duration,
    /// For `Save`, which writes the guest's memory.
    pub save: Duration,
    /// For a page that a clone touches before it has come. A clone that waits longer is ended.
    pub page: Duration,
    /// From SIGKILL to the end of the process: freeing memory takes about 40 ms a GiB.
    pub reap: Duration,
    /// For a client to send the first frame after an upgrade.
    pub first_frame: Duration,
    /// For running operations to undo themselves when the daemon is asked to stop.
    pub shutdown: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let s = Duration::from_secs;
        Self {
            boot: s(120),
            agent: s(30),
            port: s(20),
            stat: s(3),
            control: s(20),
            save: s(600),
            page: s(30),
            reap: s(60),
            first_frame: s(30),
            shutdown: s(15),
        }
    }
}

impl Deadlines {
    /// Where guests and VMMs take so many times as long as elsewhere: on a host that is emulated, or that has far more to do than CPUs. What clients and a daemon
    /// that stops are given stays as it is.
    #[must_use]
    pub fn times(self, patience: u32) -> Self {
        let Self { boot, agent, control, save, page, reap, .. } = self;
        let [boot, agent, control, save, page, reap] =
            [boot, agent, control, save, page, reap].map(|usual| usual.saturating_mul(patience));
        Self { boot, agent, control, save, page, reap, ..self }
    }
}

/// The last component of a VMM's `argv[0]`.
pub const VMM_NAME: &str = "dayfly-vmm";
/// Bytes of console that are kept of each VM.
pub const CONSOLE_MAX_BYTES: u64 = 4 << 20;
/// What [`Config::overcommit`] is where nobody says: clones share what they do not write.
pub const OVERCOMMIT: u32 = 1000;
/// What [`Config::pool`] is on a host with this much memory where nobody says: a clone that waits weighs about 2 MiB, and those that wait a
/// twentieth of the host at most. They are as many only while as many were just asked for.
#[must_use]
pub fn pool(memory_bytes: u64) -> usize {
    usize::try_from(memory_bytes / 20 / (2 << 20)).unwrap_or(usize::MAX).clamp(16, 2048)
}
/// What [`Config::network`] is where nobody says.
pub const NETWORK: &str = "10.88.0.0/16";
/// Bytes of RAM a VM may have, least and most.
pub const MEMORY_BYTES: std::ops::RangeInclusive<u64> = (64 << 20)..=(64 << 30);
/// RAM comes in pieces of this many bytes.
pub const MEMORY_STEP_BYTES: u64 = 2 << 20;
/// The longest path of a unix socket (`sun_path`, unix(7)) without its closing zero.
pub const SOCKET_PATH_MAX: usize = 107;

impl Config {
    /// The API's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.run.join("dayflyd.sock")
    }

    /// The file that says which daemon is the one.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.run.join("dayflyd.lock")
    }

    /// Folder of the folders of VMs.
    #[must_use]
    pub fn vms(&self) -> PathBuf {
        self.run.join("vms")
    }

    /// Where the network namespace of VMs is mounted.
    #[must_use]
    pub fn netns(&self) -> PathBuf {
        self.run.join("netns")
    }

    /// The host's end of what joins that to the host's network: a daemon with another run folder has another.
    #[must_use]
    pub fn uplink(&self) -> String {
        let digest = dayfly_store::Digest::of(self.run.as_os_str().as_encoded_bytes()).to_string();
        format!("dayfly{}", &digest[..8])
    }

    /// Folder of what will be folders of VMs.
    #[must_use]
    pub fn berths(&self) -> PathBuf {
        self.run.join("berths")
    }

    /// The folder of one VM.
    #[must_use]
    pub fn vm(&self, id: VmId) -> VmDir {
        VmDir(self.vms().join(id.to_string()))
    }

    /// What VMMs of this daemon are called in process listings: a daemon with another run folder has others.
    #[must_use]
    pub fn vmm_name(&self) -> PathBuf {
        self.run.join(VMM_NAME)
    }

    /// The length of the longest socket path under the run folder, to be compared with [`SOCKET_PATH_MAX`].
    #[must_use]
    pub fn longest_socket_path(&self) -> usize {
        let digits = "0123456789ab";
        VmDir(self.vms().join(digits)).ready().as_os_str().len()
    }
}

/// The folder of one VM.
#[derive(Debug, Clone)]
pub struct VmDir(PathBuf);

impl VmDir {
    /// One that will be a VM's.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        Self(path)
    }
    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
    /// The root of the VMM's jail.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.0.join("root")
    }
    /// The same, seen from inside the folder of VMs' folders.
    #[must_use]
    pub fn root_in_jail(&self) -> PathBuf {
        Path::new("/").join(self.0.file_name().unwrap_or_default()).join("root")
    }
    /// The VMM's control socket.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.0.join("control.sock")
    }
    /// The guest's vsock.
    #[must_use]
    pub fn vsock(&self) -> PathBuf {
        self.root().join("vsock.sock")
    }
    /// Where the agent reports after a cold boot.
    #[must_use]
    pub fn ready(&self) -> PathBuf {
        self.root().join(format!("vsock.sock_{}", dayfly_api::agent::READY_PORT))
    }
    /// Where its guest asks for clones of itself, if it may.
    #[must_use]
    pub fn door(&self) -> PathBuf {
        self.root().join(format!("vsock.sock_{}", dayfly_api::agent::HOST_PORT))
    }
    /// The guest's console.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.0.join("console.log")
    }
    /// Why the VMM ended.
    #[must_use]
    pub fn exit(&self) -> PathBuf {
        self.0.join("exit.json")
    }
    /// The record for the next daemon.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.0.join("vm.json")
    }
}
