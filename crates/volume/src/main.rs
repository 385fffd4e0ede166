//! `dayfly-volume`: serves one folder of the host to one guest ([`dayfly_volume`]).

use dayfly_volume::serve::say;
use dayfly_volume::{arguments, start};
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = match arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(why) => {
            say(&why);
            return ExitCode::FAILURE;
        }
    };
    match start::run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say(&dayfly_units::error::chain(&e));
            ExitCode::FAILURE
        }
    }
}
