//! The output of detached programs: the last bytes stay in memory for the host to read.
//!
//! ```text
//! program ──pipe──▶ a thread ──▶ Log (a ring of at most LOG_BYTES) ◀── Request::Log
//! ```
//!
//! Both output streams share one pipe, which keeps their order. The thread reads until the last
//! process that holds the pipe has closed it; this may be a service that outlives the program. A
//! log is part of the machine's memory, so a clone has its parent's logs.

use crate::wire::{Conn, WireError};
use dayfly_api::agent::{ExecSpec, Failure, FailureCode, FrameKind, MAX_FRAME_BYTES, Reply};
use dayfly_units::sync::lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum bytes kept of each program.
pub const LOG_BYTES: usize = 256 << 10;
/// Maximum number of programs whose output is kept.
pub const MOST_LOGS: usize = 32;
/// Maximum bytes per read.
const CHUNK_BYTES: usize = 16 << 10;
/// Interval of the check whether a following client is still connected.
const LOOK: Duration = Duration::from_millis(500);

/// The logs of the last programs, oldest first.
#[derive(Debug, Default)]
pub struct Logs(Mutex<VecDeque<Arc<Log>>>);

/// The output of one program.
#[derive(Debug)]
struct Log {
    pid: u32,
    program: String,
    kept: Mutex<Kept>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Kept {
    bytes: VecDeque<u8>,
    /// Number of bytes dropped before `bytes`.
    dropped: u64,
    /// No process can write to the pipe any more.
    ended: bool,
    /// The log was dropped in favour of newer programs, and keeps nothing.
    forgotten: bool,
}

/// A thread that reads a pipe, and first waits for the log to write to.
pub(super) struct Reader {
    log: std::sync::mpsc::SyncSender<Arc<Log>>,
}

impl Log {
    fn add(&self, bytes: &[u8]) {
        let mut kept = lock(&self.kept);
        if kept.forgotten {
            return;
        }
        let room = LOG_BYTES.saturating_sub(bytes.len());
        let drop = kept.bytes.len().saturating_sub(room);
        kept.bytes.drain(..drop);
        kept.bytes.extend(bytes);
        kept.dropped += drop as u64;
        self.more.notify_all();
    }

    fn change(&self, change: impl FnOnce(&mut Kept)) {
        change(&mut lock(&self.kept));
        self.more.notify_all();
    }
}

/// Creates the pipe for a program's output and the thread that reads it. Called before the program
/// starts, so that no program runs without a reader.
///
/// # Errors
/// No pipe or no thread can be created.
pub(super) fn pipe() -> Result<(OwnedFd, Reader), Errno> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let (log, whose) = std::sync::mpsc::sync_channel::<Arc<Log>>(1);
    let drain = move || {
        // A closed channel: the program did not start.
        let Ok(log) = whose.recv() else { return };
        let mut bytes = vec![0; CHUNK_BYTES];
        loop {
            match rustix::io::read(&read, &mut bytes[..]) {
                Ok(0) => break,
                Ok(n) => log.add(bytes.get(..n).unwrap_or_default()),
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        log.change(|kept| kept.ended = true);
    };
    let thread = std::thread::Builder::new().name("detached".into()).stack_size(64 << 10);
    thread.spawn(drain).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))?;
    Ok((write, Reader { log }))
}

impl Logs {
    /// Adds the log of a program that has started. If there are [`MOST_LOGS`] already, the oldest
    /// log of an ended program is dropped, or the oldest log if all programs still write.
    pub(super) fn add(&self, pid: u32, spec: &ExecSpec, reader: Reader) {
        let program =
            spec.argv.first().map(|word| word.chars().take(64).collect()).unwrap_or_default();
        let log = Arc::new(Log { pid, program, kept: Mutex::default(), more: Condvar::new() });
        let mut logs = lock(&self.0);
        if logs.len() >= MOST_LOGS {
            let ended = logs.iter().position(|log| lock(&log.kept).ended).unwrap_or(0);
            if let Some(old) = logs.remove(ended) {
                old.change(|kept| *kept = Kept { forgotten: true, ended: true, ..Kept::default() });
            }
        }
        logs.push_back(Arc::clone(&log));
        drop(logs);
        // The reader thread waits for this log.
        let _ = reader.log.send(log);
    }

    fn find(&self, pid: u32) -> Result<Arc<Log>, Failure> {
        let logs = lock(&self.0);
        // The newest first, because the kernel may have reused a pid.
        if let Some(log) = logs.iter().rev().find(|log| log.pid == pid) {
            return Ok(Arc::clone(log));
        }
        let known = logs
            .iter()
            .rev()
            .map(|log| format!("{} ({})", log.pid, log.program))
            .collect::<Vec<_>>();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        let message = format!("detached program {pid}: expected one whose output is kept: {known}");
        Err(Failure { code: FailureCode::NotFound, message })
    }

    /// Serves [`dayfly_api::agent::Request::Log`]: sends the kept output. With `follow` it also
    /// sends new output until no process can write any more.
    ///
    /// # Errors
    /// [`WireError`] if the client is gone.
    pub fn send(&self, conn: &mut Conn, pid: u32, follow: bool) -> Result<(), WireError> {
        let log = match self.find(pid) {
            Ok(log) => log,
            Err(failure) => return conn.reply(&Reply::Err(failure)),
        };
        conn.reply(&Reply::Ok)?;
        // Offset in everything that was ever written.
        let mut at = 0;
        loop {
            let (gap, bytes, more) = {
                let mut kept = lock(&log.kept);
                let end = kept.dropped + kept.bytes.len() as u64;
                if follow && at == end && !kept.ended {
                    kept = self::wait(&log, kept);
                }
                let gap = kept.dropped.saturating_sub(at);
                let from = usize::try_from(at.saturating_sub(kept.dropped)).unwrap_or(usize::MAX);
                let bytes: Vec<u8> =
                    kept.bytes.iter().skip(from).take(MAX_FRAME_BYTES / 2).copied().collect();
                at += gap + bytes.len() as u64;
                let rest = at < kept.dropped + kept.bytes.len() as u64;
                (gap, bytes, rest || (follow && !kept.ended))
            };
            if gap > 0 {
                let note = format!("[dayfly: {gap} bytes of older output are dropped]\n");
                conn.push(FrameKind::Data, note.as_bytes());
            }
            if !bytes.is_empty() {
                conn.push(FrameKind::Data, &bytes);
            }
            conn.flush()?;
            if !more {
                conn.push(FrameKind::End, &[]);
                return conn.flush();
            }
            if is_gone(conn) {
                return Ok(());
            }
        }
    }
}

/// Waits for more output, or until the next check of the client.
fn wait<'a>(log: &'a Log, kept: MutexGuard<'a, Kept>) -> MutexGuard<'a, Kept> {
    log.more.wait_timeout(kept, LOOK).unwrap_or_else(PoisonError::into_inner).0
}

fn is_gone(conn: &Conn) -> bool {
    let mut fds = [PollFd::new(conn, PollFlags::RDHUP)];
    let now = crate::wire::timespec(Duration::ZERO);
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    matches!(poll(&mut fds, Some(&now)), Ok(1..)) && fds[0].revents().intersects(gone)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Buffers;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn program(logs: &Logs, pid: u32) -> File {
        let (write, reader) = pipe().unwrap();
        logs.add(pid, &ExecSpec { argv: vec![format!("p{pid}")], ..ExecSpec::default() }, reader);
        write.into()
    }

    /// The frames of an answer: the reply, and the data if there is any.
    fn asked(logs: &Logs, pid: u32, follow: bool) -> (Reply, Vec<u8>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut conn = Conn::new(Arc::new(ours.into()), Buffers::default());
                logs.send(&mut conn, pid, follow).unwrap();
            });
            answered(theirs)
        })
    }

    fn answered(mut stream: UnixStream) -> (Reply, Vec<u8>) {
        let (mut reply, mut data) = (None, Vec::new());
        loop {
            let mut header = [0; dayfly_api::agent::HEADER_BYTES];
            stream.read_exact(&mut header).unwrap();
            let (kind, length) = dayfly_api::agent::decode_header(header).unwrap();
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            match kind {
                FrameKind::Reply => {
                    let got: Reply = serde_json::from_slice(&body).unwrap();
                    if got != Reply::Ok {
                        return (got, data);
                    }
                    reply = Some(got);
                }
                FrameKind::Data => data.extend(body),
                FrameKind::End => return (reply.unwrap(), data),
                other => panic!("{other:?}"),
            }
        }
    }

    fn until_ended(logs: &Logs, pid: u32) {
        asked(logs, pid, true);
    }

    #[test]
    fn the_newest_output_is_kept_within_the_bound() {
        let logs = Logs::default();
        let mut out = program(&logs, 7);
        out.write_all(&vec![b'x'; 5 << 20]).unwrap();
        out.write_all(b"\nthe newest line\n").unwrap();
        drop(out);
        until_ended(&logs, 7);
        let (reply, data) = asked(&logs, 7, false);
        let text = String::from_utf8(data).unwrap();
        assert_eq!(reply, Reply::Ok);
        assert!(text.ends_with("x\nthe newest line\n"), "{}", &text[text.len() - 40..]);
        let dropped = (5 << 20) + 17 - LOG_BYTES;
        assert!(
            text.starts_with(&format!("[dayfly: {dropped} bytes of older output are dropped]\nx"))
        );
        assert!(text.len() < LOG_BYTES + 100, "{}", text.len());
    }

    #[test]
    fn a_client_that_follows_gets_all_of_it_until_the_last_writer_is_gone() {
        let logs = Logs::default();
        let mut out = program(&logs, 7);
        let mut service = out.try_clone().unwrap();
        out.write_all(b"one\n").unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            let logs = &logs;
            scope.spawn(move || {
                let mut conn = Conn::new(Arc::new(ours.into()), Buffers::default());
                logs.send(&mut conn, 7, true).unwrap();
            });
            // A read in between: the program ends and leaves a service behind.
            drop(out);
            service.write_all(b"two\n").unwrap();
            service.write_all(b"three\n").unwrap();
            drop(service);
            assert_eq!(answered(theirs).1, b"one\ntwo\nthree\n");
        });
        // A client that disconnects also ends the request, although the program continues.
        let _out = program(&logs, 8);
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let mut conn = Conn::new(Arc::new(ours.into()), Buffers::default());
        let _ = logs.send(&mut conn, 8, true);
    }

    #[test]
    fn the_number_of_kept_programs_is_limited_and_ended_ones_go_first() {
        let logs = Logs::default();
        let mut first = program(&logs, 1);
        drop(program(&logs, 2));
        until_ended(&logs, 2);
        let mut others: Vec<File> = Vec::new();
        for pid in 3..=u32::try_from(MOST_LOGS).unwrap() + 1 {
            others.push(program(&logs, pid));
        }
        let (reply, _) = asked(&logs, 2, false);
        let Reply::Err(Failure { code: FailureCode::NotFound, message }) = reply else {
            panic!("{reply:?}")
        };
        assert!(
            message.contains("detached program 2: ") && message.contains(" 1 (p1)"),
            "{message}"
        );
        first.write_all(b"still kept").unwrap();
        // The next program replaces the oldest log although that program runs, and the program does
        // not notice.
        others.push(program(&logs, 1000));
        assert!(matches!(asked(&logs, 1, false).0, Reply::Err(_)));
        first.write_all(&vec![b'x'; 1 << 20]).unwrap();
        assert_eq!(lock(&logs.0).len(), MOST_LOGS);
        assert!(matches!(asked(&Logs::default(), 1, true).0, Reply::Err(_)));
    }
}
