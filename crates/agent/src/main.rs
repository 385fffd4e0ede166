//! `dayfly-agent`: `/init` of the initramfs, or the image's init's child.

use std::process::ExitCode;

fn main() -> ExitCode {
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
