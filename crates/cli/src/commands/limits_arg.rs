//! `--cpu-max`, `--cpu-weight`, `--memory-max`, `--pids-max`, `--cpus-booked` and `--io-max`:
//! limits of what a VM takes from the host.

use dayfly_api::types::{IoMax, VmLimits};
use dayfly_units::Bytes;

/// Limits of a VM.
#[derive(Debug, Clone, Copy, clap::Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// The most CPU time of guest and devices together, in CPUs of the host, such as 1.5 or 0.25
    #[arg(long, value_name = "CPUS", value_parser = millicpus)]
    cpu_max: Option<u32>,
    /// The share of CPU time against other VMs that want the same CPUs, 1 to 10000; usually 100
    #[arg(long, value_name = "WEIGHT", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    cpu_weight: Option<u32>,
    /// The most memory of the host beyond the guest's RAM and its page tables, at least 16M
    #[arg(long, value_name = "SIZE")]
    memory_max: Option<Bytes>,
    /// The most processes and threads on the host, at least 16 more than vCPUs
    #[arg(long, value_name = "N")]
    pids_max: Option<u32>,
    /// CPUs of the host that no other VM gets, for guest and devices together
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8192))]
    cpus_booked: Option<u32>,
    /// The most it reads and writes per second on the host's disk, such as rbps=50M,wbps=10M,
    /// riops=2000,wiops=500, each optional; hosts with cgroup v2
    #[arg(long, value_name = "RATES", value_parser = io_max)]
    io_max: Option<IoMax>,
}

impl LimitArgs {
    /// The request of the options.
    #[must_use]
    pub fn request(self) -> VmLimits {
        VmLimits {
            cpu_max_millicpus: self.cpu_max,
            cpu_weight: self.cpu_weight,
            memory_max_bytes: self.memory_max.map(|Bytes(bytes)| bytes),
            pids_max: self.pids_max,
            cpus_booked: self.cpus_booked,
            io_max: self.io_max,
        }
    }

    /// As [`Self::request`], of a fork, whose clones have each limit of the VM that is not given.
    #[must_use]
    pub fn of_fork(self) -> Option<VmLimits> {
        Some(self.request()).filter(|limits| !limits.is_none())
    }
}

/// Parses rates of disks, with the keys of the kernel's `io.max`.
fn io_max(text: &str) -> Result<IoMax, String> {
    let mut rates = IoMax::default();
    for part in text.split(',') {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("{part:?}: expected KEY=RATE, such as wbps=10M"))?;
        let count =
            || value.parse().map_err(|_| format!("{part:?}: expected a number of requests"));
        let bytes = || match value.parse() {
            Ok(Bytes(bytes)) => Ok(bytes),
            Err(e) => Err(format!("{part:?}: {e}")),
        };
        let (rate, value) = match key {
            "rbps" => (&mut rates.read_bytes_per_s, bytes()?),
            "wbps" => (&mut rates.write_bytes_per_s, bytes()?),
            "riops" => (&mut rates.reads_per_s, count()?),
            "wiops" => (&mut rates.writes_per_s, count()?),
            _ => return Err(format!("{key:?}: expected rbps, wbps, riops or wiops")),
        };
        if rate.replace(value).is_some() {
            return Err(format!("{key}: expected once, got it twice"));
        }
    }
    Ok(rates)
}

/// Parses a number of CPUs with at most three decimals to thousandths of a CPU.
fn millicpus(text: &str) -> Result<u32, String> {
    let wrong =
        || format!("{text:?}: expected CPUs such as 1.5, at least 0.05, 3 decimals at most");
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(decimals) || decimals.len() > 3 {
        return Err(wrong());
    }
    let thousandths: u32 = format!("{decimals:0<3}").parse().map_err(|_| wrong())?;
    let whole: u32 = whole.parse().map_err(|_| wrong())?;
    let milli = whole.checked_mul(1000).and_then(|milli| milli.checked_add(thousandths));
    milli.filter(|milli| *milli >= 50).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_disks_have_the_keys_of_the_kernel_each_once() {
        let read_bytes_per_s = Some(1 << 20);
        let one = IoMax { read_bytes_per_s, ..IoMax::default() };
        assert_eq!(io_max("rbps=1M"), Ok(one));
        let all = IoMax {
            write_bytes_per_s: Some(65_536),
            reads_per_s: Some(100),
            writes_per_s: Some(10),
            ..one
        };
        assert_eq!(io_max("wiops=10,rbps=1M,riops=100,wbps=65536"), Ok(all));
        for (wrong, named) in [
            ("", "KEY=RATE"),
            ("rbps", "KEY=RATE"),
            ("bps=1M", "\"bps\""),
            ("rbps=1M,rbps=2M", "twice"),
            ("riops=1M", "\"riops=1M\""),
            ("wbps=x", "\"wbps=x\""),
            ("rbps=1M,", "KEY=RATE"),
        ] {
            let message = io_max(wrong).unwrap_err();
            assert!(message.contains(named), "{wrong}: {message}");
        }
    }

    #[test]
    fn cpus_have_at_most_three_decimals() {
        for (text, milli) in
            [("1", 1000), ("1.5", 1500), ("0.25", 250), ("0.050", 50), ("16.0", 16_000)]
        {
            assert_eq!(millicpus(text), Ok(milli));
        }
        for wrong in ["", "0", "0.049", ".5", "1.", "1.0005", "-1", "1e3", "5000000", "1,5"] {
            assert!(millicpus(wrong).unwrap_err().contains("such as 1.5"), "{wrong}");
        }
    }
}
