//! `dayfly-relay`: relays the published ports, or the streams, of one VM ([`dayfly_relay`]).

use dayfly_relay::arguments::{self, Called};
use dayfly_relay::start;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = match arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("dayfly-relay: {why}");
            return ExitCode::FAILURE;
        }
    };
    let Err(error) = match arguments {
        Called::ForPorts(arguments) => start::run(arguments),
        Called::ForStreams(arguments) => start::run_streams(arguments),
    };
    eprintln!("dayfly-relay: {}", dayfly_units::error::chain(&error));
    ExitCode::FAILURE
}
