//! Ports that programs of a guest listen on, and their protocols.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
#[cfg(feature = "openapi")]
use utoipa::ToSchema;

/// The protocol of a published port.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PortProtocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
}

impl PortProtocol {
    /// Whether this is [`Self::Tcp`].
    #[must_use]
    pub const fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp)
    }
}

impl fmt::Display for PortProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// A port of a guest with its protocol, as docker writes it: `80/tcp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GuestPort {
    /// The port, from 1 on.
    pub port: u16,
    /// Its protocol.
    pub protocol: PortProtocol,
}

impl fmt::Display for GuestPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.port, self.protocol)
    }
}

impl FromStr for GuestPort {
    type Err = String;

    /// Parses `80`, `80/tcp` or `53/udp`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (port, protocol) = match text.split_once('/') {
            Some((port, protocol)) => (port, protocol_of(protocol)?),
            None => (text, PortProtocol::Tcp),
        };
        let digits = port.bytes().all(|byte| byte.is_ascii_digit());
        let number = port.parse().ok().filter(|port| *port > 0 && digits);
        let got = || text.chars().take(40).collect::<String>();
        number.map(|port| Self { port, protocol }).ok_or_else(|| {
            format!("expected a port from 1 to 65535, such as 80 or 53/udp, got {:?}", got())
        })
    }
}

/// Parses `tcp` or `udp`, in either case of letters.
///
/// # Errors
/// Another protocol, by name.
pub fn protocol_of(text: &str) -> Result<PortProtocol, String> {
    match text.to_ascii_lowercase().as_str() {
        "tcp" => Ok(PortProtocol::Tcp),
        "udp" => Ok(PortProtocol::Udp),
        _ => {
            let got: String = text.chars().take(40).collect();
            Err(format!("expected the protocol tcp or udp, got {got:?}: no other is published"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_have_the_form_of_docker() {
        for (text, shown) in [("80", "80/tcp"), ("80/tcp", "80/tcp"), ("53/UDP", "53/udp")] {
            assert_eq!(text.parse::<GuestPort>().unwrap().to_string(), shown);
        }
        for bad in ["", "0", "+80", "65536", "80/sctp", "80/", "/tcp", "80/tcp/udp", "x"] {
            assert!(bad.parse::<GuestPort>().is_err(), "{bad:?}");
        }
    }
}
