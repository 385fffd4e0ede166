//! Real machines: started, used, killed at every process and moment, started again.
//!
//! `cargo test -p dayfly-machine --test machine [-- WORD…]` runs the cases whose name contains a
//! word, apart from those of [`LONG`]. They need QEMU, busybox-static, e2fsprogs
//! and a kernel. The kernel is `DAYFLY_TEST_KERNEL`
//! (an unpacked linux-image package). If that is not set, Debian's 6.12 cloud kernel is fetched
//! once by `apt-get download`.

#![expect(clippy::unwrap_used, reason = "tests")]

mod bench;
mod bounds;
mod cases;
mod crashes;
mod kvm;
mod reach;
mod scene;
mod standin;

use std::process::ExitCode;
use std::time::Instant;

/// Cases that run only with `--ignored`, as in `make long`, because they take minutes.
const LONG: [&str; 1] = ["a_silent_machine_is_never_ended_unasked"];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        Some("supervise") => return dayfly_machine::supervisor_main(&words[1]),
        Some("start") => return scene::start_and_report(&words[1]),
        Some("standin") => return standin::serve(&words[1..]),
        Some("kvm") => return kvm::run_tiny_guest(),
        Some("reach") => return reach::from_behind_a_link(&words[1..]),
        _ => {}
    }
    let all: Vec<scene::Case> = [cases::CASES, crashes::CASES].concat();
    if words.iter().any(|w| w == "--list") {
        all.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let filters: Vec<&String> = words.iter().filter(|w| !w.starts_with('-')).collect();
    let long = words.iter().any(|w| w == "--ignored");
    let chosen = all.iter().filter(|(name, _)| {
        let named = filters.iter().any(|f| name.contains(f.as_str()));
        (filters.is_empty() || named) && long == LONG.contains(name)
    });
    let (mut good, mut bad) = (0, 0);
    let begun = Instant::now();
    for (name, case) in chosen {
        let at = Instant::now();
        let passed = std::panic::catch_unwind(case).is_ok();
        *if passed { &mut good } else { &mut bad } += 1;
        println!(
            "test {name} ... {} ({:.1} s)",
            if passed { "ok" } else { "FAILED" },
            at.elapsed().as_secs_f32()
        );
    }
    println!(
        "\ntest result: {good} passed; {bad} failed; finished in {:.1} s",
        begun.elapsed().as_secs_f32()
    );
    if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
