//! `dayfly-agent`: `/init` of the initramfs, or a child of the image's init. Under the name
//! `dayfly-fork` it is the program that requests clones.

use dayfly_agent::local;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let own = arguments.next().unwrap_or_default();
    if Path::new(&own).file_name().is_some_and(|name| name == local::NAME) {
        return local::ask(arguments);
    }
    match dayfly_agent::init::run() {
        Ok(never) => match never {},
        Err(error) => {
            dayfly_agent::say!("fatal: {error}");
            // Flush the message before this process ends, because the kernel panics when PID 1
            // ends.
            let _ = rustix::termios::tcdrain(rustix::stdio::stderr());
            ExitCode::FAILURE
        }
    }
}
