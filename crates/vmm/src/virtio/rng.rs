//! virtio-rng (virtio 1.2 section 5.4): random bytes from the host's kernel.
//!
//! The device keeps no bytes between requests, so clones of one snapshot get different bytes.

use super::interrupt::Interrupt;
use super::ring::{Broken, Ring};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

/// VIRTIO_ID_RNG.
pub const DEVICE_ID: u32 = VIRTIO_ID_RNG;
/// One queue of 16 descriptors.
pub const QUEUES: &[u16] = &[16];
/// Most bytes given to one request; the driver asks again for more.
pub const MAX_BYTES: usize = 4096;

/// Serves requests until there are none or `stop` returns true. Returns whether requests may be
/// left.
///
/// # Errors
/// [`Broken`], also for a request without a writable buffer.
pub fn serve(
    ring: &mut Ring<'_, '_>,
    interrupt: &Interrupt,
    stop: &dyn Fn() -> bool,
) -> Result<bool, Broken> {
    let mut bytes = [0; MAX_BYTES];
    loop {
        ring.hush()?;
        while let Some(chain) = ring.pop()? {
            if chain.writable.is_empty() || !chain.readable.is_empty() {
                return Err(Broken::Chain {
                    head: chain.head,
                    what: "expected writable buffers only",
                });
            }
            let wanted = &mut bytes[..chain.writable.len().min(MAX_BYTES)];
            // A direct system call: in a static binary, crate getrandom finds no libc symbol and
            // opens /dev/random, which the jail does not contain. After a failure or a short answer
            // the driver gets fewer bytes, and reports that to its caller.
            let got = rustix::rand::getrandom(&mut *wanted, rustix::rand::GetRandomFlags::empty())
                .unwrap_or(0);
            let given = chain.writable.copy_from(&wanted[..got]);
            wanted.fill(0);
            ring.push(chain.head, u32::try_from(given).unwrap_or_default())?;
            ring.signal(interrupt)?;
            if stop() {
                return Ok(true);
            }
        }
        if !ring.listen()? {
            return Ok(false);
        }
    }
}
