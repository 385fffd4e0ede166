//! Measures a VM: its memory and disk on the host, and the use of its guest's root disk.

use crate::base::error::{ApiError, blocking};
use crate::daemon::Daemon;
use crate::model::state::Phase;
use crate::vm::Vm;
use crate::vm::bill::{self, Bill};
use crate::vmm::{agent_link, control_link};
use dayfly_api::agent::Stat;
use dayfly_api::types::{Balloon, DiskReads, DiskTraffic, GuestStat, Refused, VmDetails};
use dayfly_host::memory::{self, Memory};
use dayfly_units::Bytes;
use dayfly_units::text::{SHORT, escaped};
use dayfly_vmm::control::{Answer, BalloonStatus, Command, Status};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The first version of the control protocol with the command `Balloon`.
const HAS_BALLOON: u32 = 6;
/// Bytes left below which a root disk counts as full.
const FULL_BYTES: u64 = 4 << 20;
/// Divisor of a root disk's size: with less than a hundredth left, the disk counts as full.
const FULL_SHARE: u64 = 100;

/// Whether the root disk has less than 1 % or 4 MiB left, or no more files can be made.
#[must_use]
pub fn disk_full(stat: &Stat) -> bool {
    let left = stat.disk_available_bytes;
    // A root without a limit (a tmpfs) reports a size of 0.
    stat.disk_total_bytes > 0
        && (left < FULL_BYTES
            || left < stat.disk_total_bytes / FULL_SHARE
            || stat.disk_available_files == 0)
}

/// The warning for the owner of a guest whose root disk is full.
#[must_use]
pub fn disk_warning(stat: &Stat) -> Option<String> {
    disk_full(stat).then(|| {
        let (left, total) = (Bytes(stat.disk_available_bytes), Bytes(stat.disk_total_bytes));
        format!(
            "root disk is full: {left} of {total} and {} files are left",
            stat.disk_available_files
        )
    })
}

/// Measures a VM. Figures that are not available within
/// [`stat`](crate::base::config::Deadlines::stat) are left out.
pub async fn details(daemon: &Daemon, vm: &Arc<Vm>) -> VmDetails {
    let phase = vm.phase();
    let deadlines = daemon.config.deadlines;
    // A guest without an agent is not asked.
    let asked = phase == Phase::Running && vm.update(|live| !live.agent_version.is_empty());
    let guest = async {
        if !asked {
            return None;
        }
        agent_link::stat(&vm.dir.vsock(), deadlines.stat).await.ok()
    };
    let status = async {
        if !phase.alive() || phase == Phase::Starting {
            return None;
        }
        vmm_status(&vm.dir.control(), deadlines.stat).await
    };
    let weight = {
        let (vm, templates) = (vm.clone(), daemon.templates.clone());
        blocking(move || {
            let memory = match vm.process() {
                Some(process) => memory::of(process.id().pid).map_err(ApiError::not_found)?,
                None => Memory::default(),
            };
            Ok((memory, templates.vm_bytes(vm.id, &vm.live().disks), vm.bill()))
        })
    };
    let (guest, status, weight, refused) = tokio::join!(guest, status, weight, refused(vm));
    // If the process has ended meanwhile, the figures are 0.
    let (memory, disk_bytes, bill) = weight.unwrap_or_default();
    let (status, balloon) = status.unzip();
    let live = vm.live();
    // A VM that has ended has its last bill there.
    let bill = match &live.exit {
        Some(exit) => Bill::of(exit),
        None => bill,
    };
    let mut warnings = Vec::new();
    warnings.extend(guest.as_ref().and_then(disk_warning));
    let problem = vm.problem();
    let no_snapshot = live.no_snapshot.filter(|_| vm.unadopted.is_none());
    warnings.extend(no_snapshot.map(|why| format!("no snapshot can be taken of it: {why}")));
    warnings.extend(live.cpus_online.map(|online| online.warning(vm.facts.vcpus)));
    warnings.extend(problem);
    if asked && guest.is_none() {
        warnings.push(format!("its agent did not answer within {} s", deadlines.stat.as_secs()));
    }
    // Of a VMM of an earlier version, which has no meter.
    let asked = status.as_ref().filter(|_| bill.disks.is_empty());
    let disk_traffic = asked.map_or(bill.disks, |status| moved(status, live.disks.len()));
    let disk_reads = status.as_ref().and_then(|status| status.disk_reads).map(read_by);
    let mut timeline = live.timeline;
    if let (Some(status), Some(zero)) = (status, live.asked_us) {
        // Phases of a warm VMM before the request do not belong to the creation of the VM.
        let phases = status.phases.into_iter().filter(|(_, at)| *at >= zero);
        // The VMM's words are escaped, because a guest may have taken it over.
        let named = |what: &str| format!("vmm: {}", escaped(what, SHORT));
        timeline.extend(phases.map(|(what, at)| (named(&what), at - zero)));
        timeline.sort_by_key(|(_, us)| *us);
    }
    VmDetails {
        vm: vm.shown(),
        pid: live.process.map(|p| p.pid),
        private_kib: memory.private_dirty_kib,
        resident_kib: memory.rss_kib,
        disk_bytes,
        guest: guest.map(|stat| GuestStat { disk_full: disk_full(&stat), stat }),
        warnings,
        limits: vm.facts.limits,
        cpus: live.cpus.iter().collect(),
        usage: bill.usage,
        disk_traffic,
        net_traffic: bill.net,
        disk_reads,
        balloon: balloon.flatten(),
        refused,
        timeline,
    }
}

/// The status of a VMM, and its VM's balloon; `None` if it does not answer `within`.
async fn vmm_status(control: &Path, within: Duration) -> Option<(Status, Option<Balloon>)> {
    let ask = |what| async { control_link::command(control, what, within).await.ok() };
    let Some(Answer::Status(status)) = ask(Command::Status).await else { return None };
    // A VMM that copies RAM answers only after that.
    if status.protocol < HAS_BALLOON || status.busy.is_some() {
        return Some((status, None));
    }
    let balloon = match ask(Command::Balloon { target_bytes: None }).await {
        Some(Answer::Balloon(status)) => Some(ballooned(status)),
        _ => None,
    };
    Some((status, balloon))
}

/// What a VMM reports of the balloon. A guest that took its VMM over may report anything.
fn ballooned(status: BalloonStatus) -> Balloon {
    let BalloonStatus { driver, reports, broken, target_bytes, actual_bytes, .. } = status;
    let BalloonStatus { discarded_bytes, refused, guest, .. } = status;
    Balloon {
        driver,
        reports,
        broken: broken.map(|why| escaped(&why, SHORT).to_string()),
        target_bytes,
        actual_bytes,
        discarded_bytes,
        refused,
        guest_total_bytes: guest.total_bytes,
        guest_free_bytes: guest.free_bytes,
        guest_available_bytes: guest.available_bytes,
        guest_cached_bytes: guest.cached_bytes,
    }
}

/// How a VMM reads the VM's disks. A VMM that its guest took over may report any number.
fn read_by(reads: dayfly_vmm::disk::DiskReads) -> DiskReads {
    let dayfly_vmm::disk::DiskReads { io_uring, errno } = reads;
    let cause = |errno| std::io::Error::from_raw_os_error(errno).to_string();
    DiskReads { io_uring, refused: errno.filter(|_| !io_uring).map(cause) }
}

/// What a VMM reports of the VM's disks. It has no more than `disks`, whatever a VMM says.
fn moved(status: &Status, disks: usize) -> Vec<DiskTraffic> {
    status.traffic.iter().take(disks).map(bill::disk).collect()
}

/// What the VM's egress policy has refused; `None` without a policy.
async fn refused(vm: &Vm) -> Option<Refused> {
    let limited = vm.live().network.is_some_and(|network| !network.policy().is_internet());
    let control = vm.attachment(|attachment| attachment.egress()).filter(|_| limited)?;
    let counted = blocking(move || Ok(control.refused()?)).await;
    let counted = counted.inspect_err(|e| tracing::error!(vm = %vm.id, "what was refused: {e}"));
    counted.ok().map(|(packets, names)| Refused { packets, names })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(total: u64, left: u64, files: u64) -> Stat {
        Stat {
            disk_total_bytes: total,
            disk_available_bytes: left,
            disk_available_files: files,
            memory_total_bytes: 0,
            memory_available_bytes: 0,
        }
    }

    #[test]
    fn a_disk_is_full_below_one_percent_or_four_mebibytes_or_without_files() {
        let gib = 1 << 30;
        assert!(!disk_full(&stat(gib, gib / 2, 9)));
        assert!(!disk_full(&stat(gib, gib / 100, 9)));
        assert!(disk_full(&stat(gib, gib / 100 - 1, 9)));
        assert!(disk_full(&stat(64 << 20, (4 << 20) - 1, 9)));
        assert!(!disk_full(&stat(64 << 20, 4 << 20, 9)));
        assert!(disk_full(&stat(gib, gib / 2, 0)));
        assert!(!disk_full(&stat(0, 0, 0)));
        let warning = disk_warning(&stat(gib, 0, 5)).unwrap_or_default();
        assert!(warning.starts_with("root disk is full: 0 B of 1.0 GiB"), "{warning}");
    }

    #[test]
    fn a_vmm_without_io_uring_is_shown_with_the_cause() {
        let shown = |io_uring, errno| read_by(dayfly_vmm::disk::DiskReads { io_uring, errno });
        assert_eq!(shown(true, None), DiskReads { io_uring: true, refused: None });
        assert_eq!(shown(true, Some(1)), shown(true, None));
        let refused = shown(false, Some(1)).refused.unwrap();
        assert!(refused.starts_with("Operation not permitted"), "{refused}");
        let refused = shown(false, Some(i32::MIN)).refused.unwrap();
        assert!(refused.len() < 100, "{refused}");
    }

    #[test]
    fn what_a_vmm_reports_of_the_balloon_is_escaped() {
        let broken = Some(format!("\x1b[2J{}", "x".repeat(5000)));
        let shown = ballooned(BalloonStatus { driver: true, broken, ..BalloonStatus::default() });
        let broken = shown.broken.unwrap();
        assert!(shown.driver && broken.len() < 1000 && !broken.contains('\x1b'), "{broken}");
    }

    #[test]
    fn a_vmm_reports_of_the_disks_that_the_vm_has_and_of_no_more() {
        let shape = dayfly_vmm::config::Shape {
            memory_bytes: 1 << 28,
            vcpus: 1,
            max_vcpus: 0,
            disks: 2,
            nets: 1,
            cpu_model: dayfly_units::CpuModel::Host,
        };
        let before = Status::of(shape);
        assert_eq!(moved(&before, 2).len(), 0);
        let each = |n| dayfly_vmm::disk::DiskTraffic { reads: n, writes: 1, ..Default::default() };
        let status = Status { traffic: (0..9).map(each).collect(), ..before };
        let reads: Vec<u64> = moved(&status, 2).iter().map(|disk| disk.reads).collect();
        assert_eq!(reads, [0, 1]);
    }
}
