//! Starts the supervisor's children with no more of the host than they need.
//!
//! Every child loses the caller's environment, all descriptors except those passed to it, and the
//! way to new privileges. The child runs in the supervisor's process, mount and network namespaces.
//! The network namespace has no interface except the tap to the machine. Only the uplink's program
//! runs in the host's network namespace (`uplink`). If the supervisor is root, that program has a
//! user id that differs from QEMU's and owns nothing.
//!
//! A hostile kernel in the machine may take over QEMU. So, if the supervisor is root, QEMU also
//! runs in a [`Jail`]:
//!
//! | | |
//! |---|---|
//! | user | one per machine that owns no file, without groups and capabilities |
//! | files | read-only: /usr, kernel and initramfs; no /proc, /tmp, /run, no socket |
//! | devices | none, or /dev/kvm if KVM runs the machine |
//! | open | disk, two logs, tap, control line, the sockets of the shares and of the uplink |
//! | calls | `-sandbox on`: no exec, no change of user, scheduling or namespaces |
//!
//! A QEMU that was taken over can still use up the host's CPU and memory, fill the two logs, and
//! talk to each share's virtiofsd. If an ordinary user starts the machine, QEMU has that user's
//! access to files, because no other user id exists in its user namespace. virtiofsd runs as root
//! with few capabilities, and its root shows only the shared folder (its `sandbox=namespace`).

use crate::files::FileError;
use crate::probe::Accelerator;
use rustix::mount::{MountFlags, mount, mount_bind, mount_remount};
use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// First of the user ids of machines' QEMUs. The next [`USERS`] ids are those of the uplinks'
/// programs. Both ranges are beyond those of distributions, containers and dayfly's VMs (systemd's
/// UIDS-GIDS: 1879048192 to 2147483647 are unused).
const FIRST_USER: u32 = 0x7d00_0000;
/// Number of user ids of machines' QEMUs.
const USERS: u32 = 1 << 16;
/// Paths of kernel and initramfs inside the jail.
const KERNEL: &str = "/vmlinux";
const INITRAMFS: &str = "/initramfs";
/// Folders and links of the root that are needed to find programs and their libraries.
const ROOTS: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];

/// QEMU's view of the host: its root folder and its user id.
#[derive(Debug)]
pub(crate) struct Jail {
    root: CString,
    user: u32,
}

/// The user id for the machine in `folder`. Machines of one owner have different ids, so one
/// machine's QEMU cannot touch another's processes.
fn user_of(folder: &Path) -> u32 {
    let [low, high, ..] = *blake3::hash(folder.as_os_str().as_bytes()).as_bytes();
    FIRST_USER + u32::from(u16::from_le_bytes([low, high]))
}

/// Whether a `uid_map` or `gid_map` (user_namespaces(7)) contains the id.
fn maps(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(|n| n.parse::<u64>().unwrap_or(0));
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        let (first, count) = (first.unwrap_or(0), count.unwrap_or(0));
        (first..first.saturating_add(count)).contains(&u64::from(id))
    })
}

/// Binds a file or folder read-only, without the mounts below it.
pub(crate) fn bind_read_only(from: &Path, at: &Path) -> io::Result<()> {
    mount_bind(from, at)?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    Ok(mount_remount(at, flags, c"")?)
}

/// Binds a folder without the mounts below it.
pub(crate) fn bind_read_write(from: &Path, at: &Path) -> io::Result<()> {
    mount_bind(from, at)?;
    Ok(mount_remount(at, MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV, c"")?)
}

impl Jail {
    /// Makes the jail at `at`, a folder of the machine in `folder`, in the caller's mount
    /// namespace. An inner `Err` says why this host allows no jail; QEMU then runs without one.
    ///
    /// # Errors
    /// [`FileError`]
    pub(crate) fn make(
        folder: &Path,
        at: &Path,
        program: &Path,
        kernel: &Path,
        initramfs: &Path,
        accelerator: Accelerator,
    ) -> Result<Result<Self, String>, FileError> {
        let user = user_of(folder);
        let map = |path: &str| fs::read_to_string(path).unwrap_or_default();
        if !rustix::process::geteuid().is_root() {
            return Ok(Err("the supervisor is not root".to_owned()));
        }
        if !maps(&map("/proc/self/uid_map"), user) || !maps(&map("/proc/self/gid_map"), user) {
            return Ok(Err(format!("there is no user id {user} in this user namespace")));
        }
        if !program.canonicalize().is_ok_and(|path| path.starts_with("/usr")) {
            return Ok(Err(format!("{} is not below /usr", program.display())));
        }
        for path in [kernel, initramfs] {
            // The user can read the files through their group, and cannot change them.
            let given = chown(path, None, Some(user)).and_then(|()| set_mode(path, 0o640));
            if let Err(e) = given {
                return Ok(Err(format!("{}: giving it to group {user}: {e}", path.display())));
            }
        }
        let fail = |step: &'static str, path: &Path| {
            let path = path.to_owned();
            move |e: io::Error| FileError::new(step, &path, e)
        };
        let root = CString::new(at.as_os_str().as_bytes()).map_err(io::Error::from);
        let root = root.map_err(fail("using", at))?;
        fs::create_dir_all(at).map_err(fail("making", at))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", at, "tmpfs", flags, c"mode=0755,size=1m")
            .map_err(|e| fail("mounting tmpfs at", at)(e.into()))?;
        for name in ROOTS {
            let (from, to) = (Path::new("/").join(name), at.join(name));
            if let Ok(target) = fs::read_link(&from) {
                symlink(target, &to).map_err(fail("making", &to))?;
            } else if from.is_dir() {
                fs::create_dir(&to).map_err(fail("making", &to))?;
                // The supervisor's umask is meant for its sockets, so the mode is set explicitly.
                set_mode(&to, 0o755).map_err(fail("setting the mode of", &to))?;
                bind_read_only(&from, &to).map_err(fail("binding", &to))?;
            }
        }
        // The cache lists libraries outside the loader's default folders.
        let (cache, etc) = (Path::new("/etc/ld.so.cache"), at.join("etc"));
        if cache.exists() {
            fs::create_dir(&etc).map_err(fail("making", &etc))?;
            set_mode(&etc, 0o755).map_err(fail("setting the mode of", &etc))?;
            let to = etc.join("ld.so.cache");
            fs::copy(cache, &to).map_err(fail("copying", &to))?;
            set_mode(&to, 0o644).map_err(fail("setting the mode of", &to))?;
        }
        for (from, to) in [(kernel, KERNEL), (initramfs, INITRAMFS)] {
            let to = at.join(to.trim_start_matches('/'));
            fs::File::create(&to).map_err(fail("making", &to))?;
            bind_read_only(from, &to).map_err(fail("binding", &to))?;
        }
        if accelerator == Accelerator::Kvm {
            let dev = at.join("dev");
            make_kvm(&dev, user).map_err(fail("making kvm in", &dev))?;
        }
        mount_remount(at, flags | MountFlags::RDONLY, c"mode=0755,size=1m")
            .map_err(|e| fail("making read-only", at)(e.into()))?;
        Ok(Ok(Self { root, user }))
    }

    /// Paths of kernel and initramfs for a program in the jail.
    pub(crate) fn boot_files(&self) -> (PathBuf, PathBuf) {
        (KERNEL.into(), INITRAMFS.into())
    }
}

/// Makes the folder `dev` with a `/dev/kvm` that only `user` can open.
fn make_kvm(dev: &Path, user: u32) -> io::Result<()> {
    let number = fs::metadata("/dev/kvm")?.rdev();
    fs::create_dir(dev)?;
    // Unlike the jail's root, this file system has device files.
    mount("tmpfs", dev, "tmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, c"mode=0755,size=64k")?;
    let kvm = dev.join("kvm");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &kvm,
        rustix::fs::FileType::CharacterDevice,
        mode,
        number,
    )?;
    chown(&kvm, Some(user), Some(user))
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// The user id for the uplink's program of the machine in `folder`, if this process may use it. It
/// differs from QEMU's, so neither program can touch the other's process.
pub(crate) fn user_for(folder: &Path) -> Option<u32> {
    let user = user_of(folder) + USERS;
    let may = |map: &str| maps(&fs::read_to_string(map).unwrap_or_default(), user);
    let root = rustix::process::geteuid().is_root();
    (root && may("/proc/self/uid_map") && may("/proc/self/gid_map")).then_some(user)
}

/// Gives up root for a user id without groups. Async-signal-safe.
///
/// # Errors
/// The system's error.
pub(crate) fn become_user(user: u32) -> io::Result<()> {
    // SAFETY: setgroups reads no list of length 0; the other calls take no pointers.
    let results = unsafe {
        [
            libc::setgroups(0, std::ptr::null()),
            libc::setresgid(user, user, user),
            libc::setresuid(user, user, user),
        ]
    };
    if results.iter().any(|result| *result < 0) { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Locks the starting and the reaping of children. The supervisor reaps any child
/// (`waitpid(-1)`). A thread that starts a child meanwhile holds this lock until it has a pidfd,
/// because std panics if another thread has reaped a child whose exec failed.
pub(crate) fn lock_children() -> MutexGuard<'static, ()> {
    static CHILDREN: Mutex<()> = Mutex::new(());
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a child that inherits the descriptors `keep`, under the same numbers, and no others.
///
/// # Errors
/// The system's error, including errors of the child before its exec.
pub(crate) fn spawn(
    program: &Path,
    arguments: &[OsString],
    keep: &[RawFd],
    jail: Option<&Jail>,
) -> io::Result<Child> {
    command(program, arguments, keep, jail).spawn()
}

/// The command that [`spawn`] starts.
pub(crate) fn command(
    program: &Path,
    arguments: &[OsString],
    keep: &[RawFd],
    jail: Option<&Jail>,
) -> Command {
    let keep = keep.to_vec();
    let jail = jail.map(|jail| (jail.root.clone(), jail.user));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/");
    // SAFETY: all calls are async-signal-safe, and the memory that they point to was allocated
    // before the fork.
    unsafe {
        command.pre_exec(move || {
            let check = |result: libc::c_int| {
                if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            };
            for fd in &keep {
                check(libc::fcntl(*fd, libc::F_SETFD, 0))?;
            }
            if let Some((root, user)) = &jail {
                check(libc::chroot(root.as_ptr()))?;
                check(libc::chdir(c"/".as_ptr()))?;
                become_user(*user)?;
            }
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        });
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_machines_have_different_users_in_the_unused_range() {
        let (one, two) =
            (user_of(Path::new("/home/a/machine")), user_of(Path::new("/home/b/machine")));
        assert_ne!(one, two);
        for user in [one, two, one + USERS, two + USERS] {
            assert!((1_879_048_192..2_147_483_647).contains(&user), "{user}");
        }
    }

    #[test]
    fn a_user_namespace_that_lacks_the_user_is_noticed() {
        assert!(maps("         0          0 4294967295\n", FIRST_USER));
        assert!(!maps("         0       1000          1\n", FIRST_USER));
        assert!(!maps("0 100000 65536\n", FIRST_USER));
        assert!(maps("0 1000 1\n2097152000 100000 65536\n", FIRST_USER + 65_535));
        assert!(!maps("", 0) && !maps("x y z\n", 0));
    }
}
