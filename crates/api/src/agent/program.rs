//! Detached programs of a guest.

use serde::{Deserialize, Serialize};

/// How a program ended, as JSON in the `Exit` frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Exit {
    /// The exit code, unless a signal ended the program.
    pub code: Option<i32>,
    /// The signal that ended the program.
    pub signal: Option<i32>,
    /// Whether `timeout_ms` ran out.
    pub timed_out: bool,
}

/// A program that was started detached, while its output is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Program {
    /// The program's id: 12 hexadecimal digits. A clone of the VM has its copy under the same id.
    pub id: String,
    /// The process id in the guest. The kernel may use it again after the program's end.
    pub pid: u32,
    /// Program and arguments, cut to 512 bytes.
    pub command: Vec<String>,
    /// The user as in the request; empty: root.
    pub user: String,
    /// When it was started, by the guest's clock.
    pub started_unix_ms: u64,
    /// How it ended; `None` while it runs.
    pub exit: Option<Exit>,
    /// When it ended, by the guest's clock.
    pub ended_unix_ms: Option<u64>,
}

/// The index of the program that `word` names: by its id, by its process id, or by the unique start
/// of its id. `programs` has id and process id of each, the oldest first. Of several with one
/// process id, the newest. A number is never the start of an id, because the process id of a
/// program that is forgotten must not name another one.
#[must_use]
pub fn find<'a>(
    programs: impl DoubleEndedIterator<Item = (&'a str, u32)> + ExactSizeIterator + Clone,
    word: &str,
) -> Option<usize> {
    let newest = |fits: &dyn Fn(&str, u32) -> bool| {
        programs.clone().enumerate().rev().find(|(_, (id, pid))| fits(id, *pid)).map(|(n, _)| n)
    };
    let pid: Option<u32> = word.parse().ok();
    newest(&|id, _| id == word).or_else(|| newest(&|_, of| pid == Some(of))).or_else(|| {
        let is_start = word.bytes().any(|byte| !byte.is_ascii_digit());
        let mut fits =
            programs.clone().enumerate().filter(|(_, (id, _))| is_start && id.starts_with(word));
        fits.next().filter(|_| fits.next().is_none()).map(|(n, _)| n)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_names_one_program_or_none() {
        let all = [("12ab", 7), ("12cd", 8), ("8ef0", 7), ("9999", 12)];
        let found = |word| find(all.iter().map(|(id, pid)| (*id, *pid)), word);
        assert_eq!(found("12ab"), Some(0));
        assert_eq!(found("7"), Some(2), "the newest of that process id");
        assert_eq!(found("8"), Some(1), "a process id goes before the start of an id");
        assert_eq!(found("12"), Some(3));
        assert_eq!(found("12c"), Some(1));
        assert_eq!((found("1"), found(""), found("x")), (None, None, None));
        assert_eq!((found("999"), found("9999")), (None, Some(3)), "a number is no start");
    }
}
