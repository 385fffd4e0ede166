//! QEMU's monitor (QMP): notices that QEMU has paused the machine because this host's disk is full,
//! and lets it go on when there is space again.
//!
//! A write that meets ENOSPC pauses the machine (`werror=enospc`, QEMU's default), because the
//! guest would otherwise lose the write. Only `cont` ends the pause.
//!
//! ```text
//! running ──BLOCK_IO_ERROR (nospace), STOP──▶ paused ──cont, RESUME──▶ running
//!                                               ▲         │ the disk is full again
//!                                               └─────────┘
//! ```

use crate::run_state::PauseNote;
use serde::Deserialize;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Interval at which a paused machine's file system is looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// Free space in bytes with which the machine goes on. With less it would pause again at once.
pub(crate) const ENOUGH_BYTES: u64 = 64 << 20;

/// The longest line of the monitor, in bytes. A machine that has taken over its QEMU may send any.
const LINE_BYTES: u64 = 1 << 20;

const CAPABILITIES: &str = r#"{"execute":"qmp_capabilities"}"#;
const CONTINUE: &str = r#"{"execute":"cont"}"#;

/// Talks to the monitor on a separate thread until QEMU ends. `disk` is the machine's disk.
pub(crate) fn keep(stream: UnixStream, note: PauseNote, disk: PathBuf) {
    let talking = move || {
        if let Err(e) = talk(stream, &note, &disk, LOOK_AGAIN) {
            eprintln!("QEMU's monitor: {e}");
        }
    };
    let thread = std::thread::Builder::new().name("qmp".into()).stack_size(256 << 10);
    if let Err(e) = thread.spawn(talking) {
        eprintln!("QEMU's monitor is not read: {e}");
    }
}

fn talk(
    mut stream: UnixStream,
    note: &PauseNote,
    disk: &Path,
    look_again: Duration,
) -> io::Result<()> {
    stream.set_read_timeout(Some(look_again))?;
    let mut lines = BufReader::new(stream.try_clone()?);
    let mut monitor = Monitor::default();
    // Kept across a timeout, because a line may arrive in pieces.
    let mut line = Vec::new();
    loop {
        let room = LINE_BYTES.saturating_sub(line.len() as u64);
        match lines.by_ref().take(room).read_until(b'\n', &mut line) {
            Ok(_) if line.len() as u64 >= LINE_BYTES => {
                let text = format!("a line: expected at most {LINE_BYTES} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            Ok(0) => return Ok(()),
            Ok(_) => {
                let reply = monitor.read(&line);
                line.clear();
                if let Some(reply) = reply {
                    writeln!(stream, "{reply}")?;
                }
                note.write(monitor.paused(disk).as_deref())?;
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock) => {
                // QEMU may pause the machine again at once, which is the same event again.
                if monitor.no_space && monitor.stopped && free_bytes(disk)? >= ENOUGH_BYTES {
                    writeln!(stream, "{CONTINUE}")?;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// What QEMU's events say.
#[derive(Debug, Default)]
pub(crate) struct Monitor {
    /// Whether a write has met a full disk since the machine last ran.
    no_space: bool,
    stopped: bool,
}

#[derive(Deserialize)]
struct Message {
    #[serde(rename = "QMP")]
    greeting: Option<serde_json::Value>,
    event: Option<String>,
    #[serde(default)]
    data: serde_json::Value,
}

impl Monitor {
    /// Reads one message, and returns the command that answers it. Answers of QEMU, unknown events
    /// and damaged lines change nothing.
    pub(crate) fn read(&mut self, line: &[u8]) -> Option<&'static str> {
        let message: Message = serde_json::from_slice(line).ok()?;
        if message.greeting.is_some() {
            return Some(CAPABILITIES);
        }
        match message.event.as_deref()? {
            "BLOCK_IO_ERROR" => self.no_space |= message.data["nospace"] == true,
            "STOP" => self.stopped = true,
            "RESUME" => *self = Self::default(),
            _ => {}
        }
        None
    }

    /// Why the machine is paused, if it is.
    pub(crate) fn paused(&self, disk: &Path) -> Option<String> {
        let folder = disk.parent().unwrap_or(disk).display();
        match (self.stopped, self.no_space) {
            (false, _) => None,
            (true, true) => Some(format!(
                "the file system of {folder} is full; the machine goes on when {} MiB are free \
                 there",
                ENOUGH_BYTES >> 20
            )),
            (true, false) => Some("QEMU has stopped it".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;

    #[test]
    fn a_full_disk_pauses_the_machine_until_qemu_goes_on() {
        let (mut monitor, disk) = (Monitor::default(), Path::new("/home/machine/disk.img"));
        let greeting = br#"{"QMP":{"version":{"qemu":{"major":7}},"capabilities":["oob"]}}"#;
        assert_eq!(monitor.read(greeting), Some(CAPABILITIES));
        assert_eq!(monitor.read(br#"{"return":{}}"#), None);
        assert_eq!(monitor.paused(disk), None);
        let error = br#"{"event":"BLOCK_IO_ERROR","data":{"device":"","nospace":true,
            "node-name":"disk","reason":"No space left on device","operation":"write",
            "action":"stop"},"timestamp":{"seconds":1,"microseconds":2}}"#;
        assert_eq!(monitor.read(error), None);
        assert_eq!(monitor.paused(disk), None, "it still runs");
        monitor.read(br#"{"event":"STOP","timestamp":{"seconds":1,"microseconds":2}}"#);
        let why = monitor.paused(disk).unwrap();
        assert!(why.starts_with("the file system of /home/machine is full"), "{why}");
        monitor.read(br#"{"event":"RESUME"}"#);
        assert_eq!(monitor.paused(disk), None);
        assert!(!monitor.no_space, "a later stop has another cause");
        for nonsense in [&b"\n"[..], b"{", b"[1]", br#"{"event":7}"#, br#"{"event":"SHUTDOWN"}"#] {
            assert_eq!(monitor.read(nonsense), None);
        }
        assert_eq!(monitor.paused(disk), None);
    }

    #[test]
    fn the_machine_goes_on_once_there_is_space() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout { folder: folder.path().to_owned() };
        let note = PauseNote::new(&layout).unwrap();
        std::fs::write(layout.disk(), "").unwrap();
        let (qemu, ours) = UnixStream::pair().unwrap();
        qemu.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let disk = layout.disk();
        let talking =
            std::thread::spawn(move || talk(ours, &note, &disk, Duration::from_millis(1)));
        let mut lines = BufReader::new(qemu.try_clone().unwrap()).lines();
        let say = |text: &str| writeln!(&qemu, "{text}").unwrap();
        say(r#"{"QMP":{"version":{},"capabilities":[]}}"#);
        assert_eq!(lines.next().unwrap().unwrap(), CAPABILITIES);
        say(r#"{"event":"BLOCK_IO_ERROR","data":{"nospace":true}}"#);
        say(r#"{"event":"STOP"}"#);
        // This host's disk has space, so `cont` comes, and again until QEMU goes on.
        assert_eq!(lines.next().unwrap().unwrap(), CONTINUE);
        assert_eq!(lines.next().unwrap().unwrap(), CONTINUE);
        assert!(PauseNote::read(&layout).unwrap().contains("is full"));
        say(r#"{"event":"RESUME"}"#);
        drop(lines);
        qemu.shutdown(std::net::Shutdown::Write).unwrap();
        talking.join().unwrap().unwrap();
        assert_eq!(PauseNote::read(&layout), None);
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout { folder: folder.path().to_owned() };
        let note = PauseNote::new(&layout).unwrap();
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        let saying = std::thread::spawn(move || {
            // Fails once the other side has closed.
            while qemu.write_all(&[b'x'; 4096]).is_ok() {}
        });
        let refused = talk(ours, &note, &layout.disk(), Duration::from_millis(1)).unwrap_err();
        assert!(refused.to_string().contains("a line: expected at most"), "{refused}");
        saying.join().unwrap();
    }
}
