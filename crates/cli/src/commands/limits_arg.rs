//! `--cpu-max`, `--cpu-weight`, `--memory-max` and `--pids-max`: limits of what a VM takes from the
//! host.

use dayfly_api::types::VmLimits;
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
        }
    }

    /// As [`Self::request`], of a fork, whose clones have each limit of the VM that is not given.
    #[must_use]
    pub fn of_fork(self) -> Option<VmLimits> {
        Some(self.request()).filter(|limits| !limits.is_none())
    }
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
