//! virtio-rng (virtio 1.2 section 5.4): fresh bytes of the host's generator.
//!
//! Nothing is kept between requests, so clones of one snapshot get different bytes.

use super::interrupt::Interrupt;
use super::ring::{Broken, Ring};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

/// VIRTIO_ID_RNG.
pub const DEVICE_ID: u32 = VIRTIO_ID_RNG;
/// One queue of 16.
pub const QUEUES: &[u16] = &[16];
/// Most bytes given to one request; the driver asks again for more.
pub const MAX_BYTES: usize = 4096;

/// Serves requests until there are none or `stop` says so; returns whether some may be left.
///
/// # Errors
/// [`Broken`]: also where a request has no place for an answer.
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
                return Err(Broken::Chain { head: chain.head, what: "expected writable buffers only" });
            }
            let wanted = &mut bytes[..chain.writable.len().min(MAX_BYTES)];
            // The system call itself: crate getrandom finds no libc symbol in a static binary and opens /dev/random, which a jail
            // has not. A failure (or a short answer) gives the driver fewer bytes, and it says so to who asked.
            let got =
                rustix::rand::getrandom(&mut *wanted, rustix::rand::GetRandomFlags::empty()).unwrap_or(0);
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
