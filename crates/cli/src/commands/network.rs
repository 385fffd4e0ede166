//! Options for a VM's network access.

use dayfly_api::types::{NetworkRequest, Publish};
use dayfly_units::{Bytes, Egress, Name};
use std::net::IpAddr;

/// Network options of the commands that create VMs.
#[derive(Debug, Clone, clap::Args)]
pub struct NetworkArgs {
    /// Publish a port of the VM at a port of the host: [ADDRESS:]HOSTPORT:PORT, or ranges of both;
    /// may be repeated. ADDRESS is 127.0.0.1 by default; 0.0.0.0 means all IPv4 addresses
    #[arg(short, long, value_name = "PORTS", value_parser = publish)]
    publish: Vec<Ports>,
    /// Join the network NAME, whose VMs reach each other by address and by name. Without this
    /// option the VM reaches the internet and no other VM; with `none` it has no address
    #[arg(long, value_name = "NAME", default_value = "default", hide_default_value = true)]
    network: Name,
    /// Block the internet: the VM reaches only the VMs of its --network. The same as --egress none
    #[arg(long, conflicts_with = "egress")]
    closed: bool,
    #[command(flatten)]
    egress: EgressArg,
    /// Limit for sending, in bytes per second, such as 10M
    #[arg(long, value_name = "BYTES")]
    send_rate: Option<Bytes>,
    /// Limit for receiving, in bytes per second
    #[arg(long, value_name = "BYTES")]
    receive_rate: Option<Bytes>,
}

/// The egress policy.
#[derive(Debug, Clone, clap::Args)]
pub struct EgressArg {
    /// What the VM reaches outside its --network: none, internet, or a list of rules
    /// TARGET[:tcp|udp|icmp][:PORTS], such as example.org:443,*.example.net,192.0.2.0/24:tcp:1-1023
    /// [default: as its snapshot or the VM that is forked; else internet]
    #[arg(long, value_name = "POLICY")]
    pub egress: Option<Egress>,
}

impl NetworkArgs {
    /// The options as a part of the API request.
    #[must_use]
    pub fn request(self) -> NetworkRequest {
        let named = !matches!(self.network.as_str(), "default" | "none");
        NetworkRequest {
            none: self.network.as_str() == "none",
            closed: self.closed,
            egress: self.egress.egress,
            network: named.then_some(self.network),
            publish: self.publish.into_iter().flat_map(|ports| ports.0).collect(),
            sends_bytes_per_second: self.send_rate.map(|rate| rate.0),
            receives_bytes_per_second: self.receive_rate.map(|rate| rate.0),
        }
    }
}

/// The ports of one `--publish`: one, or those of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ports(Vec<Publish>);

/// Parses `8080:80`, `127.0.0.1:8080:80`, `[::1]:8080:80` or `8000-8010:8000-8010`, each with or
/// without `/tcp`.
fn publish(text: &str) -> Result<Ports, String> {
    let wrong = || {
        format!(
            "expected [ADDRESS:]HOSTPORT:PORT, such as 8080:80, or ranges of one length, such as \
             8000-8010:8000-8010, got {text:?}"
        )
    };
    let ports = match text.rsplit_once('/') {
        Some((ports, "tcp")) => ports,
        Some((_, other)) => {
            return Err(format!("expected tcp, got {other:?}: nothing else is published"));
        }
        None => text,
    };
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong);
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => Ok(port(first)?..=port(last)?),
        None => port(text).map(|port| port..=port),
    };
    let (before, guest) = ports.rsplit_once(':').ok_or_else(wrong)?;
    let (host, on_host) = match before.rsplit_once(':') {
        Some((host, port)) => (Some(host.trim_start_matches('[').trim_end_matches(']')), port),
        None => (None, before),
    };
    let host = host.map(|host| host.parse::<IpAddr>().map_err(|_| wrong())).transpose()?;
    let (on_host, guest) = (range(on_host)?, range(guest)?);
    if on_host.len() != guest.len() || on_host.is_empty() {
        return Err(wrong());
    }
    let pairs = on_host.zip(guest);
    Ok(Ports(
        pairs.map(|(host_port, guest_port)| Publish { host, host_port, guest_port }).collect(),
    ))
}

/// Formats a published port for a table: `HOST:PORT->PORT`.
#[must_use]
pub fn shown(port: &Publish) -> String {
    format!("{}->{}", address(port), port.guest_port)
}

/// The address of a published port on the host: `HOST:PORT`.
#[must_use]
pub fn address(port: &Publish) -> String {
    match port.host {
        Some(IpAddr::V6(host)) => format!("[{host}]:{}", port.host_port),
        Some(host) => format!("{host}:{}", port.host_port),
        None => format!("127.0.0.1:{}", port.host_port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_and_shown() {
        let shown = |text| {
            let ports = publish(text).map(|ports| ports.0.iter().map(shown).collect::<Vec<_>>());
            ports.map(|ports| ports.join(" "))
        };
        let range = shown("[::1]:8000-8002:80-82/tcp").unwrap();
        assert_eq!(range, "[::1]:8000->80 [::1]:8001->81 [::1]:8002->82");
        assert_eq!(shown("8080:80").unwrap(), "127.0.0.1:8080->80");
        assert_eq!(shown("127.0.0.1:8080:80/tcp").unwrap(), "127.0.0.1:8080->80");
        assert_eq!(shown("[::1]:8080:80").unwrap(), "[::1]:8080->80");
        for bad in [
            "",
            "80",
            ":80",
            "80:",
            "0:80",
            "80:0",
            "x:80:80",
            "8080:80/udp",
            "65536:80",
            "1:2:3:4",
            "80-81:80",
            "81-80:81-80",
            "80-:80-",
            "0-1:0-1",
        ] {
            assert!(publish(bad).is_err(), "{bad:?}");
        }
    }
}
