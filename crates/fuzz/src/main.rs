//! `dayfly-fuzz`: libFuzzer on one target, or a command that starts this program for many targets.
//! `DAYFLY_FUZZ_TARGET` names the target; `DAYFLY_FUZZ_PLANTED` plants its faults. See
//! docs/fuzzing.md.

#![no_main]
#![allow(clippy::print_stderr, reason = "a program for people")]

use dayfly_fuzz::run::{PLANTED, TARGET};
use dayfly_fuzz::{Target, cli, target, targets};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

static CHOSEN: OnceLock<&Target> = OnceLock::new();

/// Called by libFuzzer's `main` before it reads its options.
fn start() {
    let Some(name) = std::env::var_os(TARGET) else {
        let result = cli::run_command();
        std::process::exit(result.map_or_else(
            |error| {
                eprintln!("dayfly-fuzz: {error:#}");
                1
            },
            |()| 0,
        ));
    };
    if std::env::var_os(PLANTED).is_some() {
        target::plant_faults();
    }
    let named = targets::named(&name.to_string_lossy());
    CHOSEN.get_or_init(|| named.unwrap_or_else(|| panic!("{TARGET}: no target {name:?}")));
}

fuzz_target!(
    init: start(),
    |input: &[u8]| {
        if let Some(target) = CHOSEN.get() {
            target.check(input);
        }
    }
);
