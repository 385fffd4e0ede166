//! The machine's control ports: their listeners, and the check of each connection's token.
//!
//! The Ethernet interface of the link to the supervisor is moved into a network namespace that has
//! only this interface and the listeners. No thread is in that namespace, so it lives as long as
//! the listeners. The VMs' traffic arrives in the first namespace, from which no interface and no
//! route leads to the ports (`dayfly_machine_init`'s `proto`).

use crate::boot::{BootError, say, wait_for};
use dayfly_machine_init::{
    API_PORT, CONTROL_MAC, EXEC_PORT, GUEST_ADDRESS, GUEST_MASK, InterfaceMover, PORTS_PORT,
    RELAY_PORT, Slots, TOKEN_DEADLINE, Token, interface_of, set_address, set_up, widen,
};
use rustix::thread::UnshareFlags;
use std::fs::File;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Upper limit for connections that wait for accept.
const BACKLOG: i32 = 1024;
/// Pause before the next accept if no descriptor or memory is left.
const PAUSE: Duration = Duration::from_millis(50);

/// The sockets that listen in the control namespace.
pub(crate) struct Listeners {
    pub(crate) api: TcpListener,
    pub(crate) exec: TcpListener,
    pub(crate) ports: TcpListener,
    pub(crate) relay: TcpListener,
}

/// Makes the control namespace. The caller must do this before any other socket listens on an
/// interface.
pub(crate) fn network() -> Result<Listeners, BootError> {
    set_up("lo").map_err(|e| BootError::new("interface lo", e))?;
    // The thread ends afterwards, because a process that it started would be in its namespace too.
    let made = std::thread::spawn(namespace).join();
    made.unwrap_or_else(|_| Err(BootError::new("control namespace", io::Error::other("panicked"))))
}

fn namespace() -> Result<Listeners, BootError> {
    // /sys shows the namespace in which it was mounted, which is the first one.
    let name = wait_for("the interface of the control link", || interface_of(CONTROL_MAC))?;
    let mover = InterfaceMover::new().map_err(|e| BootError::new("netlink socket", e))?;
    let step = "control namespace";
    // SAFETY: unshare is unsafe because it can split the descriptor table; NEWNET leaves that table
    // alone.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
        .map_err(|e| BootError::new(step, e))?;
    let here = File::open("/proc/thread-self/ns/net").map_err(|e| BootError::new(step, e))?;
    let moving = format!("moving interface {name} into the control namespace");
    wait_for(&moving, || mover.move_to(&name, &here))?;
    let step = |e| BootError::new(format!("interface {name}"), e);
    set_address(&name, GUEST_ADDRESS, GUEST_MASK).map_err(step)?;
    set_up(&name).map_err(step)?;
    Ok(Listeners {
        api: listener(API_PORT)?,
        exec: listener(EXEC_PORT)?,
        ports: listener(PORTS_PORT)?,
        relay: listener(RELAY_PORT)?,
    })
}

fn listener(port: u16) -> Result<TcpListener, BootError> {
    let fail = |e: io::Error| BootError::new(format!("TCP port {port}"), e);
    let listener = TcpListener::bind((GUEST_ADDRESS, port)).map_err(fail)?;
    // A second listen lengthens the library's queue: a SYN that finds the queue full is repeated
    // only after a second.
    rustix::net::listen(&listener, BACKLOG).map_err(|e| fail(e.into()))?;
    Ok(listener)
}

/// Serves connections that begin with the token, at most `most` at a time. Other connections are
/// closed without an answer.
pub(crate) fn serve(
    listener: TcpListener,
    token: Token,
    most: usize,
    serve: impl Fn(TcpStream) + Send + Sync + 'static,
) {
    let (serve, slots) = (Arc::new((serve, token)), Slots::new(most));
    std::thread::spawn(move || {
        loop {
            let slot = slots.take();
            let Ok((stream, _)) = listener.accept() else {
                // Out of descriptors or memory: connections that end will free some.
                std::thread::sleep(PAUSE);
                continue;
            };
            drop(stream.set_nodelay(true));
            widen(&stream);
            let serve = Arc::clone(&serve);
            let thread = std::thread::Builder::new().stack_size(256 << 10);
            let run = move || {
                let _slot = slot;
                match serve.1.admit(&stream, TOKEN_DEADLINE) {
                    Ok(()) => serve.0(stream),
                    Err(e) => say(&format!("a connection without the token was closed: {e}")),
                }
            };
            if let Err(e) = thread.spawn(run) {
                say(&format!("a connection of the host: {e}"));
            }
        }
    });
}
