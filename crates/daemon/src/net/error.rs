//! Why a VM gets no network.

use crate::base::config::RELAY_NAME;
use crate::base::error::ApiError;
use crate::base::prefix::Prefix;
use dayfly_api::types::ErrorCode;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

/// Why a VM gets no network.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NetError {
    /// This daemon has no network for VMs; the reason.
    #[error("network: this host has none for VMs: {0}")]
    None(Arc<str>),
    /// All addresses are in use.
    #[error("network {prefix}: expected a free address, all {taken} are taken")]
    Full {
        /// The network's addresses.
        prefix: Prefix,
        /// Number of addresses in use.
        taken: usize,
    },
    /// The packet filter's rules for the VM could not be set.
    #[error("network: what the VM may reach: {0}")]
    Rules(Arc<str>),
    /// An egress policy permits a range that no VM of this daemon reaches.
    #[error(
        "egress {0}: expected a range with public addresses, or one of `dayflyd --reach`; VMs of \
         this daemon do not reach it"
    )]
    OutOfReach(ipnet::Ipv4Net),
    /// The installation lacks a program.
    #[error(
        "publish: {}: expected the program {RELAY_NAME} beside dayfly-vmm, got none",
        .0.display()
    )]
    NoRelay(PathBuf),
    /// The VM has returned its address.
    #[error("network: the VM has ended")]
    Ended,
    /// The host refused a tap.
    #[error("network: a tap for {address}: {why}")]
    Tap {
        /// The tap's address.
        address: Ipv4Addr,
        /// Whether the tap exists already.
        busy: bool,
        /// The host's error.
        why: Arc<str>,
    },
}

impl From<NetError> for ApiError {
    fn from(e: NetError) -> Self {
        let code = match &e {
            NetError::None(_) | NetError::Ended => ErrorCode::State,
            NetError::OutOfReach(_) => ErrorCode::Invalid,
            NetError::Full { .. } => ErrorCode::Exhausted,
            NetError::Tap { .. } | NetError::Rules(_) | NetError::NoRelay(_) => ErrorCode::Internal,
        };
        Self::new(code, e)
    }
}
