//! Why the network step of an identity failed.

use rustix::io::Errno;
use std::net::IpAddr;
use std::path::PathBuf;

/// Why the network step of an identity failed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// There is no interface.
    #[error("expected an interface of the driver {driver} in {folder}, got none")]
    Missing {
        /// The driver's name.
        driver: &'static str,
        /// The folder that lists interfaces.
        folder: PathBuf,
    },
    /// More than one interface qualifies.
    #[error("expected one interface of the driver {driver}, got {first} and {second}")]
    Many {
        /// The driver's name.
        driver: &'static str,
        /// The first interface's name.
        first: String,
        /// Another interface's name.
        second: String,
    },
    /// A netlink socket cannot be opened.
    #[error("rtnetlink: {0}")]
    Netlink(Errno),
    /// The kernel refused to change the interface.
    #[error("interface {name}: {what}: {errno}")]
    Interface {
        /// The interface's name.
        name: String,
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel refused to end connections.
    #[error("sock_diag: {what}: {errno}")]
    Sockets {
        /// The operation.
        what: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel cannot end connections, and some must be ended.
    #[error(
        "sock_diag: expected a kernel that ends connections (tcp_diag, \
         CONFIG_INET_DIAG_DESTROY) or none from addresses that were another machine's, \
         got {errno} and {count} connections, the first from {first}"
    )]
    Unable {
        /// Number of connections.
        count: usize,
        /// The local address of the first one.
        first: IpAddr,
        /// The kernel's error.
        errno: Errno,
    },
    /// A file of /sys or /proc cannot be read or written.
    #[error("{path}: {errno}")]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
}

impl NetworkError {
    /// The kernel's error, if there is one.
    #[must_use]
    pub const fn errno(&self) -> Option<Errno> {
        match self {
            Self::Missing { .. } | Self::Many { .. } => None,
            Self::Netlink(errno)
            | Self::Interface { errno, .. }
            | Self::Sockets { errno, .. }
            | Self::Unable { errno, .. }
            | Self::File { errno, .. } => Some(*errno),
        }
    }
}
