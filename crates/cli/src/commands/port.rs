//! `dayfly port`: lists the published ports of a VM.

use super::network;
use crate::{connect, output};
use anyhow::Result;
use dayfly_api::types::Publish;
use dayfly_units::GuestPort;

/// Arguments of `dayfly port`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The VM, by id or name
    vm: String,
    /// Show only where this port of the VM is published: 80, 80/tcp or 53/udp
    #[arg(value_name = "PORT[/PROTOCOL]")]
    port: Option<GuestPort>,
}

impl Args {
    pub async fn run(self) -> Result<u8> {
        let vm = connect::client().await?.vm(&self.vm).await?.vm;
        let network = vm.network.iter();
        let published: Vec<Publish> =
            network.flat_map(|network| &network.published).copied().collect();
        let lines = lines(&published, self.port);
        if let (Some(port), []) = (self.port, &lines[..]) {
            anyhow::bail!(
                "VM {}: port {port} is not published; `dayfly port {0}` lists the ports that are",
                vm.name
            );
        }
        lines.iter().try_for_each(output::line)?;
        Ok(0)
    }
}

/// The lines of docker's `port`: `80/tcp -> 127.0.0.1:8080`, or the address alone of one port.
fn lines(published: &[Publish], only: Option<GuestPort>) -> Vec<String> {
    let guest = |port: &Publish| GuestPort { port: port.guest_port, protocol: port.protocol };
    let chosen = published.iter().filter(|port| only.is_none_or(|only| only == guest(port)));
    let line = |port: &Publish| {
        let address = network::address(port);
        match only {
            Some(_) => address,
            None => format!("{} -> {address}", guest(port)),
        }
    };
    chosen.map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::PortProtocol;

    #[test]
    fn ports_are_listed_as_docker_lists_them() {
        let publish = |host: Option<&str>, host_port, guest_port| Publish {
            host: host.map(|host| host.parse().expect("an address")),
            host_port,
            guest_port,
            protocol: PortProtocol::Tcp,
        };
        let udp = Publish { protocol: PortProtocol::Udp, ..publish(None, 53, 80) };
        let all =
            [publish(None, 8080, 80), publish(Some("::"), 1, 80), publish(Some("::1"), 2, 81), udp];
        assert_eq!(
            lines(&all, None),
            [
                "80/tcp -> 127.0.0.1:8080",
                "80/tcp -> [::]:1",
                "81/tcp -> [::1]:2",
                "80/udp -> 127.0.0.1:53"
            ]
        );
        let only = |text: &str| lines(&all, Some(text.parse().unwrap()));
        assert_eq!(only("80"), ["127.0.0.1:8080", "[::]:1"]);
        assert_eq!(only("80/udp"), ["127.0.0.1:53"]);
        assert!(only("82").is_empty() && only("81/udp").is_empty());
    }
}
