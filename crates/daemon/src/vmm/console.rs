//! A guest's console, which its VMM writes to two files in turn
//! ([`dayfly_vmm::platform::Console`]).
//!
//! The VMM and its guest control the content: a file may be emptied at any moment, and its first
//! line may lie about its position. The worst result is a log in the wrong order. No read waits,
//! and none takes more memory than a chunk.

use crate::base::config::VmDir;
use dayfly_vmm::platform::{START_BYTES, start_of};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

/// The most bytes of one read.
const CHUNK_BYTES: usize = 64 << 10;

/// One of the two files, as it was when it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    /// Index of the file.
    file: usize,
    /// Bytes of output before those in this file.
    start: u64,
    /// Offset in the file at which its output begins.
    head: u64,
}

/// A reader of a console, which starts at the oldest byte that is kept.
#[derive(Debug)]
pub struct Console {
    /// The second file is missing if an earlier version of the daemon started the VMM.
    files: [Option<File>; 2],
    now: Option<Segment>,
    /// Offset in the file that is read.
    position: u64,
    /// Whether this file gets no more output. Known before the last read, because the other file
    /// had begun.
    complete: bool,
}

impl Console {
    /// Opens the console of the VM in `dir`.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(dir: &VmDir) -> io::Result<Self> {
        let [first, second] = dir.console();
        let second = match File::open(second) {
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            file => Some(file?),
        };
        let files = [Some(File::open(first)?), second];
        Ok(Self { files, now: None, position: 0, complete: false })
    }

    /// Position of the output that is in a file now; `None` if the file is empty.
    fn segment(&self, file: usize) -> io::Result<Option<Segment>> {
        let Some(open) = &self.files[file] else { return Ok(None) };
        let mut head = [0; START_BYTES];
        let read = open.read_at(&mut head, 0)?;
        if read == 0 {
            return Ok(None);
        }
        let (start, length) = start_of(&head[..read]);
        Ok(Some(Segment { file, start, head: length as u64 }))
    }

    /// The file whose output follows that of the current file; at first the file with the oldest
    /// output.
    fn after(&self) -> io::Result<Option<Segment>> {
        let segments = [self.segment(0)?, self.segment(1)?];
        let later = |segment: &Segment| self.now.is_none_or(|now| segment.start > now.start);
        Ok(segments.into_iter().flatten().filter(later).min_by_key(|segment| segment.start))
    }

    /// The next bytes, at most a chunk; none if nothing has been written since.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn more(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if let Some(now) = self.now
                && self.segment(now.file)? == Some(now)
                && let Some(file) = &self.files[now.file]
            {
                let mut bytes = vec![0; CHUNK_BYTES];
                let read = file.read_at(&mut bytes, self.position)?;
                if read > 0 {
                    bytes.truncate(read);
                    self.position += read as u64;
                    return Ok(bytes);
                }
            } else {
                // The VMM has emptied this file meanwhile, so the rest of its output is lost.
                self.complete = true;
            }
            let Some(next) = self.after()? else { return Ok(Vec::new()) };
            if self.now.is_some() && !self.complete {
                // The VMM may have written bytes between the read and the look at the other file.
                // Once the other file has begun, this one gets no more, so one more read gets all.
                self.complete = true;
                continue;
            }
            (self.now, self.position, self.complete) = (Some(next), next.head, false);
        }
    }
}

impl Console {
    /// Reads what is there now. Returns its last lines, of at most [`TAIL_BYTES`]; a last line
    /// without an end counts.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn last_lines(&mut self, lines: u64) -> io::Result<Vec<u8>> {
        let (mut kept, mut read) = (Vec::new(), 0);
        // A guest that writes faster than this reads must not keep it busy.
        while read < MOST_READ {
            let piece = self.more()?;
            if piece.is_empty() {
                break;
            }
            read += piece.len();
            kept.extend(piece);
            if kept.len() > 2 * TAIL_BYTES {
                kept.drain(..kept.len() - TAIL_BYTES);
            }
        }
        kept.drain(..start_of_lines(&kept, lines).max(kept.len().saturating_sub(TAIL_BYTES)));
        Ok(kept)
    }
}

/// The most bytes of the last lines of a console: what is kept of it.
const TAIL_BYTES: usize = 4 << 20;
/// The most bytes that are read to find them.
const MOST_READ: usize = 16 << 20;

/// Where the last `lines` lines of `text` begin.
fn start_of_lines(text: &[u8], lines: u64) -> usize {
    let Some(before) = usize::try_from(lines).ok().and_then(|lines| lines.checked_sub(1)) else {
        return if lines == 0 { text.len() } else { 0 };
    };
    // The end of the last line is not the beginning of another.
    let whole = text.strip_suffix(b"\n").unwrap_or(text);
    let mut ends = whole.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    ends.nth(before).map_or(0, |(at, _)| at + 1)
}

/// The last `most` bytes of a console.
///
/// # Errors
/// A file cannot be read.
pub fn tail(dir: &VmDir, most: u64) -> io::Result<Vec<u8>> {
    let console = Console::open(dir)?;
    let mut segments: Vec<Segment> =
        [console.segment(0)?, console.segment(1)?].into_iter().flatten().collect();
    segments.sort_by_key(|segment| segment.start);
    let mut tail = Vec::new();
    for segment in segments.into_iter().rev() {
        let Some(file) = &console.files[segment.file] else { continue };
        let room = most.saturating_sub(tail.len() as u64);
        let end = file.metadata()?.len();
        let begin = end.saturating_sub(room).max(segment.head);
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(begin)).unwrap_or(0)];
        let read = file.read_at(&mut bytes, begin)?;
        bytes.truncate(read);
        bytes.append(&mut tail);
        tail = bytes;
    }
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_vmm::platform;
    use std::io::Write;

    const MAX: u64 = 2000;

    fn made() -> (tempfile::TempDir, VmDir, platform::Console) {
        let folder = tempfile::tempdir().unwrap();
        let dir = VmDir::at(folder.path().into());
        let file = |path| File::options().create_new(true).append(true).open(path).unwrap();
        let console = platform::Console::new(dir.console().map(file), MAX);
        (folder, dir, console)
    }

    fn all(reader: &mut Console) -> String {
        let mut text = Vec::new();
        loop {
            match reader.more().unwrap() {
                bytes if bytes.is_empty() => return String::from_utf8(text).unwrap(),
                bytes => text.extend(bytes),
            }
        }
    }

    fn line(n: u32) -> String {
        format!("line {n:06}\n")
    }

    #[test]
    fn the_newest_output_is_read_in_its_order_however_much_came_before() {
        let (_folder, dir, mut console) = made();
        assert_eq!(all(&mut Console::open(&dir).unwrap()), "");
        let mut written = String::new();
        for n in 0..2000 {
            console.write_all(line(n).as_bytes()).unwrap();
            written += &line(n);
            let got = all(&mut Console::open(&dir).unwrap());
            assert!(written.ends_with(&got), "after line {n}: {got}");
            let whole = written.len() as u64 <= MAX;
            assert!(
                if whole { got == written } else { got.len() as u64 >= MAX / 2 },
                "{n}: {}",
                got.len()
            );
        }
        for most in [0, 1, 100, 1500, 1 << 20] {
            let tail = String::from_utf8(tail(&dir, most).unwrap()).unwrap();
            assert!(
                written.ends_with(&tail) && tail.len() as u64 <= most.min(MAX),
                "{most}: {tail}"
            );
            assert!(tail.len() as u64 >= most.min(MAX / 2), "{most}: {}", tail.len());
        }
    }

    #[test]
    fn the_last_lines_are_found_and_the_reader_goes_on_after_them() {
        let last = |text: &str, lines| text[start_of_lines(text.as_bytes(), lines)..].to_owned();
        for (text, lines, expected) in [
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc", 2, "b\nc"),
            ("a\nb\n", 2, "a\nb\n"),
            ("a\nb\n", 3, "a\nb\n"),
            ("a\nb\n", u64::MAX, "a\nb\n"),
            ("a\nb\n", 0, ""),
            ("\n\n", 1, "\n"),
            ("", 1, ""),
        ] {
            assert_eq!(last(text, lines), expected, "{text:?} {lines}");
        }
        let (_folder, dir, mut console) = made();
        (0..50).for_each(|n| console.write_all(line(n).as_bytes()).unwrap());
        let mut reader = Console::open(&dir).unwrap();
        assert_eq!(reader.last_lines(2).unwrap(), (line(48) + &line(49)).into_bytes());
        console.write_all(line(50).as_bytes()).unwrap();
        assert_eq!(all(&mut reader), line(50));
        let none = Console::open(&dir).unwrap().last_lines(0).unwrap();
        assert!(none.is_empty());
    }

    #[test]
    fn one_that_follows_reads_every_byte_once_if_it_keeps_up_and_goes_on_if_not() {
        let (_folder, dir, mut console) = made();
        let mut reader = Console::open(&dir).unwrap();
        let (mut written, mut got) = (String::new(), String::new());
        for n in 0..2000 {
            console.write_all(line(n).as_bytes()).unwrap();
            written += &line(n);
            // Reads sometimes after each line, sometimes after many.
            if n % 7 == 0 || n % 90 < 20 {
                got += &all(&mut reader);
            }
        }
        got += &all(&mut reader);
        assert_eq!(got, written);
        // Much more output than is kept: the oldest is lost, the newest is read.
        for n in 0..5000 {
            console.write_all(line(n).as_bytes()).unwrap();
            written += &line(n);
        }
        let late = all(&mut reader);
        assert!(written.ends_with(&late) && late.len() as u64 >= MAX / 2, "{late}");
        assert_eq!(all(&mut reader), "");
    }

    #[test]
    fn a_guest_that_lies_about_the_order_harms_its_own_log_only() {
        let (_folder, dir, mut console) = made();
        let mut reader = Console::open(&dir).unwrap();
        let lie = format!("[dayfly: the console from byte {} on]\n", u64::MAX);
        for n in 0..3000 {
            console.write_all(if n % 3 == 0 { &lie } else { "x\n" }.as_bytes()).unwrap();
            assert!(all(&mut reader).len() as u64 <= 2 * MAX);
            assert!(all(&mut Console::open(&dir).unwrap()).len() as u64 <= 2 * MAX);
        }
        // A console of an earlier version has one file.
        std::fs::remove_file(&dir.console()[1]).unwrap();
        std::fs::write(&dir.console()[0], "old").unwrap();
        assert_eq!(all(&mut Console::open(&dir).unwrap()), "old");
        assert_eq!(tail(&dir, 2).unwrap(), b"ld");
    }
}
