//! Options of `io`.

use super::guests::{Aio, Daemon, Shape};
use crate::prelude::*;
use crate::stock;
use dayfly_api::client::Client;
use std::net::Ipv4Addr;

/// Size of every guest's disk. Debian and fio take some 300 MiB of it.
pub const DISK: &str = "2G";
/// The most that the file of the jobs may take of it, and the least that fio needs for requests of
/// 1 MiB, 32 in flight.
const FILE_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=1 << 30;

/// Options of `io`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub stock: stock::Options,
    /// Rounds; each boots a guest of each VMM
    #[arg(long, default_value_t = 5, value_parser = at_least(1))]
    pub rounds: usize,
    /// Seconds of each job
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// vCPUs of every guest
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub cpus: u8,
    /// RAM of every guest
    #[arg(long, default_value = "512M")]
    pub memory: Bytes,
    /// Size of the file that fio reads and writes
    #[arg(long, default_value = "256M")]
    pub file: Bytes,
    /// Only jobs with names that begin so, such as `disk,net-udp`
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// How QEMU performs requests of the disk [default: the faster one, which is tried first]
    #[arg(long)]
    pub aio: Option<Aio>,
    /// The first of eight addresses for QEMU's guests, a multiple of eight
    #[arg(long, default_value = "10.79.0.0")]
    pub addresses: Ipv4Addr,
    #[command(flatten)]
    pub copy: Copied,
}

/// Of the copy in the machine.
#[derive(Debug, Clone, clap::Args)]
pub struct Copied {
    /// Measure with the daemon at this socket and print the figures as JSON; the daemon has kernel
    /// and image
    #[arg(long, hide = true)]
    pub inside: Option<PathBuf>,
    /// The daemon's state folder
    #[arg(long, hide = true, requires = "inside")]
    pub state: Option<PathBuf>,
    /// The guests' image
    #[arg(long, hide = true, requires = "inside")]
    pub image: Option<Name>,
    /// The guests' kernel
    #[arg(long, hide = true, requires = "inside")]
    pub stored_kernel: Option<Name>,
}

impl Options {
    /// What is the same for all guests.
    pub fn shape(&self) -> Shape {
        let Self { cpus, memory, file, seconds, .. } = self;
        Shape { cpus: *cpus, memory: *memory, file: *file, seconds: *seconds }
    }

    /// The folder of the machine.
    pub fn home(&self, places: &Places) -> PathBuf {
        self.stock.home(places, "io-machine")
    }

    /// # Errors
    /// The file does not fit.
    pub fn check(&self) -> Result<()> {
        let (file, [least, most]) =
            (self.file, [*FILE_BYTES.start(), *FILE_BYTES.end()].map(Bytes));
        ensure!(FILE_BYTES.contains(&file.0), "--file {file}: expected {least} to {most}");
        Ok(())
    }
}

impl Copied {
    /// The daemon of the machine that this program is a copy in; `None` if it is none.
    ///
    /// # Errors
    /// An option is missing.
    pub fn daemon(&self) -> Result<Option<Daemon>> {
        let Some(socket) = &self.inside else { return Ok(None) };
        let missing = "--inside takes --state, --image and --stored-kernel";
        Ok(Some(Daemon {
            client: Client::new(socket),
            state: self.state.clone().context(missing)?,
            kernel: self.stored_kernel.clone().context(missing)?,
            image: self.image.clone().context(missing)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Options, Scenario};
    use clap::Parser;

    fn parsed(words: &[&str]) -> Option<super::Options> {
        let words = ["dayfly-bench"].iter().chain(words);
        match Options::try_parse_from(words).ok()?.scenario {
            Scenario::Io(options) => Some(options),
            _ => None,
        }
    }

    #[test]
    fn the_copy_gets_the_words_of_its_original_and_where_its_daemon_is() {
        let own = ["--out", "x", "io", "--only", "disk,net-tcp", "--rounds=1", "--file", "64M"];
        let more = ["--out", "/run", "--inside", "/s", "--state", "/state"];
        let names = ["--image", "io", "--stored-kernel", "6.12"];
        let options = parsed(&[&own[..], &more, &names].concat()).unwrap();
        assert!(options.check().is_ok() && options.aio.is_none());
        assert_eq!((options.only.len(), options.rounds, options.seconds), (2, 1, 5));
        let daemon = options.copy.daemon().unwrap().unwrap();
        assert_eq!((daemon.image.as_str(), daemon.kernel.as_str()), ("io", "6.12"));
        let without = parsed(&[&own[..], &more].concat()).unwrap();
        assert!(without.copy.daemon().is_err());
        assert!(parsed(&own).unwrap().copy.daemon().unwrap().is_none());
    }

    #[test]
    fn a_file_that_does_not_fit_is_refused() {
        assert!(parsed(&["io", "--file", "2G"]).unwrap().check().is_err());
        assert!(parsed(&["io", "--file", "1M"]).unwrap().check().is_err());
        assert!(parsed(&["io", "--aio", "native"]).is_none());
        assert!(parsed(&["io", "--rounds", "0"]).is_none());
    }
}
