//! The disk with all modules of this kernel, at the place where modprobe(8) looks.
//!
//! Only the folder of this kernel's release is covered, so modules of other kernels stay visible.
//! The mount is made after the switch of the root, so that absolute links of the image, such as
//! `/lib`, lead into the image. A machine that cannot mount the disk works without its modules.

use super::root::wait_for;
use rustix::fs::Mode;
use rustix::mount::MountFlags;
use std::path::Path;

/// Flags of the mount. Nothing on the disk is a program or a device.
const FLAGS: MountFlags = MountFlags::RDONLY
    .union(MountFlags::NOSUID)
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC)
    .union(MountFlags::NOATIME);

/// Mounts the modules on `device` at `/lib/modules/RELEASE`. An error is a line on the console.
pub(super) fn mount(device: &Path) {
    let uname = rustix::system::uname();
    let place = format!("/lib/modules/{}", uname.release().to_string_lossy());
    if let Err(why) = mount_at(device, &place) {
        crate::say!("{place}: no modules can be loaded: {why}");
    }
}

fn mount_at(device: &Path, place: &str) -> Result<(), String> {
    wait_for(device).map_err(|error| error.to_string())?;
    // A folder that is there keeps its attributes; the error of a missing one is the mount's.
    for folder in ["/lib", "/lib/modules", place] {
        let _ = rustix::fs::mkdir(folder, Mode::from_raw_mode(0o755));
    }
    rustix::mount::mount(device, place, "ext4", FLAGS, c"")
        .map_err(|errno| format!("mount: {errno}"))
}
