//! Options for a VM's network access.

use dayfly_api::types::{NetworkRequest, PortProtocol, Publish};
use dayfly_units::ports::protocol_of;
use dayfly_units::{Bytes, Egress, Name};
use std::net::IpAddr;

/// Network options of the commands that create VMs.
#[derive(Debug, Clone, clap::Args)]
pub struct NetworkArgs {
    #[command(flatten)]
    publish: PublishArgs,
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

/// Published ports.
#[derive(Debug, Clone, clap::Args)]
pub struct PublishArgs {
    /// Publish a port of the VM at a port of the host: [[ADDRESS:][HOSTPORT]:]PORT[/udp], or ranges
    /// of both; may be repeated. ADDRESS is 127.0.0.1 by default; 0.0.0.0 means all IPv4 addresses.
    /// Without HOSTPORT the host's port is a free one (dayfly port VM)
    #[arg(short, long, value_name = "PORTS", value_parser = publish)]
    publish: Vec<Ports>,
    /// Publish every port that the image's configuration names (EXPOSE), each at a free port of
    /// 127.0.0.1
    #[arg(short = 'P', long)]
    publish_all: bool,
}

impl PublishArgs {
    /// The ports, and whether those of the image's configuration are published too.
    #[must_use]
    pub fn request(self) -> (Vec<Publish>, bool) {
        (self.publish.into_iter().flat_map(|ports| ports.0).collect(), self.publish_all)
    }
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
        let (publish, publish_exposed) = self.publish.request();
        let named = !matches!(self.network.as_str(), "default" | "none");
        NetworkRequest {
            none: self.network.as_str() == "none",
            closed: self.closed,
            egress: self.egress.egress,
            network: named.then_some(self.network),
            publish,
            publish_exposed,
            sends_bytes_per_second: self.send_rate.map(|rate| rate.0),
            receives_bytes_per_second: self.receive_rate.map(|rate| rate.0),
        }
    }
}

/// The ports of one `--publish`: one, or those of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ports(Vec<Publish>);

/// Parses docker's forms: `80`, `8080:80`, `127.0.0.1:8080:80`, `127.0.0.1::80`, `[::1]:8080:80` or
/// `8000-8010:8000-8010`, each with or without `/tcp` or `/udp`.
fn publish(text: &str) -> Result<Ports, String> {
    let wrong = || {
        format!(
            "expected [[ADDRESS:][HOSTPORT]:]PORT, such as 80, 8080:80 or 127.0.0.1::80, or ranges \
             of one length, such as 8000-8010:8000-8010, got {text:?}"
        )
    };
    let (ports, protocol) = match text.rsplit_once('/') {
        Some((ports, protocol)) => (ports, protocol_of(protocol)?),
        None => (text, PortProtocol::Tcp),
    };
    let port = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|port| *port > 0 && digits).ok_or_else(wrong)
    };
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => Ok(port(first)?..=port(last)?),
        None => port(text).map(|port| port..=port),
    };
    let (before, guest) = match ports.rsplit_once(':') {
        Some((before, guest)) => (before, guest),
        None => ("", ports),
    };
    let (host, on_host) = match before.rsplit_once(':') {
        Some((host, port)) => (Some(address_of(host).ok_or_else(wrong)?), port),
        None => (None, before),
    };
    let guest = range(guest)?;
    let on_host: Vec<u16> = match on_host {
        // Free ones.
        "" => guest.clone().map(|_| 0).collect(),
        ports => range(ports)?.collect(),
    };
    if on_host.len() != guest.len() || on_host.is_empty() {
        return Err(wrong());
    }
    let pairs = on_host.into_iter().zip(guest);
    let one = |(host_port, guest_port)| Publish { host, host_port, guest_port, protocol };
    Ok(Ports(pairs.map(one).collect()))
}

/// Parses an address of the host: IPv4, or IPv6 in brackets.
fn address_of(text: &str) -> Option<IpAddr> {
    match text.strip_prefix('[') {
        Some(text) => text.strip_suffix(']')?.parse().ok().map(IpAddr::V6),
        None => text.parse().ok().map(IpAddr::V4),
    }
}

/// Formats published ports for a table, as docker does: `HOST:PORT->PORT/tcp`. Ports that follow
/// each other on both sides are ranges.
#[must_use]
pub fn shown(ports: &[Publish]) -> String {
    let mut runs: Vec<(Publish, u16)> = Vec::new();
    let mut sorted: Vec<&Publish> = ports.iter().collect();
    sorted.sort_by_key(|port| (port.protocol, port.guest_port, port.host, port.host_port));
    for port in sorted {
        let follows = runs.iter_mut().find(|(first, more)| {
            let next = |number: u16| number.checked_add(*more).and_then(|last| last.checked_add(1));
            (first.protocol, first.host) == (port.protocol, port.host)
                && next(first.guest_port) == Some(port.guest_port)
                && next(first.host_port) == Some(port.host_port)
        });
        match follows {
            Some((_, more)) => *more += 1,
            None => runs.push((*port, 0)),
        }
    }
    let range = |first: u16, more: u16| match more {
        0 => String::new(),
        _ => format!("-{}", first.saturating_add(more)),
    };
    let run = |(port, more): &(Publish, u16)| {
        format!(
            "{}{}->{}{}/{}",
            address(port),
            range(port.host_port, *more),
            port.guest_port,
            range(port.guest_port, *more),
            port.protocol
        )
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
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
    fn ports_are_read_as_docker_reads_them() {
        let read = |text| {
            let ports = publish(text).unwrap().0;
            let one = |port: &Publish| {
                format!("{}->{}/{}", address(port), port.guest_port, port.protocol)
            };
            ports.iter().map(one).collect::<Vec<_>>().join(" ")
        };
        for (text, expected) in [
            ("[::1]:8000-8001:80-81/tcp", "[::1]:8000->80/tcp [::1]:8001->81/tcp"),
            ("8080:80", "127.0.0.1:8080->80/tcp"),
            ("127.0.0.1:8080:80/tcp", "127.0.0.1:8080->80/tcp"),
            ("[::1]:8080:80", "[::1]:8080->80/tcp"),
            ("53:53/udp", "127.0.0.1:53->53/udp"),
            ("80", "127.0.0.1:0->80/tcp"),
            (":80", "127.0.0.1:0->80/tcp"),
            ("80/UDP", "127.0.0.1:0->80/udp"),
            ("0.0.0.0::80", "0.0.0.0:0->80/tcp"),
            ("[::]::80-81", "[::]:0->80/tcp [::]:0->81/tcp"),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
        for bad in [
            "",
            "/tcp",
            "80:",
            "0:80",
            "80:0",
            "0",
            "x:80:80",
            "8080:80/sctp",
            "65536:80",
            "1:2:3:4",
            "80-81:80",
            "8000-8001:80",
            "81-80:81-80",
            "80-:80-",
            "0-1:0-1",
            "::1:8080:80",
            "[127.0.0.1]:8080:80",
            "[::1:8080:80",
            "+80",
            "80/tcp/udp",
        ] {
            assert!(publish(bad).is_err(), "{bad:?}");
        }
        assert!(publish("80/sctp").unwrap_err().contains("sctp"));
    }

    #[test]
    fn ports_that_follow_each_other_are_shown_as_a_range() {
        let read = |texts: &[&str]| -> Vec<Publish> {
            texts.iter().flat_map(|text| publish(text).unwrap().0).collect()
        };
        let ports = read(&["8000-8002:80-82", "53:53/udp", "9000:83", "0.0.0.0:7:7"]);
        assert_eq!(
            shown(&ports),
            "0.0.0.0:7->7/tcp, 127.0.0.1:8000-8002->80-82/tcp, 127.0.0.1:9000->83/tcp, \
             127.0.0.1:53->53/udp"
        );
        assert_eq!(shown(&read(&["65534-65535:1-2"])), "127.0.0.1:65534-65535->1-2/tcp");
        assert_eq!(shown(&[]), "");
    }
}
