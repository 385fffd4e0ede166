//! `dayfly-witness`: looks at a guest from inside, before a snapshot and in a clone of it, so that both can be compared.
//!
//! | call | what |
//! |---|---|
//! | `stop` | stops (SIGSTOP) every program but process 1, kernel threads and its own ancestors |
//! | `go` | lets them go on |
//! | `memory` | checksum of all present private anonymous memory of the programs that are stopped, by way of /proc/PID/mem |
//! | `disk FOLDER` | checksum of all files of the folder's file system, read past the page cache (`O_DIRECT`) |
//! | `files FOLDER` | the same; and what the page cache has of them is held against that |
//! | `spin` | microseconds that a fixed computation takes: how much slower than its host a guest is |
//! | `hold MIB SEED FILE` | fills memory, then FILE, with a pattern (a third noise, a third compressible, a third zeroes), and stays |
//!
//! All but `hold` end with one line of JSON. What the guest's kernel keeps for itself is not seen from here.

mod files;
mod memory;
mod pattern;
mod programs;
mod sum;

use std::path::Path;
use std::process::ExitCode;

/// Who sets it knows that everything on this computer will be stopped.
const GUEST: &str = "DAYFLY_GUEST";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let said = match words[..] {
        ["stop"] if std::env::var_os(GUEST).is_none() => {
            Err(format!("stop: set {GUEST}: this is no command for a host").into())
        }
        ["stop"] => programs::signal(rustix::process::Signal::STOP),
        ["go"] => programs::signal(rustix::process::Signal::CONT),
        ["memory"] => memory::digest(),
        ["files", folder] => files::digest(Path::new(folder), true),
        ["disk", folder] => files::digest(Path::new(folder), false),
        ["spin"] => Ok(spin()),
        ["hold", mib, seed, file] => pattern::hold(mib, seed, Path::new(file)),
        _ => Err("expected stop, go, memory, files FOLDER, disk FOLDER, spin, or hold MIB SEED FILE".into()),
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

/// Microseconds, the least of three.
fn spin() -> String {
    let once = || {
        let began = std::time::Instant::now();
        let mut x = 88_172_645_463_325_252_u64;
        for _ in 0..20_000_000_u32 {
            // xorshift64 (Marsaglia): each step needs the one before.
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
        }
        std::hint::black_box(x);
        began.elapsed().as_micros()
    };
    (0..3).map(|_| once()).min().unwrap_or_default().to_string()
}

/// What goes wrong, in words.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Says where an error of the host was.
fn at<T>(result: std::io::Result<T>, place: &dyn std::fmt::Display) -> Result<T> {
    result.map_err(|e| format!("{place}: {e}").into())
}
