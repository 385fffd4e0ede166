//! Failpoints: named places at which a test ends this process, or holds it up.
//!
//! A failpoint stands between two steps of an operation, so that a test can show what a crash
//! between them leaves. Unless one is armed, [`reached`] costs one relaxed load.
//!
//! | action | armed by | at the chosen pass |
//! |---|---|---|
//! | end | [`arm_from_env`], once at the start of a program | the process sends itself SIGKILL |
//! | end | the file that the environment names, when it is there | likewise |
//! | hold | [`hold`] or [`Group::hold`], in a test | the pass blocks until it is released |
//!
//! A crate that has failpoints lists their names in `FAILPOINTS`. A test compares the list with
//! [`in_sources`].

use crate::sync::lock;
use rustix::process::{Signal, getpid, kill_process};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::{fs, io};

/// The environment variable that arms a failpoint: `NAME`, or `NAME:COUNT` for a later pass. Or it
/// is `@PATH`: a file with that text arms the failpoint, from the first pass that finds the file.
pub const VARIABLE: &str = "DAYFLY_FAILPOINT";

/// Whether a failpoint is armed.
static ARMED: AtomicBool = AtomicBool::new(false);
static STATE: Mutex<Option<Armed>> = Mutex::new(None);
/// The file that arms a failpoint, and the names that it may have.
static FILE: Mutex<Option<(PathBuf, Vec<String>)>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();
/// Held while a test has a failpoint, because a process has one at a time.
static ONE: Mutex<()> = Mutex::new(());

thread_local! {
    /// The group of this thread.
    static GROUP: Cell<Option<Group>> = const { Cell::new(None) };
}

/// The threads of one test. Tests of one process run at the same time, and a hold of a group
/// concerns no thread of another test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group(u64);

#[derive(Debug)]
struct Armed {
    name: String,
    /// Passes left, with the one that acts.
    left: u32,
    /// The group whose passes count; all passes if there is none.
    group: Option<Group>,
    action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// Ends the process.
    End,
    /// Blocks the pass.
    Hold,
    /// A pass blocks now.
    Held,
}

/// Why no failpoint was armed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ArmError {
    /// The program has no such failpoint.
    #[error("{VARIABLE}: expected the name of a failpoint, got {got:?}; --failpoints lists them")]
    Name {
        /// The name in the variable.
        got: String,
    },
    /// The count is no number of passes.
    #[error("{VARIABLE}: expected NAME:COUNT with a count from 1 to {}, got {got:?}", u32::MAX)]
    Count {
        /// The value of the variable.
        got: String,
    },
}

/// Marks the failpoint `name`. Does nothing unless a test has armed it.
#[inline]
pub fn reached(name: &'static str) {
    if ARMED.load(Ordering::Relaxed) {
        passed(name);
    }
}

#[cold]
fn passed(name: &'static str) {
    let mut state = lock(&STATE);
    if state.is_none() {
        *state = armed_by_file();
    }
    let counts = |armed: &&mut Armed| {
        let concerned = armed.group.is_none() || armed.group == GROUP.get();
        armed.name == name && armed.left > 0 && concerned
    };
    let Some(armed) = state.as_mut().filter(counts) else {
        return;
    };
    armed.left -= 1;
    if armed.left > 0 {
        return;
    }
    if armed.action == Action::End {
        // The lock stays held, so no other thread passes this failpoint meanwhile.
        let _ended_below = kill_process(getpid(), Signal::KILL);
        std::process::abort();
    }
    armed.action = Action::Held;
    CHANGED.notify_all();
    while state.as_ref().is_some_and(|armed| armed.action == Action::Held) {
        state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

/// What the file arms, if it is there. Ends the process if the file has a wrong text, because a
/// test would wait for ever.
fn armed_by_file() -> Option<Armed> {
    let file = lock(&FILE);
    let (path, known) = file.as_ref()?;
    let text = fs::read_to_string(path).ok()?;
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    match parse(text.trim(), &known) {
        Ok((name, left)) => Some(Armed { name, left, group: None, action: Action::End }),
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            std::process::abort();
        }
    }
}

/// Arms the failpoint that the environment names, one of `known`: this process will end there.
/// Returns the value of the variable. To be called once, before the first failpoint.
///
/// # Errors
/// [`ArmError`].
pub fn arm_from_env(known: &[&str]) -> Result<Option<String>, ArmError> {
    let Some(value) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let value = value.to_string_lossy().into_owned();
    if value.is_empty() {
        return Ok(None);
    }
    if let Some(path) = value.strip_prefix('@') {
        let known = known.iter().map(ToString::to_string).collect();
        *lock(&FILE) = Some((path.into(), known));
        ARMED.store(true, Ordering::Relaxed);
        return Ok(Some(value));
    }
    let (name, left) = parse(&value, known)?;
    *lock(&STATE) = Some(Armed { name, left, group: None, action: Action::End });
    ARMED.store(true, Ordering::Relaxed);
    Ok(Some(value))
}

fn parse(value: &str, known: &[&str]) -> Result<(String, u32), ArmError> {
    let (name, count) = value.split_once(':').unwrap_or((value, "1"));
    let left = count.parse().ok().filter(|left| *left > 0);
    let left = left.ok_or_else(|| ArmError::Count { got: value.to_owned() })?;
    if !known.contains(&name) {
        return Err(ArmError::Name { got: name.to_owned() });
    }
    Ok((name.to_owned(), left))
}

/// A failpoint at which one pass blocks until this is dropped.
#[derive(Debug)]
pub struct Hold {
    _one: std::sync::MutexGuard<'static, ()>,
}

/// Arms the failpoint `name` of this process: its pass number `count` blocks its thread. Waits
/// until no other test has a failpoint.
#[must_use]
pub fn hold(name: &'static str, count: u32) -> Hold {
    hold_of(None, name, count)
}

fn hold_of(group: Option<Group>, name: &'static str, count: u32) -> Hold {
    let (one, left) = (lock(&ONE), count.max(1));
    *lock(&STATE) = Some(Armed { name: name.to_owned(), left, group, action: Action::Hold });
    ARMED.store(true, Ordering::Relaxed);
    Hold { _one: one }
}

impl Group {
    /// A group without threads.
    #[expect(clippy::new_without_default, reason = "two groups are never equal")]
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Puts this thread into the group.
    pub fn join(self) {
        GROUP.set(Some(self));
    }

    /// As [`hold`], of the group's threads only.
    #[must_use]
    pub fn hold(self, name: &'static str, count: u32) -> Hold {
        hold_of(Some(self), name, count)
    }
}

impl Hold {
    /// Blocks until the pass blocks.
    pub fn wait(&self) {
        let mut state = lock(&STATE);
        while state.as_ref().is_some_and(|armed| armed.action == Action::Hold) {
            state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the pass blocks.
    #[must_use]
    pub fn is_reached(&self) -> bool {
        lock(&STATE).as_ref().is_some_and(|armed| armed.action == Action::Held)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        ARMED.store(false, Ordering::Relaxed);
        lock(&STATE).take();
        CHANGED.notify_all();
    }
}

/// The names of all failpoints in the Rust files below `folder`, for a test of a crate's list.
///
/// # Errors
/// A file cannot be read.
pub fn in_sources(folder: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            names.extend(in_sources(&path)?);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path)?;
            let calls = text.split("reached(\"").skip(1);
            names.extend(calls.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn the_variable_names_a_failpoint_and_a_pass() {
        let known = ["a.b", "a.c"];
        assert_eq!(parse("a.b", &known), Ok(("a.b".to_owned(), 1)));
        assert_eq!(parse("a.c:12", &known), Ok(("a.c".to_owned(), 12)));
        assert_eq!(parse("a.d", &known), Err(ArmError::Name { got: "a.d".to_owned() }));
        for value in ["a.b:0", "a.b:", "a.b:x", "a.b:-1"] {
            assert_eq!(parse(value, &known), Err(ArmError::Count { got: value.to_owned() }));
        }
        let shown = parse("a.d:2", &known).unwrap_err().to_string();
        assert!(shown.contains("a.d") && shown.contains("--failpoints"), "{shown}");
    }

    #[test]
    fn the_chosen_pass_blocks_until_the_test_goes_on() {
        reached("held"); // is inert
        let held = hold("held", 2);
        let (sender, passes) = mpsc::channel();
        let thread = thread::spawn(move || {
            for pass in 1..=3 {
                reached("another");
                reached("held");
                sender.send(pass).unwrap();
            }
        });
        held.wait();
        assert_eq!(passes.try_iter().collect::<Vec<_>>(), [1]);
        drop(held);
        thread.join().unwrap();
        assert_eq!(passes.try_iter().collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn a_hold_of_a_group_concerns_no_thread_of_another() {
        let (ours, others) = (Group::new(), Group::new());
        let held = ours.hold("grouped", 1);
        reached("grouped"); // of no group
        thread::spawn(move || (others.join(), reached("grouped"))).join().unwrap();
        assert!(!held.is_reached());
        let thread = thread::spawn(move || (ours.join(), reached("grouped")));
        held.wait();
        assert!(held.is_reached() && !thread.is_finished());
        drop(held);
        thread.join().unwrap();
    }

    #[test]
    fn sources_are_searched_in_all_folders() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("deeper")).unwrap();
        let call = |name: &str| format!("failpoint::reached({name:?});");
        fs::write(folder.path().join("a.rs"), [call("one"), call("two")].concat()).unwrap();
        fs::write(folder.path().join("deeper/b.rs"), call("three")).unwrap();
        fs::write(folder.path().join("c.txt"), call("none")).unwrap();
        let found = in_sources(folder.path()).unwrap();
        assert_eq!(found, ["one", "three", "two"].map(str::to_owned).into());
    }
}
