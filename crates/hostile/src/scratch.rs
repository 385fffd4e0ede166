//! A folder in which a test runs a copy and then lists every file that exists.

use crate::Verdict;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The most memory that a copy may have resident at any time.
pub const MAX_PEAK_BYTES: u64 = 32 << 20;
/// The longest error that a copy may print.
const MAX_ERROR_BYTES: usize = 20 << 10;

/// A folder `home` with a file `.bashrc`, and beside `home` a folder `outside` with a file.
#[derive(Debug)]
pub struct Scratch(tempfile::TempDir);

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Scratch {
    /// Creates the folders and files.
    #[must_use]
    pub fn new() -> Self {
        let scratch = Self(tempfile::tempdir().unwrap());
        let outside = scratch.beside("outside");
        std::fs::create_dir(scratch.home()).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(scratch.home().join(".bashrc"), "mine\n").unwrap();
        std::fs::write(outside.join("there"), "there\n").unwrap();
        scratch
    }

    /// The folder in which the program runs.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.beside("home")
    }

    /// A path beside [`Self::home`].
    #[must_use]
    pub fn beside(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `command` in `home`, without standard input.
    #[must_use]
    pub fn run(&self, mut command: Command) -> Ran {
        // Files, because a pipe that is not read could stop the program.
        let (mut out, mut err) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        command.current_dir(self.home()).stdin(Stdio::null());
        command.stdout(out.try_clone().unwrap()).stderr(err.try_clone().unwrap());
        let (code, peak_bytes) = wait(&command.spawn().unwrap());
        Ran { code, peak_bytes, stdout: text(&mut out), stderr: text(&mut err) }
    }

    /// Everything in the folder: path, and kind or mode and content.
    #[must_use]
    pub fn files(&self) -> Vec<(String, String)> {
        let mut files = Vec::new();
        list(self.0.path(), self.0.path(), &mut files);
        files.sort();
        files
    }

    /// The value of [`Self::files`] before any run, plus `written`, which are paths below `home`.
    #[must_use]
    pub fn untouched_but(written: &[(&str, &str)]) -> Vec<(String, String)> {
        let own = |(path, what): (&str, &str)| (path.to_owned(), what.to_owned());
        let before = [
            ("home", "folder"),
            ("home/.bashrc", "644 mine\n"),
            ("outside", "folder"),
            ("outside/there", "644 there\n"),
        ];
        let written = written.iter().map(|(path, what)| own((&format!("home/{path}"), what)));
        let mut files: Vec<_> = before.into_iter().map(own).chain(written).collect();
        files.sort();
        files
    }
}

/// How a program ended.
#[derive(Debug)]
pub struct Ran {
    /// Its exit code, unless a signal ended it.
    pub code: Option<i32>,
    /// The most memory that was resident. Never less than this process's own peak, because Linux
    /// also counts the child's memory before execve(2).
    pub peak_bytes: u64,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Compares the end of a copy of `result.json` into `.` with the required result.
///
/// # Panics
/// The two differ.
pub fn check(name: &str, verdict: &Verdict, ran: &Ran, scratch: &Scratch) {
    let shown = format!("{name}: {ran:?}");
    assert!(ran.peak_bytes < MAX_PEAK_BYTES, "{shown}");
    assert!(!ran.stderr.contains(|c: char| c.is_control() && c != '\n'), "{shown}");
    assert!(ran.stderr.len() <= MAX_ERROR_BYTES, "{} bytes: {shown}", ran.stderr.len());
    assert_eq!(ran.stdout, "", "{shown}");
    // Before the error there may be progress, if it takes more than a second.
    let text: Vec<&str> = ran.stderr.lines().filter(|line| line.starts_with("dayfly: ")).collect();
    let written = match verdict {
        Verdict::Refused(words) => {
            assert_eq!(ran.code, Some(125), "{shown}");
            assert_eq!(
                (text.len(), ran.stderr.lines().last()),
                (1, text.last().copied()),
                "{shown}"
            );
            assert!(text[0].contains(words), "expected {words:?} in {shown}");
            &[][..]
        }
        Verdict::Written(files) => {
            assert_eq!(ran.code, Some(0), "{shown}");
            files
        }
    };
    assert_eq!(scratch.files(), Scratch::untouched_but(written), "{shown}");
}

fn text(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// The exit code, and the most memory that was resident.
fn wait(child: &Child) -> (Option<i32>, u64) {
    let mut status = 0;
    // SAFETY: a structure of numbers, for which zeroes are a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live variables of the right type; the child is ours and was not
    // waited for.
    let pid = unsafe { libc::wait4(child.id().cast_signed(), &raw mut status, 0, &raw mut usage) };
    assert_eq!(pid, child.id().cast_signed());
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    (code, u64::try_from(usage.ru_maxrss).unwrap() * 1024)
}

fn list(top: &Path, folder: &Path, files: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        let meta = path.symlink_metadata().unwrap();
        let what = if meta.is_symlink() {
            format!("-> {}", std::fs::read_link(&path).unwrap().display())
        } else if meta.is_dir() {
            list(top, &path, files);
            "folder".to_owned()
        } else if meta.is_file() && meta.len() < 1000 {
            let mode = meta.permissions().mode() & 0o7777;
            let content = std::fs::read(&path).unwrap();
            let capable = if has_capabilities(&path) { "capabilities " } else { "" };
            format!("{mode:o} {capable}{}", String::from_utf8_lossy(&content))
        } else {
            format!("{} bytes", meta.len())
        };
        files.push((path.strip_prefix(top).unwrap().display().to_string(), what));
    }
}

fn has_capabilities(path: &Path) -> bool {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    let name = c"security.capability";
    // SAFETY: both strings end with a zero byte; without room for a value lgetxattr(2) writes none
    // and gives its length.
    let length = unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    length >= 0
}
