//! Changes of the machine that the agent requests from the guest's kernel. They are behind a trait,
//! so that tests can run and fail each step of an identity or a shutdown without changing their
//! machine.

use crate::network::{self, NetworkError, Settings};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// `_IOW('R', 0x03, int[2])` of linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `_IO('R', 0x07)` of linux/random.h.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// Maximum bytes of entropy in one call.
pub const MAX_ENTROPY_BYTES: usize = 4096;

/// Operations that change the machine.
pub trait Kernel: Send + Sync {
    /// Mixes `bytes` into the random number generator, credits all of their bits, and reseeds the
    /// generator at once. (Otherwise credited entropy waits for the next reseed, up to five minutes
    /// later.)
    ///
    /// # Errors
    /// The kernel's error.
    fn reseed(&self, bytes: &[u8]) -> Result<(), Errno>;
    /// Sets the wall clock to `ns` nanoseconds since 1970.
    ///
    /// # Errors
    /// The kernel's error.
    fn set_clock(&self, ns: u64) -> Result<(), Errno>;
    /// Sets the hostname.
    ///
    /// # Errors
    /// The kernel's error.
    fn set_hostname(&self, name: &str) -> Result<(), Errno>;
    /// Gives the machine whose root is `root` its place on the network, or none:
    /// [`network::take_on`].
    ///
    /// # Errors
    /// [`NetworkError`].
    fn set_network(
        &self,
        root: &Path,
        new: Option<&Settings>,
        clone: bool,
    ) -> Result<(), NetworkError>;
    /// Ends the machine. Returns only if that fails.
    fn end(&self, reboot: bool);
}

/// The kernel that the agent runs on.
#[derive(Debug)]
pub struct Linux;

#[repr(C)]
struct RandPoolInfo {
    entropy_bits: libc::c_int,
    size_bytes: libc::c_int,
    bytes: [u8; MAX_ENTROPY_BYTES],
}

/// Opens the random device for its ioctls. A missing device gives an error.
fn random_device() -> Result<File, Errno> {
    File::open(Path::new("/dev/urandom")).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
}

/// The implementation of [`Kernel::reseed`].
///
/// # Errors
/// `INVAL` for no bytes or more than [`MAX_ENTROPY_BYTES`], `PERM` without CAP_SYS_ADMIN.
pub fn reseed(bytes: &[u8]) -> Result<(), Errno> {
    if bytes.is_empty() || bytes.len() > MAX_ENTROPY_BYTES {
        return Err(Errno::INVAL);
    }
    let size = i32::try_from(bytes.len()).map_err(|_| Errno::INVAL)?;
    let mut info =
        RandPoolInfo { entropy_bits: size * 8, size_bytes: size, bytes: [0; MAX_ENTROPY_BYTES] };
    info.bytes[..bytes.len()].copy_from_slice(bytes);
    let device = random_device()?;
    // SAFETY: RNDADDENTROPY reads a `rand_pool_info`: two ints and `size_bytes` bytes, which `info`
    // holds.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const info) } != 0 {
        return Err(last_errno());
    }
    // SAFETY: RNDRESEEDCRNG takes no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) } != 0 {
        return Err(last_errno());
    }
    Ok(())
}

/// The error of the libc call that has just failed on this thread.
#[must_use]
pub fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

impl Kernel for Linux {
    fn reseed(&self, bytes: &[u8]) -> Result<(), Errno> {
        reseed(bytes)
    }

    fn set_clock(&self, ns: u64) -> Result<(), Errno> {
        let seconds = i64::try_from(ns / 1_000_000_000).map_err(|_| Errno::INVAL)?;
        let nanos = i64::try_from(ns % 1_000_000_000).map_err(|_| Errno::INVAL)?;
        let time = rustix::time::Timespec { tv_sec: seconds, tv_nsec: nanos };
        rustix::time::clock_settime(rustix::time::ClockId::Realtime, time)
    }

    fn set_hostname(&self, name: &str) -> Result<(), Errno> {
        rustix::system::sethostname(name.as_bytes())
    }

    fn set_network(
        &self,
        root: &Path,
        new: Option<&Settings>,
        clone: bool,
    ) -> Result<(), NetworkError> {
        network::take_on(root, new, clone)
    }

    fn end(&self, reboot: bool) {
        crate::power::end(reboot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_is_taken_by_the_real_device_and_bounded() {
        assert_eq!(reseed(&[]), Err(Errno::INVAL));
        assert_eq!(reseed(&[7; MAX_ENTROPY_BYTES + 1]), Err(Errno::INVAL));
        if rustix::process::geteuid().is_root() {
            assert_eq!(reseed(&[7; 64]), Ok(()));
            assert_eq!(reseed(&[7; MAX_ENTROPY_BYTES]), Ok(()));
        }
    }
}
