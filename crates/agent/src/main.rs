//! `dayfly-agent`: `/init` of the initramfs, or the image's init's child; by another name `dayfly-fork`.

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
            // What was said must be out before the kernel panics because process 1 has ended.
            let _ = rustix::termios::tcdrain(rustix::stdio::stderr());
            ExitCode::FAILURE
        }
    }
}
