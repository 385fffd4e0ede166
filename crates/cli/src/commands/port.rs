//! `dayfly port`: lists the published ports of a VM.

use super::network;
use crate::{connect, output};
use anyhow::Result;
use dayfly_api::types::Publish;

/// Arguments of `dayfly port`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The VM, by id or name
    vm: String,
    /// Show only where this port of the VM is published
    #[arg(value_parser = port)]
    port: Option<u16>,
}

/// Parses `80` or `80/tcp`.
fn port(text: &str) -> Result<u16, String> {
    let number = text.strip_suffix("/tcp").unwrap_or(text);
    let port = number.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| format!("expected a TCP port, such as 80 or 80/tcp, got {text:?}"))
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
fn lines(published: &[Publish], only: Option<u16>) -> Vec<String> {
    let chosen = published.iter().filter(|port| only.is_none_or(|only| only == port.guest_port));
    let line = |port: &Publish| {
        let address = network::address(port);
        match only {
            Some(_) => address,
            None => format!("{}/tcp -> {address}", port.guest_port),
        }
    };
    chosen.map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_listed_as_docker_lists_them() {
        let publish = |host: Option<&str>, host_port, guest_port| Publish {
            host: host.map(|host| host.parse().expect("an address")),
            host_port,
            guest_port,
        };
        let all =
            [publish(None, 8080, 80), publish(Some("::"), 1, 80), publish(Some("::1"), 2, 81)];
        assert_eq!(
            lines(&all, None),
            ["80/tcp -> 127.0.0.1:8080", "80/tcp -> [::]:1", "81/tcp -> [::1]:2"]
        );
        assert_eq!(lines(&all, Some(80)), ["127.0.0.1:8080", "[::]:1"]);
        assert!(lines(&all, Some(82)).is_empty());
        assert_eq!((port("80"), port("80/tcp")), (Ok(80), Ok(80)));
        for bad in ["", "0", "80/udp", "x", "65536"] {
            assert!(port(bad).is_err(), "{bad:?}");
        }
    }
}
