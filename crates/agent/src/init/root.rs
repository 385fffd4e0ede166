//! The root disk: waiting for it, checking it, mounting it.

use super::cmdline::Options;
use super::error::BootError;
use super::modules::Loaded;
use super::mount::{NEW_ROOT, mount_new};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, Mode, OFlags, inotify};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use std::ffi::CString;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit for the device to appear after its driver was loaded.
const TIMEOUT: Duration = Duration::from_secs(30);
/// ext4's superblock: `s_magic` at byte 56 of the block at byte 1024
/// (Documentation/filesystems/ext4).
const EXT4_MAGIC_AT: u64 = 1024 + 56;
const EXT4_MAGIC: u16 = 0xef53;

/// Shows that the root is mounted at [`NEW_ROOT`].
pub(super) struct Mounted {
    pub(super) read_only: bool,
}

pub(super) fn mount(_loaded: Loaded, options: &Options) -> Result<Mounted, BootError> {
    wait_for(&options.root)?;
    if options.kind == "ext4" {
        check_ext4(&options.root)?;
    }
    let failed =
        |errno| BootError::Mount { kind: options.kind.clone(), at: NEW_ROOT.into(), errno };
    let flags = CString::new(options.flags.as_str()).map_err(|_| failed(Errno::INVAL))?;
    // noatime, because a clone pays for every block that it writes: a read must not write.
    let mut how = MountFlags::NOATIME;
    how.set(MountFlags::RDONLY, options.read_only);
    mount_new(&options.root.to_string_lossy(), NEW_ROOT, &options.kind, how, &flags)?;
    Ok(Mounted { read_only: options.read_only })
}

fn is_block(path: &Path) -> Result<bool, BootError> {
    match rustix::fs::stat(path) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice => Ok(true),
        Ok(stat) => Err(BootError::BadRoot {
            device: path.to_owned(),
            expected: "expected a block device",
            got: format!("{:?}", FileType::from_raw_mode(stat.st_mode)),
        }),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Err(errno) => Err(BootError::File { path: path.to_owned(), what: "look at", errno }),
    }
}

/// Waits for the device's node. The watch is set before the first check, so the node cannot appear
/// unnoticed in between.
pub(super) fn wait_for(device: &Path) -> Result<(), BootError> {
    let folder = Path::new("/dev");
    let failed = |errno| BootError::File { path: folder.to_owned(), what: "watch", errno };
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).map_err(failed)?;
    inotify::add_watch(&watch, folder, inotify::WatchFlags::CREATE).map_err(failed)?;
    let until = Instant::now() + TIMEOUT;
    let mut events = [0; 4096];
    while !is_block(device)? {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let (device, there) = (device.to_owned(), block_devices());
            return Err(BootError::NoRoot { device, seconds: TIMEOUT.as_secs(), there });
        }
        let mut fds = [PollFd::new(&watch, PollFlags::IN)];
        match poll(&mut fds, Some(&crate::wire::timespec(left))) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => {
                let _ = rustix::io::read(&watch, &mut events);
            }
            Err(errno) => return Err(failed(errno)),
        }
    }
    Ok(())
}

fn block_devices() -> String {
    let names: Vec<String> = std::fs::read_dir("/sys/class/block")
        .map(|folder| {
            folder
                .filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()))
                .collect()
        })
        .unwrap_or_default();
    if names.is_empty() { "no block devices".into() } else { names.join(", ") }
}

/// Checks for ext4, because mount(2) reports only EINVAL for another content.
fn check_ext4(device: &Path) -> Result<(), BootError> {
    let failed = |what| move |errno| BootError::File { path: device.to_owned(), what, errno };
    let file = rustix::fs::open(device, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(failed("open"))?;
    let mut magic = [0; 2];
    let n = rustix::io::pread(&file, &mut magic, EXT4_MAGIC_AT)
        .map_err(failed("read the superblock"))?;
    let got = u16::from_le_bytes(magic);
    if n == magic.len() && got == EXT4_MAGIC {
        return Ok(());
    }
    let got =
        if n < magic.len() { "a disk that ends before".to_owned() } else { format!("{got:#06x}") };
    let expected = "expected ext4's magic number 0xef53 at byte 1080";
    Err(BootError::BadRoot { device: device.to_owned(), expected, got })
}
