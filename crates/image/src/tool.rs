//! Runs external programs (mke2fs, debugfs, mmdebstrap, apt, dpkg). Errors name the next step for
//! the user.
//!
//! A program started here dies with this process (`PR_SET_PDEATHSIG`) and reads nothing from the
//! terminal. Its messages are in English (`LC_ALL=C`). Its PATH includes the sbin folders, which an
//! ordinary user's PATH lacks.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};

/// Upper limit for the bytes of standard output that are kept.
const STDOUT_CAP_BYTES: u64 = 64 << 20;
/// Lines of standard error that are kept for an error's text.
const TAIL_LINES: usize = 12;
/// Bytes of one line of standard error that are kept.
const LINE_CAP_BYTES: usize = 1024;

/// Why an external program failed.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// The program could not be started.
    #[error(
        "cannot run {program}: {source}; it comes with Debian's package {package} \
         (apt-get install {package})"
    )]
    Start {
        /// The program's name.
        program: String,
        /// The Debian package that contains the program.
        package: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The program ended with an error.
    #[error("{command}: expected exit status 0, got {status}; its last words:\n{tail}")]
    Failed {
        /// The command line, shortened.
        command: String,
        /// The program's exit status.
        status: ExitStatus,
        /// The last lines of its standard error.
        tail: String,
    },
    /// The program exited with success, but wrote an error message to standard error.
    #[error("{command}: it reported:\n{tail}")]
    Complained {
        /// The command line, shortened.
        command: String,
        /// The message.
        tail: String,
    },
    /// Reading from the program or waiting for it failed.
    #[error("{command}: {source}")]
    Io {
        /// The command line, shortened.
        command: String,
        /// The cause.
        source: io::Error,
    },
}

/// The output of a program.
pub struct Output {
    /// Standard output.
    pub stdout: Vec<u8>,
}

/// A command for `program`, with the environment that the module describes.
pub fn tool(program: &str) -> Command {
    let mut command = Command::new(program);
    let mut path = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    path.push(":/usr/local/sbin:/usr/sbin:/sbin");
    command.env("PATH", path).env("LC_ALL", "C").env_remove("LANGUAGE");
    command
}

/// The command line as text for people, cut at 400 characters.
pub fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
        if text.chars().count() > 400 {
            text = text.chars().take(400).collect();
            text.push('…');
            break;
        }
    }
    text
}

/// Runs `command` to its end and returns its standard output. `on_line` receives every line of
/// standard error.
pub fn run(
    command: Command,
    package: &'static str,
    on_line: impl FnMut(&str),
) -> Result<Output, ToolError> {
    let (stdout, _) = run_reading(command, package, on_line, |out| {
        let mut kept = Vec::new();
        out.take(STDOUT_CAP_BYTES).read_to_end(&mut kept)?;
        io::copy(out, &mut io::sink())?;
        Ok(kept)
    })?;
    Ok(Output { stdout })
}

/// Like [`run`], but `reader` reads standard output to its end, in a separate thread. Returns the
/// reader's result and the last lines of standard error.
pub fn run_reading<T: Send>(
    mut command: Command,
    package: &'static str,
    mut on_line: impl FnMut(&str),
    reader: impl FnOnce(&mut dyn Read) -> io::Result<T> + Send,
) -> Result<(T, Vec<String>), ToolError> {
    let text = describe(&command);
    let parent = rustix::process::getpid();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: between fork and exec the child makes only two system calls (prctl and getppid,
    // through rustix, which allocates nothing). An io::Error is built from a number. So the child
    // touches no lock and no heap of the parent.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // The parent may have died before the line above; then the kernel would never send the
            // signal.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error()));
            }
            Ok(())
        });
    }
    let mut child = command.spawn().map_err(|source| ToolError::Start {
        program: command.get_program().to_string_lossy().into_owned(),
        package,
        source,
    })?;
    let failed = |source| ToolError::Io { command: text.clone(), source };
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (stdout, tail) = std::thread::scope(|scope| {
        let reader = scope.spawn(move || match out {
            Some(mut out) => reader(&mut out),
            None => reader(&mut io::empty()),
        });
        let tail = err.map_or_else(|| Ok(Vec::new()), |err| follow(err, &mut on_line));
        let stdout =
            reader.join().unwrap_or_else(|_| Err(io::Error::other("the reader ended early")));
        (stdout, tail)
    });
    let status = child.wait().map_err(failed)?;
    let (stdout, tail) = (stdout.map_err(failed)?, tail.map_err(failed)?);
    if status.success() {
        Ok((stdout, tail))
    } else {
        Err(ToolError::Failed { command: text, status, tail: tail.join("\n") })
    }
}

/// Reads lines (or carriage-return progress) to the end; returns the last few.
fn follow(stream: impl Read, on_line: &mut impl FnMut(&str)) -> io::Result<Vec<String>> {
    let mut reader = BufReader::new(stream);
    let mut tail: Vec<String> = Vec::new();
    let mut line = Vec::new();
    loop {
        let part = reader.fill_buf()?;
        if part.is_empty() && line.is_empty() {
            return Ok(tail);
        }
        let end = part.iter().position(|b| matches!(b, b'\n' | b'\r'));
        let room = LINE_CAP_BYTES.saturating_sub(line.len());
        let upto = end.unwrap_or(part.len());
        line.extend_from_slice(&part[..upto.min(room)]);
        let (used, finished) =
            (end.map_or(part.len(), |e| e + 1), end.is_some() || part.is_empty());
        reader.consume(used);
        if finished {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            if !text.is_empty() {
                on_line(&text);
                if tail.len() == TAIL_LINES {
                    tail.remove(0);
                }
                tail.push(text);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command_and_its_last_words() {
        let mut sh = tool("sh");
        sh.args(["-c", "i=0; while [ $i -lt 100 ]; do echo line $i >&2; i=$((i+1)); done; exit 3"]);
        let text = run(sh, "dash", |_| ()).err().unwrap().to_string();
        assert!(text.contains("exit status: 3") && text.contains("line 99"), "{text}");
        assert!(!text.contains("line 1\n"), "{text}");
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let text =
            run(tool("dayfly-no-such-program"), "e2fsprogs", |_| ()).err().unwrap().to_string();
        assert!(text.contains("apt-get install e2fsprogs"), "{text}");
    }

    #[test]
    fn output_and_lines_arrive() {
        let mut sh = tool("sh");
        sh.args(["-c", "printf 'a\\rb\\n\\nlast' >&2; printf out"]);
        let mut lines = Vec::new();
        let output = run(sh, "dash", |l| lines.push(l.to_owned())).unwrap();
        assert_eq!(output.stdout, b"out");
        assert_eq!(lines, ["a", "b", "last"]);
    }
}
