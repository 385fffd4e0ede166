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
            let mut text = e.to_string();
            let mut source = std::error::Error::source(&e);
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            say(&text);
            ExitCode::FAILURE
        }
    }
}
