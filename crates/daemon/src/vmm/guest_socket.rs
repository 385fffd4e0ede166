//! Binds the guest request socket, on which a guest asks its host for forks of itself. An operation
//! serves the requests, because they create VMs.

use crate::base::error::{ApiError, Outcome};
use crate::vm::Vm;
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixListener as StdListener;
use tokio::net::UnixListener;

/// Binds the guest request socket of `vm`, and gives it to the user as which the VMM connects to
/// it. Must be called in a Tokio runtime.
///
/// # Errors
/// The socket cannot be made.
pub fn listen(vm: &Vm) -> Outcome<UnixListener> {
    let path = vm.dir.guest_socket();
    let listen = || -> io::Result<UnixListener> {
        // An earlier daemon may have left a socket.
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = StdListener::bind(&path)?;
        chown(&path, Some(vm.uid), Some(vm.uid))?;
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener)
    };
    listen().map_err(|e| ApiError::internal(format_args!("listening on {}: {e}", path.display())))
}
