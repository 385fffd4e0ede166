//! Sets of CPUs in the kernel's form, and the CPUs of this process.

use crate::numa::stay_on;
use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::OnceLock;

/// The highest number of a CPU that a kernel can be built for (CONFIG_NR_CPUS).
const HIGHEST: u32 = 8191;

/// A set of CPUs, by number. Its text is that of `cpulist`, such as `0-2,7`
/// (`Documentation/admin-guide/cputopology.rst`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuList(BTreeSet<u32>);

impl CpuList {
    /// Whether it has no CPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of its CPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Its CPUs, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// The CPUs that both have.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// The CPUs that this one has alone.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    /// The CPUs that one of both has.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<T: IntoIterator<Item = u32>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = left.next() {
            let mut last = first;
            while let Some(next) = left.next_if(|next| *next == last + 1) {
                last = next;
            }
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

/// Why a text is no list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{part:?}: expected CPUs such as 0-2,7, from 0 to {HIGHEST}, in ascending ranges")]
pub struct CpuListError {
    part: String,
}

impl FromStr for CpuList {
    type Err = CpuListError;

    /// Parses a list. Blanks around it are ignored, and an empty one has no CPU.
    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let text = text.trim();
        let mut cpus = BTreeSet::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let wrong = || CpuListError { part: part.chars().take(40).collect() };
            let number = |text: &str| {
                let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
                let number = digits.then(|| text.parse::<u32>().ok()).flatten();
                number.filter(|number| *number <= HIGHEST).ok_or_else(wrong)
            };
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

/// The CPUs of the host that can run.
///
/// # Errors
/// sysfs cannot be read.
pub fn online() -> io::Result<CpuList> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online")?;
    text.parse().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// The number of CPUs that this process had before [`keep_to`].
static BEFORE: OnceLock<usize> = OnceLock::new();

/// Restricts this thread, and the threads and processes that it starts later, to `cpus`.
///
/// # Errors
/// As [`stay_on`], or a number is too high for it.
pub fn keep_to(cpus: &CpuList) -> io::Result<()> {
    if let Some(most) = cpus.iter().find(|cpu| *cpu as usize >= CpuSet::MAX_CPU) {
        let why = format!("CPU {most}: expected less than {}", CpuSet::MAX_CPU);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    BEFORE.get_or_init(parallelism);
    stay_on(&cpus.iter().collect::<Vec<_>>())
}

fn parallelism() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The number of CPUs of this process, as it was before [`keep_to`].
#[must_use]
pub fn number() -> usize {
    BEFORE.get().copied().unwrap_or_else(parallelism)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_list_is_read_and_the_wrong_part_is_named() {
        for (text, shown) in
            [("0-2,7", "0-2,7"), ("7,2,1,0\n", "0-2,7"), ("", ""), ("0-1,1-2", "0-2")]
        {
            assert_eq!(text.parse::<CpuList>().unwrap().to_string(), shown);
        }
        for (text, part) in [
            ("0,x", "\"x\""),
            ("3-1", "\"3-1\""),
            ("0,", "\"\""),
            ("-1", "\"-1\""),
            ("1-", "\"1-\""),
            ("+1", "\"+1\""),
            ("0-8192", "\"0-8192\""),
            ("99999999999", "\"99999999999\""),
            ("1 2", "\"1 2\""),
        ] {
            let wrong = text.parse::<CpuList>().unwrap_err().to_string();
            assert!(wrong.starts_with(part) && wrong.contains("0 to 8191"), "{wrong}");
        }
    }

    #[test]
    fn this_host_has_a_cpu_that_can_run() {
        assert!(!online().unwrap().is_empty());
        assert!(number() > 0);
    }

    proptest! {
        #[test]
        fn each_list_reads_back(cpus: BTreeSet<u16>) {
            let cpus = cpus.into_iter().map(u32::from);
            let list: CpuList = cpus.map(|cpu| cpu % (HIGHEST + 1)).collect();
            prop_assert_eq!(list.to_string().parse(), Ok(list));
        }

        #[test]
        fn no_text_is_more_than_an_error(text in "[0-9,-]{0,20}|.{0,20}") {
            let _ = text.parse::<CpuList>();
        }
    }
}
