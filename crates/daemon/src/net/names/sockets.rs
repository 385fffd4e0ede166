//! The service's sockets. There are several for each protocol, and the kernel chooses one by the
//! guest's address. So one guest's packets only fill the queue of one socket.

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind as bind_to, ipproto, listen, socket_with, sockopt,
};
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};

/// Number of sockets of each protocol; guests with consecutive addresses have different ones.
pub const SHARDS: u16 = 32;
/// Maximum number of connections that wait at one socket.
const BACKLOG: i32 = 128;

/// The sockets of the service.
#[derive(Debug)]
pub struct Sockets {
    /// Sockets for packets.
    pub(super) udp: Vec<UdpSocket>,
    /// Sockets for connections.
    pub(super) tcp: Vec<TcpListener>,
}

/// Binds the sockets at this address, in the calling thread's namespace.
///
/// # Errors
/// The address is in use or not available.
pub fn bind(at: SocketAddr) -> io::Result<Sockets> {
    let mut sockets = Sockets { udp: Vec::new(), tcp: Vec::new() };
    for shard in 0..SHARDS {
        let udp = socket(SocketType::DGRAM, ipproto::UDP, at)?;
        let tcp = socket(SocketType::STREAM, ipproto::TCP, at)?;
        listen(&tcp, BACKLOG)?;
        // The filter belongs to the whole group. It is attached to the first member, before packets
        // can reach another.
        if shard == 0 {
            choose_by_source(&udp)?;
            choose_by_source(&tcp)?;
        }
        sockets.udp.push(udp.into());
        sockets.tcp.push(tcp.into());
    }
    Ok(sockets)
}

fn socket(
    kind: SocketType,
    protocol: rustix::net::Protocol,
    at: SocketAddr,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, kind, flags, Some(protocol))?;
    // As std does: closing connections of an earlier service do not prevent the bind.
    sockopt::set_socket_reuseaddr(&socket, kind == SocketType::STREAM)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    bind_to(&socket, &at)?;
    Ok(socket)
}

/// Makes the kernel deliver a packet to the socket of the group whose index is the source address
/// modulo [`SHARDS`] (socket(7), SO_ATTACH_REUSEPORT_CBPF; Documentation/networking/filter.rst).
/// For an index without a socket, the kernel chooses.
fn choose_by_source(socket: &OwnedFd) -> io::Result<()> {
    // SKF_NET_OFF of linux/filter.h: relative to the IP header, in which the source is at 12.
    const SOURCE: u32 = (-0x10_0000_i32 + 12).cast_unsigned();
    let step = |code: u32, k: u32| {
        let code = u16::try_from(code).map_err(io::Error::other)?;
        Ok::<_, io::Error>(libc::sock_filter { code, jt: 0, jf: 0, k })
    };
    let mut program = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, SOURCE)?,
        step(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, u32::from(SHARDS))?,
        step(libc::BPF_RET | libc::BPF_A, 0)?,
    ];
    let filter = libc::sock_fprog { len: 3, filter: program.as_mut_ptr() };
    let size = libc::socklen_t::try_from(size_of_val(&filter)).map_err(io::Error::other)?;
    // SAFETY: `filter` is a sock_fprog of `size` bytes that points to `len` instructions, which
    // live until the call returns; the kernel copies both.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast(),
            size,
        )
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
