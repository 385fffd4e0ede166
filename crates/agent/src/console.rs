//! Messages on the console, which `dayfly logs` shows.

use std::fmt;
use std::time::{Duration, Instant};

/// Writes one line, `dayfly-agent: …`, to standard error, which is the console in a guest.
///
/// A full console loses the line after one second, so that it cannot block the agent for good.
pub fn say(text: fmt::Arguments<'_>) {
    let line = format!("dayfly-agent: {text}\n");
    let mut rest = line.as_bytes();
    let until = Instant::now() + Duration::from_secs(1);
    while !rest.is_empty() && Instant::now() < until {
        match rustix::io::write(rustix::stdio::stderr(), rest) {
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
}

/// [`say`] with the arguments of `format!`.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => { $crate::console::say(format_args!($($arg)*)) };
}
