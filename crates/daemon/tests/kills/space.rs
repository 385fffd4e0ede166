//! VMs on a file system that gets full: those over their share wait, none gets an error, and all
//! go on when there is space.

use crate::guest::{self, BASE, GUEST, console, create_from, create_paused, used};
use crate::living::Living;
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, bail, ensure};
use dayfly_api::types::{PauseReason, Vm, VmState};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
/// The guaranteed share of each VM, which a guest with 256 slots does not use up.
const SHARE_BYTES: u64 = 2 * MIB;
/// As in [`OPTIONS`].
const RESERVE_BYTES: u64 = 4 * MIB;
const OPTIONS: [&str; 6] = ["--disk-share", "2M", "--disk-reserve", "4M", "--run-reserve", "0"];
/// A guest that writes the same few slots over and over, and its snapshot.
const SMALL: &str = "small";
/// Free space that is left for all before the guests fill the disk.
const LEFT_BYTES: u64 = 8 * MIB;

/// Runs `test` with the path of a file system of `bytes`, which only this thread and what it starts
/// can see. It is gone when they have ended, whether they fail or not.
fn on_a_file_system(bytes: u64, test: impl AsyncFnOnce(PathBuf) -> Result<()>) -> Result<()> {
    // SAFETY: unshare(2) of the mount namespace affects only this thread and what it starts.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
        .context("this test needs CAP_SYS_ADMIN")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let folder = tempfile::Builder::new().prefix("space").tempdir_in("/dev/shm")?;
    let (image, mounted) = (folder.path().join("image"), folder.path().join("m"));
    fallocate(File::create(&image)?, FallocateFlags::empty(), 0, bytes)?;
    std::fs::create_dir(&mounted)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&image))?;
    run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mounted))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(test(mounted.join("s")));
    drop(runtime);
    run(Command::new("umount").arg("--lazy").arg(&mounted))?;
    result
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Free bytes for users without privileges.
fn free(path: &Path) -> Result<u64> {
    let of = rustix::fs::statvfs(path)?;
    Ok(of.f_bavail * of.f_frsize)
}

/// What takes the rest of the file system, except `left` bytes.
fn fill(bed: &Testbed, left: u64) -> Result<PathBuf> {
    let path = bed.state().with_file_name("other");
    let file = File::options().create(true).append(true).open(&path)?;
    let bytes = free(&bed.state())?.saturating_sub(left);
    fallocate(&file, FallocateFlags::empty(), file.metadata()?.len(), bytes.max(4096))?;
    Ok(path)
}

/// The VMs of a test.
struct Vms {
    /// Guests that write ever more blocks.
    large: Vec<Living>,
    /// Guests that stay within their share.
    small: Vec<Living>,
}

impl Vms {
    async fn new(bed: &Testbed, large: usize, small: usize) -> Result<Self> {
        let mut vms = Self { large: Vec::new(), small: Vec::new() };
        for n in 0..large {
            let vm = create_paused(bed, &format!("large{n}")).await?;
            vms.large.push(Living::new(vm, bed)?);
        }
        for n in 0..small {
            vms.small.push(Living::new(create_from(bed, SMALL, &format!("small{n}")).await?, bed)?);
        }
        Ok(vms)
    }

    fn all(&self) -> impl Iterator<Item = &Living> {
        self.large.iter().chain(&self.small)
    }

    /// All VMs as they are listed. Checks that none has an error, and that those within their share
    /// run.
    async fn listed(&self, bed: &Testbed) -> Result<BTreeMap<String, Vm>> {
        let listed = bed.client.vms(true).await?;
        let by_id: BTreeMap<String, Vm> =
            listed.into_iter().map(|vm| (vm.id.to_string(), vm)).collect();
        for vm in self.all() {
            let found = by_id.get(&vm.word()).context("a VM is not listed")?;
            ensure!(found.exit.is_none(), "VM {} ended: {:?}", found.name, found.exit);
            let said = console(bed, vm.id);
            ensure!(!said.contains("failed"), "VM {}: its guest: {said:?}", found.name);
        }
        for vm in &self.small {
            let found = &by_id[&vm.word()];
            ensure!(found.paused_for.is_none(), "VM {} within its share: {found:?}", found.name);
        }
        Ok(by_id)
    }

    /// Waits until each VM over its share waits. Which waits first is not checked here, because the
    /// daemon asks one VMM after the other; `dayfly_vmm::disk::room` has the tests of that.
    async fn wait(&self, bed: &Testbed) -> Result<()> {
        until("VMs over their share wait", async || {
            let listed = self.listed(bed).await?;
            let waits = |vm: &Living| {
                listed.get(&vm.word()).is_some_and(|vm| {
                    vm.state == VmState::Paused && vm.paused_for == Some(PauseReason::NoSpace)
                })
            };
            for vm in self.large.iter().filter(|vm| waits(vm)) {
                let used = used(bed, vm.id);
                // The write that waits is not counted.
                ensure!(used + MIB > SHARE_BYTES, "VM {} waits with {used} bytes", vm.word());
            }
            Ok(self.large.iter().all(waits))
        })
        .await
    }

    /// Checks that each guest goes on, and that a clone of each finds all that it has written.
    async fn are_right(&self, bed: &Testbed) -> Result<()> {
        for vm in self.all() {
            vm.runs_on(bed).await?;
        }
        self.listed(bed).await?;
        // Guests spin; those that are not checked leave the CPUs to the others.
        for vm in self.all() {
            bed.client.pause(&vm.word()).await?;
        }
        for vm in self.all() {
            bed.client.unpause(&vm.word()).await?;
            vm.can_be_forked(bed).await?;
            bed.client.pause(&vm.word()).await?;
        }
        Ok(())
    }
}

/// Checks that what needs space is refused, with the reason and the next step. Returns the text.
async fn is_refused(result: Result<()>, words: &[&str]) -> Result<String> {
    let Err(error) = result else { bail!("expected a refusal because of {words:?}") };
    let text = format!("{error:#}");
    for piece in words {
        ensure!(text.contains(piece), "expected {piece:?} in {text:?}");
    }
    Ok(text)
}

async fn fills_up(state: PathBuf, large: usize, small: usize) -> Result<()> {
    let mut bed = Testbed::with_state(state)?;
    bed.options = OPTIONS.into();
    guest::store(&bed, GUEST, 'c')?;
    guest::store(&bed, SMALL, 's')?;
    bed.start().await?;
    guest::base(&bed, GUEST, BASE).await?;
    guest::base(&bed, SMALL, SMALL).await?;
    let vms = Vms::new(&bed, large, small).await?;
    let kept = SHARE_BYTES * (large + small) as u64;
    let other = fill(&bed, kept + LEFT_BYTES)?;
    for vm in &vms.large {
        bed.client.unpause(&vm.word()).await?;
    }
    vms.wait(&bed).await?;
    // They wait for the shares that were unused when they asked, and try again once those are used.
    until("less than the reserve is left beside the shares", async || {
        let used = vms.small.iter().map(|vm| used(&bed, vm.id).min(SHARE_BYTES));
        let unused = SHARE_BYTES * small as u64 - used.sum::<u64>();
        Ok(free(&bed.state())? < unused + RESERVE_BYTES)
    })
    .await?;

    let (one, free_small) = (&vms.large[0], &vms.small[0]);
    // A VM that waits tries again now and then, and is running then.
    until("the refusal names the VM that waits", async || {
        let refused = guest::snapshot(&bed, one.id, "refused").await;
        let text = is_refused(refused, &["store gc"]).await?;
        Ok(["large0", "no space", "share"].iter().all(|word| text.contains(word)))
    })
    .await?;
    let refused = guest::snapshot(&bed, free_small.id, "refused").await;
    is_refused(refused, &["a snapshot", "free on the file system of", "store gc"]).await?;
    let refused = guest::clone(&bed, BASE, "refused").await.map(drop);
    is_refused(refused, &["share", "store gc", "--disk-share"]).await?;
    // A request of the user beside the wait.
    bed.client.pause(&one.word()).await?;
    ensure!(one.listed(&bed).await?.paused_for == Some(PauseReason::Request));
    bed.client.unpause(&one.word()).await?;
    // The next daemon finds the VMs as they are.
    bed.kill()?;
    bed.start().await?;
    vms.wait(&bed).await.context("with the next daemon")?;
    free_small.runs_on(&bed).await?;

    std::fs::remove_file(other)?;
    vms.are_right(&bed).await?;
    bed.stop()
}

fn with_log(result: Result<()>) -> Result<()> {
    result.inspect_err(|error| println!("{error:#}"))
}

#[test]
fn vms_over_their_share_wait_on_a_full_disk_and_all_go_on_without_an_error() -> Result<()> {
    with_log(on_a_file_system(160 * MIB, |state| fills_up(state, 3, 2)))
}

#[test]
#[ignore = "minutes: make long"]
fn twenty_vms_on_a_full_disk_go_on_without_an_error() -> Result<()> {
    with_log(on_a_file_system(512 * MIB, |state| fills_up(state, 14, 6)))
}
