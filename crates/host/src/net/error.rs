//! Why a network operation failed.

use super::netlink::NetlinkError;
use std::io;
use std::path::PathBuf;

/// Why a network operation failed.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The kernel refused a message.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// A system call failed.
    #[error("{0}")]
    Call(&'static str, #[source] io::Error),
    /// A file operation failed.
    #[error("{what} {}", path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An interface name is invalid.
    #[error("interface {0:?}: expected a name of 1 to 15 bytes without '/' or spaces")]
    Name(String),
    /// The network's prefix length is out of range, or its address is not the first of the prefix.
    #[error("network {0}/{1}: expected the first of its addresses, and 8 to 29 bits")]
    Addresses(std::net::Ipv4Addr, u8),
    /// An address is outside the network, or is reserved within it.
    #[error("address {0}: expected one of {1}/{2} that is neither its first two nor its last two")]
    Foreign(std::net::Ipv4Addr, std::net::Ipv4Addr, u8),
}

impl NetError {
    /// Whether the error means that an interface of the name exists already.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Call(_, source) if source.kind() == io::ErrorKind::ResourceBusy)
    }
}

pub(super) fn call(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> NetError {
    move |errno| NetError::Call(what, errno.into())
}

pub(super) fn file(
    what: &'static str,
    path: &std::path::Path,
) -> impl FnOnce(io::Error) -> NetError {
    let path = path.to_owned();
    move |source| NetError::File { what, path, source }
}
