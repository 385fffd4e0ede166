//! The end of a guest's console, for the error of a VM that did not start.

use crate::base::config::VmDir;
use crate::base::error::{ApiError, blocking};
use crate::vm::Vm;
use crate::vmm::console;
use dayfly_api::types::ErrorCode;
use dayfly_units::text::{SHORT, escaped};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Bytes that are read from the end of a console for an error.
const CONSOLE_READ_BYTES: u64 = 16 << 10;
/// Console lines quoted in an error.
const CONSOLE_LINES: usize = 20;
/// Text in the console line of a kernel panic; the lines after it show registers.
const PANIC: &[u8] = b"Kernel panic";

/// Adds the VM's exit reason and the end of its console to an error.
pub(super) async fn explain(vm: &Arc<Vm>, mut error: ApiError) -> ApiError {
    if vm.process().is_none() && vm.live().exit.is_none() {
        return error; // no VMM was started
    }
    // If the VMM is ending, its exit record explains more than a broken connection.
    let _ = timeout(Duration::from_millis(300), vm.wait_gone()).await;
    if let Some(exit) = vm.live().exit {
        error = ApiError::new(
            ErrorCode::Guest,
            format_args!(
                "VM {} ended while it started ({:?}): {}",
                vm.name, exit.reason, exit.message
            ),
        );
    }
    let dir = vm.dir.clone();
    let tail = blocking(move || Ok(console_tail(&dir))).await.unwrap_or_default();
    if !tail.trim().is_empty() {
        error.0.message.push_str("\nthe end of its console:\n");
        error.0.message.push_str(tail.trim_end());
    }
    error
}

/// The end of a console as text. After a kernel panic, the lines up to the panic instead of the
/// registers.
#[must_use]
pub(super) fn console_tail(dir: &VmDir) -> String {
    last_lines(&console::tail(dir, CONSOLE_READ_BYTES).unwrap_or_default())
}

/// The last lines of a console. The guest controls them, so each is escaped and cut.
fn last_lines(console: &[u8]) -> String {
    let lines: Vec<&[u8]> = console.split(|byte| *byte == b'\n').collect();
    // The text after the last newline is not a line if it is empty.
    let lines = lines.strip_suffix(&[&b""[..]]).unwrap_or(&lines);
    let panic = lines.iter().position(|line| line.windows(PANIC.len()).any(|words| words == PANIC));
    let end = panic.map_or(lines.len(), |at| at + 1);
    let shown = lines[end.saturating_sub(CONSOLE_LINES)..end].iter();
    // A serial console ends lines with a carriage return and a newline.
    let shown =
        shown.map(|line| escaped(line.strip_suffix(b"\r").unwrap_or(line), SHORT).to_string());
    shown.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_of_a_console_ends_where_the_kernel_panicked() {
        let lines =
            |range: std::ops::Range<i32>| range.map(|n| format!("line {n}\n")).collect::<String>();
        assert_eq!(last_lines(b""), "");
        assert_eq!(last_lines(b"a\r\nb"), "a\nb");
        let hostile = last_lines(b"\x1b]52;c;bW9v\x07\r\n\xc2\x9b2J \xe2\x80\xae\xff\n");
        assert_eq!(hostile, "\\x1b]52;c;bW9v\\x07\n\\u{9b}2J \\u{202e}\\xff");
        assert!(last_lines(&[b'x'; 9999]).chars().count() <= SHORT);
        assert_eq!(last_lines(lines(0..100).as_bytes()).lines().next(), Some("line 80"));
        let panicked = format!("{}Kernel panic - not syncing\n{}", lines(0..30), lines(100..150));
        assert!(last_lines(panicked.as_bytes()).ends_with("line 29\nKernel panic - not syncing"));
    }
}
