//! Options that several commands share.

use clap::Args;
use dayfly_api::agent::{ExecSpec, WindowSize};
use dayfly_api::types::Lifetime;
use dayfly_units::{Bytes, CpuModel, Name};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Size of a program's terminal if this process has no terminal.
const DEFAULT_SIZE: WindowSize = WindowSize { rows: 24, cols: 80 };

/// The parameters of a cold boot.
#[derive(Debug, Clone, Args)]
pub struct Shape {
    /// RAM, such as 256M or 2G
    #[arg(short, long, default_value = "256M")]
    pub memory: Bytes,
    /// Number of vCPUs, 1 to 16
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub cpus: u8,
    /// CPU that the guest sees: host, x86-64-v3 or x86-64-v2; clones of a snapshot need a host
    /// whose CPU has all of it
    #[arg(long, value_name = "MODEL", default_value_t)]
    pub cpu_model: CpuModel,
    /// Guest kernel (dayfly kernel ls); a known kernel is fetched if it is not stored
    #[arg(long)]
    pub kernel: Option<Name>,
    /// Run this init of the image instead of dayfly's own
    #[arg(long, value_name = "PATH")]
    pub init: Option<String>,
}

/// When a VM ends, and what is left of it.
#[derive(Debug, Clone, Copy, Args)]
pub struct LifetimeArgs {
    /// End the VM after this time, such as 90s, 10m, 8h or 7d; its exit reason is ttl
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub ttl: Option<Duration>,
    /// Remove the VM when it has ended
    #[arg(long)]
    pub rm: bool,
}

impl LifetimeArgs {
    /// The request of the options.
    #[must_use]
    pub fn request(self) -> Lifetime {
        let ttl_ms = self.ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        Lifetime { ttl_ms, auto_remove: self.rm }
    }
}

/// Options for running a program.
#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    /// Keep standard input open
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the program a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Set a variable; without =VALUE, pass on this process's value
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Folder in the VM to start in [default: the image's]
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User to run as: name, uid, name:group or uid:gid [default: the image's, or root]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Pass the program's output to the terminal unfiltered, control sequences included; -t implies
    /// this
    #[arg(long)]
    pub raw: bool,
    /// Kill the program after this time, such as 500ms, 30s, 5m or 1h
    #[arg(long, value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Ask the guest whether it still answers after this time without output, and fail if it does
    /// not; 0 does not ask [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = duration_or_zero)]
    pub liveness: Option<Duration>,
}

impl ExecArgs {
    /// Makes the agent's request from the options.
    ///
    /// # Errors
    /// If `-it` is given and standard input is no terminal.
    pub fn spec(&self, argv: Vec<String>, detach: bool) -> anyhow::Result<ExecSpec> {
        if self.tty && self.interactive && !rustix::termios::isatty(rustix::stdio::stdin()) {
            anyhow::bail!(
                "-i with -t: standard input is no terminal; leave -t away to pipe into the program"
            );
        }
        Ok(ExecSpec {
            argv,
            env: environment(&self.env, |name| std::env::var(name).ok()),
            cwd: self.workdir.clone().unwrap_or_default(),
            make_cwd: false,
            user: self.user.clone().unwrap_or_default(),
            pty: self.tty.then(|| crate::session::window_size().unwrap_or(DEFAULT_SIZE)),
            timeout_ms: self.timeout.map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
            stdin: self.interactive && !detach,
            detach,
            liveness_ms: self.liveness.map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
            strings: None,
        })
    }

    /// How this process is attached to the program.
    #[must_use]
    pub fn attach(&self) -> crate::session::Attach {
        crate::session::Attach {
            stdin: self.interactive,
            terminal: self.tty,
            raw: self.raw || self.tty,
        }
    }
}

/// The program of a text for `sh`, or else of an argument list. `None` if neither is given.
pub fn program(text: Option<String>, argv: Vec<String>) -> Option<ExecSpec> {
    let argv = text.map_or(argv, |text| vec!["/bin/sh".into(), "-c".into(), text]);
    (!argv.is_empty()).then(|| ExecSpec { argv, ..ExecSpec::default() })
}

/// Docker's `-e`: `NAME=VALUE`, or `NAME` for this process's value, if it has one.
fn environment(
    given: &[String],
    ours: impl Fn(&str) -> Option<String>,
) -> BTreeMap<String, String> {
    given
        .iter()
        .filter_map(|text| match text.split_once('=') {
            Some((name, value)) => Some((name.to_owned(), value.to_owned())),
            None => ours(text).map(|value| (text.clone(), value)),
        })
        .collect()
}

/// Parses `500ms`, `30s`, `5m`, `1h`, `7d`, or a number of seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let bad = || format!("{text:?}: expected a whole number and ms, s, m, h or d, such as 30s");
    let number: u64 = digits.parse().map_err(|_| bad())?;
    let unit_ms = match &text[digits.len()..] {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(bad()),
    };
    number.checked_mul(unit_ms).filter(|ms| *ms > 0).map(Duration::from_millis).ok_or_else(bad)
}

/// Parses a time in the past, or a number of seconds since 1970, to milliseconds since 1970.
pub fn past(text: &str) -> Result<u64, String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let now = u64::try_from(now).unwrap_or(u64::MAX);
    if text == "now" {
        return Ok(now);
    }
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        let ms = text.parse::<u64>().ok().and_then(|seconds| seconds.checked_mul(1000));
        return ms.ok_or_else(|| format!("{text:?}: expected seconds since 1970"));
    }
    let ago = duration(text)?.as_millis();
    Ok(now.saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX)))
}

/// As [`duration`], or `0`.
pub fn duration_or_zero(text: &str) -> Result<Duration, String> {
    if text == "0" { Ok(Duration::ZERO) } else { duration(text) }
}

/// Parses a label `NAME=VALUE`.
pub fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?}: expected NAME=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(duration("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for bad in
            ["", "s", "-1s", "1.5s", "3 d", "0s", "99999999999999999999h", "9999999999999999h"]
        {
            assert!(duration(bad).is_err(), "{bad:?}");
        }
        assert_eq!(duration_or_zero("0"), Ok(Duration::ZERO));
        assert_eq!(duration_or_zero("5s"), Ok(Duration::from_secs(5)));
        assert!(duration_or_zero("0 s").is_err());
    }

    #[test]
    fn variables_are_given_or_handed_on() {
        let given = ["A=1".into(), "B=x=y".into(), "HOME".into(), "UNSET".into(), "E=".into()];
        let got = environment(&given, |name| (name == "HOME").then(|| "/h".into()));
        let expected = [("A", "1"), ("B", "x=y"), ("E", ""), ("HOME", "/h")];
        assert_eq!(got, expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    }
}
