//! Volumes: file systems whose server is on the host.
//!
//! ```text
//!  programs ─▶ kernel ─▶ /dev/fuse ─▶ relay ─▶ the request's connection ─▶ server on the host
//! ```
//!
//! The thread that serves a [`Request::Mount`](dayfly_api::agent::Request::Mount) mounts the file
//! system and then relays until the connection or the mount ends. A volume whose connection has
//! ended stays mounted, and the kernel answers programs with ENOTCONN, so that none of them writes
//! to the folder below by mistake. A clone has no such connection: when this machine becomes
//! another one, all volumes are unmounted lazily, and the host asks for the clone's volumes anew.
//!
//! Other threads of this agent use volumes too: archives, working directories of programs. A wait
//! for an answer of FUSE cannot be interrupted by SIGKILL. If this process were killed meanwhile,
//! the waiting thread would keep the device open, and the answer would never come. As PID 1 it
//! cannot be killed: its end ends the machine. As a child of the image's own init, only root of the
//! guest can kill it, and then only this guest's volumes hang, until its VM ends.

mod device;
mod mount;
mod relay;

pub use mount::MountError;
pub use relay::{RelayEnd, RelayError, relay};

use crate::wire::{Conn, WireError};
use dayfly_api::agent::{Failure, Reply};
use dayfly_units::sync::lock;
use mount::Mounted;
use std::os::fd::AsFd;
use std::sync::Mutex;

/// Most file systems that are mounted for the host under one identity. Those that have ended count.
const MOST: usize = 32;

/// The file systems that are mounted for the host.
#[derive(Debug, Default)]
pub struct Volumes(Mutex<Vec<Mounted>>);

impl Volumes {
    /// Serves a request to mount a file system: replies, and relays until it ends.
    ///
    /// # Errors
    /// [`WireError`] of the reply.
    pub fn serve(
        &self,
        conn: &mut Conn,
        path: &str,
        name: &str,
        read_only: bool,
    ) -> Result<(), WireError> {
        let device = match self.mount(path, name, read_only) {
            Ok(device) => device,
            Err(error) => return conn.reply(&Reply::Err(Failure::from(&error))),
        };
        conn.reply(&Reply::Ok)?;
        let early = conn.take_rest();
        match relay(conn.as_fd(), device.as_fd(), &early) {
            Ok(end) => crate::say!("volume {path}: {end}"),
            Err(error) => crate::say!("volume {path}: {error}"),
        }
        // The kernel ends the file system when its last descriptor is closed.
        drop(device);
        Ok(())
    }

    fn mount(
        &self,
        path: &str,
        name: &str,
        read_only: bool,
    ) -> Result<std::os::fd::OwnedFd, MountError> {
        let mut mounted = lock(&self.0);
        if mounted.len() >= MOST {
            return Err(MountError::Full(MOST));
        }
        let device = device::open()?;
        mounted.push(mount::mount(&device, path, name, read_only)?);
        Ok(device)
    }

    /// Unmounts all of them, when this machine has become another one. Programs that use one keep
    /// it, and get ENOTCONN.
    pub fn unmount(&self) {
        let all = std::mem::take(&mut *lock(&self.0));
        // The last one first, because it may be mounted below another.
        for mounted in all.iter().rev() {
            if let Err(why) = mounted.unmount() {
                crate::say!("volume {}: {why}", mounted.path.display());
            }
        }
    }
}
