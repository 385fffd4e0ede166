//! Host sockets whose connections are forwarded into the machine.

use crate::files::{self, FileError};
use dayfly_machine_init::{GUEST_ADDRESS, Slots, Token, join_streams, widen};
use std::fs;
use std::io;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// Pause before the next accept if no descriptor is left.
const PAUSE: Duration = Duration::from_millis(50);

/// Listens on a socket with mode 0600, so that only this user can connect.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, FileError> {
    files::remove(path)?;
    let listener = UnixListener::bind(path).map_err(|e| FileError::new("binding", path, e))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(|e| FileError::new("setting the mode of", path, e))?;
    Ok(listener)
}

/// Forwards each connection of a host socket to a port of the machine, at most `most` at a time.
pub(crate) fn forward(listener: UnixListener, port: u16, token: &Token, most: usize) {
    let (token, slots) = (token.clone(), Slots::new(most));
    std::thread::spawn(move || {
        loop {
            let slot = slots.take();
            let Ok((stream, _)) = listener.accept() else {
                // Out of descriptors: connections that end will free some.
                std::thread::sleep(PAUSE);
                continue;
            };
            let token = token.clone();
            let thread = std::thread::Builder::new().stack_size(256 << 10);
            drop(thread.spawn(move || {
                let _slot = slot;
                join(&stream, port, &token)
            }));
        }
    });
}

fn join(stream: &UnixStream, port: u16, token: &Token) -> io::Result<()> {
    let mut machine = TcpStream::connect((GUEST_ADDRESS, port))?;
    machine.set_nodelay(true)?;
    token.send(&mut machine)?;
    widen(stream);
    widen(&machine);
    join_streams(stream, &machine)
}
