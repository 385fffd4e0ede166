//! What epoll reports to the thread of all devices but the disks: 64-bit tokens, one for each
//! source of events.

/// epoll token of the eventfd that wakes the thread to stop it.
pub const WAKE: u64 = 0xffff;

/// epoll token of the vsock listener.
pub const LISTENER: u64 = 0xfffe;

/// epoll token of the network device's tap.
pub const TAP: u64 = 0xfffd;

/// First epoll token for sockets of vsock connections.
pub const FIRST_SOCKET: u64 = 0x1_0000;

/// epoll token of a queue's kick.
pub const fn kick_token(slot: usize, queue: usize) -> u64 {
    (slot as u64) << 8 | queue as u64
}
