//! # cli
//!
//! The command line: the commands of `dayfly` ([`commands`]), tables and JSON ([`output`]),
//! progress ([`progress`]), terminals ([`session`]), and finding a daemon ([`connect`]).
//!
//! This crate does nothing that a program could not do with the typed client and the crates `image`
//! and `machine`.
//!
//! Text that a guest, an image or the daemon wrote is escaped before a person sees it ([`output`],
//! [`failure`]). A program's output on a terminal is filtered ([`terminal_text`]).
//!
//! Results go to standard output, everything else to standard error. Exit codes are docker's
//! ([`failure`]).

pub mod artefacts;
mod bridge;
pub mod commands;
pub mod connect;
pub mod failure;
#[doc(hidden)]
pub mod fuzzing;
pub mod home;
mod image_source;
pub mod machine_start;
mod offers;
pub mod output;
pub mod progress;
mod pulling;
mod references;
pub mod session;
mod tarball;
pub mod terminal_text;

use clap::Parser;
use std::process::ExitCode;

/// Runs the program: parses the arguments, runs the command, and reports errors.
#[must_use]
pub fn main() -> ExitCode {
    let args = match commands::Args::try_parse() {
        Ok(args) => args,
        Err(e) => {
            // Help and version are requested output (standard output, 0). Anything else is a usage
            // error (standard error, docker's 125).
            let _ = e.print();
            return if e.use_stderr() {
                ExitCode::from(failure::DAYFLY)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    // The supervisor forks and outlives this process, so it must start without the runtime's
    // threads.
    if let Some(code) = args.command.before_runtime() {
        return code;
    }
    let runtime =
        match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
            Ok(runtime) => runtime,
            Err(e) => {
                eprintln!("dayfly: no threads for the runtime: {e}");
                return ExitCode::from(failure::DAYFLY);
            }
        };
    let code = match runtime.block_on(args.command.run()) {
        Ok(code) => code,
        Err(e) => failure::report(&e),
    };
    // A thread may still block in a read of standard input, so this process does not wait for the
    // runtime's threads.
    runtime.shutdown_background();
    ExitCode::from(code)
}
