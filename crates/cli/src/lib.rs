//! # cli
//!
//! The room for what people type and see: the commands of `dayfly` ([`commands`]), tables and JSON ([`output`]), progress
//! ([`progress`]), terminals ([`session`]), and finding a daemon to talk to ([`connect`]).
//!
//! What may not enter: anything that a program could not do with the typed client and the libraries of `image` and `machine`.
//!
//! Results go to standard output, everything else to standard error. Exit codes are docker's ([`failure`]).

pub mod artefacts;
mod bridge;
pub mod commands;
pub mod connect;
pub mod failure;
pub mod home;
pub mod output;
pub mod progress;
pub mod session;
mod tarball;

use clap::Parser;
use std::process::ExitCode;

/// Runs the program: reads the arguments, runs the command, says what went wrong.
#[must_use]
pub fn main() -> ExitCode {
    let args = match commands::Args::try_parse() {
        Ok(args) => args,
        Err(e) => {
            // Help and version are asked for (standard output, 0); anything else is a mistake (standard error, docker's 125).
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(failure::DAYFLY) } else { ExitCode::SUCCESS };
        }
    };
    // The supervisor forks and outlives everything: it must start without the runtime's threads.
    if let Some(code) = args.command.before_runtime() {
        return code;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
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
    // A thread may still sit in a read of standard input; nothing is to be waited for.
    runtime.shutdown_background();
    ExitCode::from(code)
}
