//! The process that stores the RAM of a VM's snapshot: `dayfly-packer`, in the VM's control group.
//!
//! Closer, sections III and IV-B: work that is done for a VM is charged to it. Hashing, comparing,
//! compressing and writing a snapshot's pages is nearly all of what a snapshot costs.
//!
//! A packer is killed before the commit, and if nothing waits for the snapshot any more. The kernel
//! kills it with its daemon (`dayfly_packer::jail`), and the next daemon kills what the kernel has
//! not ([`end_left`]). Its files are in the store's staging folder, which the next daemon empties.
//!
//! The end of its VM is no reason: a snapshot may be stored when its VM has been removed.

use crate::base::config::PACKER_NAME;
use crate::base::error::{ApiError, Outcome};
use crate::base::groups::GroupLease;
use crate::daemon::Daemon;
use crate::vm::Vm;
use dayfly_api::types::{ErrorCode, VmLimits};
use dayfly_host::process::{Ended, Process, scan_below};
use dayfly_host::spawn::{FIRST_FD, Namespaces, Program, Spawn, Stdio};
use dayfly_packer::client::Client;
use dayfly_packer::serve::threads;
use dayfly_packer::wire::pair;
use dayfly_store::{Classified, Meter, PackWork, RamJob, RamWork, TakeFrame, WorkError};
use dayfly_units::failpoint;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Time limit for the end of a packer that was killed.
const ENDING_WITHIN: Duration = Duration::from_secs(60);
/// The same at the start of a daemon, for all packers of the one before.
const LEFT_WITHIN: Duration = Duration::from_secs(10);

/// RAM that a packer stores in a second if it has a CPU; several times less than measured.
const BYTES_PER_S: u64 = 32 << 20;
/// The packer's share of its VM's limits is at least a quarter. The guest has the rest.
const SHARE: u64 = 4;
/// Bytes of a request that is counted by `reads_per_s`: a block of a disk.
const READ_BYTES: u64 = 4 << 10;
/// Bytes of a request that is counted by `writes_per_s`. Packs are written by the MiB, which the
/// kernel divides.
const WRITE_BYTES: u64 = 64 << 10;

/// A packer that runs. It is killed when this is dropped.
#[derive(Debug)]
pub struct Packer {
    client: Client,
    process: Process,
    /// Kept until the process is gone.
    _group: Option<Arc<GroupLease>>,
}

/// Time limit for all work of a packer on RAM of this size: `save`, and the time that RAM takes at
/// each of the VM's limits.
fn time_limit(save: Duration, limits: &VmLimits, memory_bytes: u64) -> Duration {
    let millicpus = u64::from(limits.cpu_max_millicpus.unwrap_or(1000).min(1000));
    let io = limits.io_max.unwrap_or_default();
    let rates = [
        Some(BYTES_PER_S * millicpus / 1000),
        io.read_bytes_per_s,
        io.write_bytes_per_s,
        io.reads_per_s.map(|rate| rate.saturating_mul(READ_BYTES)),
        io.writes_per_s.map(|rate| rate.saturating_mul(WRITE_BYTES)),
    ];
    let seconds = |rate: u64| memory_bytes.saturating_mul(SHARE) / rate.max(1);
    let all = rates.into_iter().flatten().map(seconds).fold(0, u64::saturating_add);
    save.saturating_add(Duration::from_secs(all))
}

/// Whether a packer is to go on.
#[derive(Debug, Clone)]
struct Wanted {
    /// The daemon's.
    stop: CancellationToken,
    /// Stopped when the client has gone.
    meter: Arc<Meter>,
}

impl Wanted {
    fn is(&self) -> bool {
        !self.stop.is_cancelled() && !self.meter.is_stopped()
    }
}

/// Starts a packer for a snapshot of `vm`, which is given up once `meter` is stopped. `None` if
/// there is no program, or if a start without the group of a VM that lives fails: the daemon then
/// does the work, and the log says why. Blocks for about a millisecond. The calling thread must
/// live until the packer is dropped, because the kernel kills the packer at its end.
///
/// # Errors
/// The VM's control group has no place for a process. The work is not done outside of the group,
/// because a guest could have it done at the expense of others.
pub fn start(daemon: &Daemon, vm: &Vm, meter: &Arc<Meter>) -> Outcome<Option<Packer>> {
    let (program, name) = (daemon.config.packer(), vm.dir.packer());
    if !program.is_file() {
        tracing::warn!(
            program = %program.display(),
            "a snapshot is stored by the daemon: the program does not exist"
        );
        return Ok(None);
    }
    let (facts, save) = (&vm.facts, daemon.config.deadlines.save);
    let within = time_limit(save, &facts.limits, facts.memory_bytes);
    let wanted = Wanted { stop: daemon.stop.clone(), meter: meter.clone() };
    let group = vm.group();
    let is_in_group = group.is_some();
    match spawn(&program, &name, within, wanted, group) {
        Ok(packer) => {
            failpoint::reached("daemon.packer.started");
            Ok(Some(packer))
        }
        // The group of a VM that has ended may be gone.
        Err(e) if is_in_group && vm.phase().alive() => Err(ApiError::new(
            ErrorCode::Exhausted,
            format_args!(
                "VM {}: the process that stores the VM's memory cannot be started in its control \
                 group: {e}; take the snapshot again, or give the VM a larger --pids-max",
                vm.name
            ),
        )),
        Err(e) => {
            tracing::warn!(vm = %vm.id, "a snapshot is stored by the daemon: {e}");
            Ok(None)
        }
    }
}

fn spawn(
    program: &Path,
    name: &Path,
    within: Duration,
    wanted: Wanted,
    group: Option<Arc<GroupLease>>,
) -> io::Result<Packer> {
    let (ours, theirs) = pair()?;
    let mut spawn = Spawn::new(Program::Path(PathBuf::from(program)), name);
    spawn.argv.push(OsString::from(FIRST_FD.to_string()));
    // It changes its user, root folder and capabilities itself, and installs its filter, which has
    // no call for the network (`dayfly_packer::jail`).
    spawn.namespaces = Namespaces::NONE;
    spawn.fds = vec![(theirs, FIRST_FD)];
    spawn.stderr = Stdio::Inherit;
    spawn.group = group.as_ref().map(|group| group.entry()).transpose()?;
    // Before it runs, so that none is left without a pidfd if no descriptor is free.
    let kept = File::open("/dev/null")?;
    let child = spawn.run().map_err(io::Error::other)?;
    drop(kept);
    let process = Process::from_child(child)?;
    let client = Client::new(ours, within, move || wanted.is());
    Ok(Packer { client, process, _group: group })
}

/// Kills the packers of the daemon before, also those of VMs that live, and waits for their end.
/// One that waits for the disk, or may hardly run, ends later; it does no more than that. Must end
/// before this daemon starts one.
///
/// Returns how many it has killed. Errors are logged.
pub fn end_left(vms: &Path) -> usize {
    kill_left(vms).unwrap_or_else(|e| {
        tracing::error!("packers that a daemon before has left: {e}");
        0
    })
}

fn kill_left(vms: &Path) -> io::Result<usize> {
    let mut killed = Vec::new();
    for left in scan_below(vms, PACKER_NAME)? {
        let Some(process) = Process::open(left.process)? else { continue };
        // Any process may give itself such a name, so one that may not be killed is no reason to
        // leave the others.
        match process.kill() {
            Ok(()) => {
                tracing::info!(vm = %left.vm, "killed a packer that its daemon has left");
                killed.push(process);
            }
            Err(e) => {
                tracing::warn!("process {}, named as a packer: killing it: {e}", left.process.pid);
            }
        }
    }
    let (count, until) = (killed.len(), Instant::now() + LEFT_WITHIN);
    for process in killed {
        if process.wait(Some(until.saturating_duration_since(Instant::now())))?.is_none() {
            tracing::warn!("packer {} has not ended yet", process.id().pid);
        }
    }
    Ok(count)
}

impl Packer {
    /// Adds to the error of what the process was asked for how it has ended by itself, if it has.
    fn explained(&mut self, error: WorkError) -> WorkError {
        // A process that has closed its socket may end a little later.
        let alone = self.process.wait(Some(Duration::from_millis(100)));
        let how = match alone {
            Ok(Some(Ended::Code(code))) => format!("exit code {code}"),
            Ok(Some(Ended::Signal(libc::SIGSYS))) => "a forbidden system call (SIGSYS)".to_owned(),
            Ok(Some(Ended::Signal(libc::SIGKILL))) => {
                "it was killed, for example by the kernel, at the limit of its VM's memory \
                 (--memory-max)"
                    .to_owned()
            }
            Ok(Some(Ended::Signal(signal))) => format!("signal {signal}"),
            Ok(Some(Ended::Unknown) | None) | Err(_) => return error,
        };
        let text = format!("{}: {how}; take the snapshot again", error.text);
        WorkError { text, ..error }
    }

    fn kill(&self) -> io::Result<()> {
        self.process.kill()?;
        match self.process.wait(Some(ENDING_WITHIN))? {
            Some(_) => Ok(()),
            None => Err(io::Error::other("it does not end")),
        }
    }
}

impl Drop for Packer {
    fn drop(&mut self) {
        if let Err(e) = self.kill() {
            tracing::error!("ending the packer {}: {e}", self.process.id().pid);
        }
    }
}

impl PackWork for Packer {
    fn threads(&self) -> usize {
        threads()
    }

    fn begin(&mut self, number: u32, frames: &[u32], into: File) -> Result<(), WorkError> {
        self.client.begin(number, frames, &into).map_err(|e| self.explained(e))?;
        failpoint::reached("daemon.packer.asked");
        Ok(())
    }

    fn written(&mut self) -> Result<u32, WorkError> {
        let number = self.client.written().map_err(|e| self.explained(e))?;
        failpoint::reached("daemon.packer.written");
        Ok(number)
    }

    fn end(&mut self) -> Result<(), WorkError> {
        self.kill().map_err(|e| WorkError::new(format!("ending it: {e}")))
    }
}

impl RamWork for Packer {
    fn classify(
        &mut self,
        job: RamJob<'_>,
        found: &mut TakeFrame<'_>,
    ) -> Result<Classified, WorkError> {
        let classified = self.client.classify(&job, found);
        let classified = classified.map_err(|e| self.explained(e))?;
        failpoint::reached("daemon.packer.classified");
        Ok(classified)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::IoMax;

    #[test]
    fn each_limit_of_a_vm_gives_its_packer_time_and_none_gives_it_time_without_end() {
        let (save, memory_bytes) = (Duration::from_secs(600), 1 << 30);
        let within = |limits: VmLimits| time_limit(save, &limits, memory_bytes);
        let none = within(VmLimits::default());
        assert_eq!(none, Duration::from_secs(600 + 128));
        let io = |io_max| VmLimits { io_max: Some(io_max), ..VmLimits::default() };
        for (limits, seconds) in [
            (VmLimits { cpu_max_millicpus: Some(50), ..VmLimits::default() }, 20 * 128),
            (io(IoMax { read_bytes_per_s: Some(64 << 10), ..IoMax::default() }), 128 + 65_536),
            (io(IoMax { write_bytes_per_s: Some(64 << 10), ..IoMax::default() }), 128 + 65_536),
            (io(IoMax { reads_per_s: Some(16), ..IoMax::default() }), 128 + 65_536),
            (io(IoMax { writes_per_s: Some(16), ..IoMax::default() }), 128 + 4096),
        ] {
            assert_eq!(within(limits).as_secs() / 10, (600 + seconds) / 10, "{limits:?}");
        }
        assert!(time_limit(save, &VmLimits::default(), u64::MAX) < Duration::MAX);
    }
}
