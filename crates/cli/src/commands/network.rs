//! What a VM has of the network, as options.

use dayfly_api::types::{NetworkRequest, Publish};
use dayfly_units::Bytes;
use std::net::IpAddr;

/// Options of commands that make VMs.
#[derive(Debug, Clone, clap::Args)]
pub struct NetworkArgs {
    /// Reach a port of the VM at one of the host: [ADDRESS:]HOSTPORT:PORT; may be repeated
    #[arg(short, long, value_name = "PORTS", value_parser = publish)]
    publish: Vec<Publish>,
    /// default, or none: no address, and whatever it sends is lost
    #[arg(long, value_parser = ["default", "none"], default_value = "default", hide_possible_values = true)]
    network: String,
    /// Bytes a second that it may send, such as 10M
    #[arg(long, value_name = "BYTES")]
    send_rate: Option<Bytes>,
    /// Bytes a second that it may receive
    #[arg(long, value_name = "BYTES")]
    receive_rate: Option<Bytes>,
}

impl NetworkArgs {
    /// What is asked for.
    #[must_use]
    pub fn request(self) -> NetworkRequest {
        NetworkRequest {
            none: self.network == "none",
            publish: self.publish,
            sends_bytes_per_second: self.send_rate.map(|rate| rate.0),
            receives_bytes_per_second: self.receive_rate.map(|rate| rate.0),
        }
    }
}

/// `8080:80`, `127.0.0.1:8080:80`, `[::1]:8080:80`, each with `/tcp` or without.
fn publish(text: &str) -> Result<Publish, String> {
    let wrong = || format!("expected [ADDRESS:]HOSTPORT:PORT, such as 8080:80, got {text:?}");
    let ports = match text.rsplit_once('/') {
        Some((ports, "tcp")) => ports,
        Some((_, other)) => return Err(format!("expected tcp, got {other:?}: nothing else is published")),
        None => text,
    };
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong);
    let (before, guest) = ports.rsplit_once(':').ok_or_else(wrong)?;
    let (host, host_port) = match before.rsplit_once(':') {
        Some((host, port)) => (Some(host.trim_start_matches('[').trim_end_matches(']')), port),
        None => (None, before),
    };
    let host = host.map(|host| host.parse::<IpAddr>().map_err(|_| wrong())).transpose()?;
    Ok(Publish { host, host_port: port(host_port)?, guest_port: port(guest)? })
}

/// As `publish` reads it.
#[must_use]
pub fn shown(port: &Publish) -> String {
    match port.host {
        Some(IpAddr::V6(host)) => format!("[{host}]:{}->{}", port.host_port, port.guest_port),
        Some(host) => format!("{host}:{}->{}", port.host_port, port.guest_port),
        None => format!("{}->{}", port.host_port, port.guest_port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_and_shown() {
        let shown = |text| publish(text).map(|port| shown(&port));
        assert_eq!(shown("8080:80").unwrap(), "8080->80");
        assert_eq!(shown("127.0.0.1:8080:80/tcp").unwrap(), "127.0.0.1:8080->80");
        assert_eq!(shown("[::1]:8080:80").unwrap(), "[::1]:8080->80");
        for bad in ["", "80", ":80", "80:", "0:80", "80:0", "x:80:80", "8080:80/udp", "65536:80", "1:2:3:4"] {
            assert!(publish(bad).is_err(), "{bad:?}");
        }
    }
}
