//! `dayfly-witness`: checksums of a guest's memory and files, computed in the guest before a
//! snapshot and in a clone, to compare the two; and the guest's half of `dayfly-bench io`.
//!
//! - `stop`: stops (SIGSTOP) every program but process 1, kernel threads and the ancestors of this
//!   process.
//! - `go`: continues the stopped programs.
//! - `memory`: checksum of all present private anonymous memory of the stopped programs, read from
//!   /proc/PID/mem.
//! - `disk FOLDER`: checksum of all files of the folder's file system, read past the page cache
//!   (`O_DIRECT`).
//! - `files FOLDER`: as `disk`, and compares the cached pages of the files with the disk.
//! - `spin`: microseconds that a fixed computation takes, to compare a guest's speed with its
//!   host's.
//! - `hold MIB SEED FILE`: fills memory, then FILE, with a pattern (a third noise, a third
//!   compressible, a third zeroes), and runs until a signal ends it.
//! - `serve`: runs programs and moves bytes for `dayfly-bench io` (`dayfly_e2e::traffic`), until a
//!   signal ends it.
//!
//! All but `hold` and `serve` end with one line of JSON. The memory of the guest's kernel is not
//! covered.

mod error;
mod files;
mod memory;
mod pattern;
mod programs;
mod sum;

use dayfly_e2e::traffic;
use std::path::Path;
use std::process::ExitCode;

/// This variable must be set for `stop`, which stops programs, and for `serve`, which runs them for
/// any client: neither is for a host.
const GUEST: &str = "DAYFLY_GUEST";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let said = match words[..] {
        ["stop"] if std::env::var_os(GUEST).is_none() => {
            Err(format!("stop: set {GUEST}: this is no command for a host").into())
        }
        ["serve"] if std::env::var_os(GUEST).is_none() => {
            Err(format!("serve: set {GUEST}: this is no command for a host").into())
        }
        ["serve"] => traffic::serve(traffic::PORT).map(|never| match never {}).map_err(Into::into),
        ["stop"] => programs::signal(rustix::process::Signal::STOP),
        ["go"] => programs::signal(rustix::process::Signal::CONT),
        ["memory"] => memory::digest(),
        ["files", folder] => files::digest(Path::new(folder), true),
        ["disk", folder] => files::digest(Path::new(folder), false),
        ["spin"] => Ok(spin()),
        ["hold", mib, seed, file] => pattern::hold(mib, seed, Path::new(file)),
        _ => {
            Err("expected stop, go, memory, files FOLDER, disk FOLDER, spin, hold MIB SEED FILE, \
                 or serve"
                .into())
        }
    };
    match said {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("dayfly-witness: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Microseconds of a fixed computation, the least of three runs.
fn spin() -> String {
    let once = || {
        let began = std::time::Instant::now();
        let mut x = 88_172_645_463_325_252_u64;
        for _ in 0..20_000_000_u32 {
            // xorshift64 (Marsaglia): each step depends on the one before.
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
        }
        std::hint::black_box(x);
        began.elapsed().as_micros()
    };
    (0..3).map(|_| once()).min().unwrap_or_default().to_string()
}
