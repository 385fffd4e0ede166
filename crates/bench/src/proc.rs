//! Files below `/proc` (proc(5)).

use anyhow::{Context, Result};
use std::fmt::Display;

/// The text of a file.
pub fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| path.to_owned())
}

/// What follows `name` and a colon on the first such line of a file.
pub fn field(path: &str, name: &str) -> Result<String> {
    let text = read(path)?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let found = lines.find(|(key, _)| key.trim_end() == name);
    Ok(found.with_context(|| format!("{name} in {path}"))?.1.trim().to_owned())
}

/// Bytes of a line of `/proc/meminfo`.
pub fn memory_bytes(name: &str) -> Result<u64> {
    let field = field("/proc/meminfo", name)?;
    let kib = field.strip_suffix(" kB").and_then(|kib| kib.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{name} in /proc/meminfo: {field:?}"))? << 10)
}

/// The fields of `/proc/PID/stat`.
#[derive(Debug)]
pub struct Stat(Vec<String>);

impl Stat {
    /// Of a process (`self` for this one), if it is there.
    pub fn of(pid: impl Display) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The second field, the name in parentheses, may contain anything.
    fn parse(text: &str) -> Option<Self> {
        let (_, fields) = text.rsplit_once(") ")?;
        Some(Self(fields.split_ascii_whitespace().map(str::to_owned).collect()))
    }

    /// The letter of the state.
    pub fn state(&self) -> &str {
        self.0.first().map_or("", String::as_str)
    }

    /// Field `number` as proc(5) numbers it, from the parent's pid (4) on.
    pub fn number(&self, number: usize) -> Option<u32> {
        self.0.get(number - 3)?.parse().ok()
    }

    /// The sum of two neighbours: user and system time in clock ticks, own (14) or of children
    /// (16).
    pub fn ticks(&self, first: usize) -> Option<u32> {
        self.number(first)?.checked_add(self.number(first + 1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_any_name() {
        let stat = Stat::parse("42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 120 30 2 1 20 0").unwrap();
        assert_eq!((stat.state(), stat.number(4)), ("S", Some(1)));
        assert_eq!((stat.ticks(14), stat.ticks(16), stat.ticks(22)), (Some(150), Some(3), None));
        assert!(Stat::of("self").is_some() && Stat::of(-1).is_none());
    }

    #[test]
    fn fields_have_names() {
        assert!(memory_bytes("MemTotal").unwrap() > 1 << 20);
        assert!(field("/proc/meminfo", "Mem").is_err());
    }
}
