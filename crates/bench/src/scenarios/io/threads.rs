//! Which threads of a VMM write to the host's disk, by the kernel's count (`/proc/PID/task/TID/io`,
//! proc_pid_io(5)).
//!
//! A packet waits for a block request if the thread that moves packets performs block requests. So
//! the bytes that this thread has written to files are counted: pages of a file on a disk that it
//! made dirty. Packets, eventfds and memory count nothing there. Reads are not counted, because
//! those of cached data are none for the kernel.

use crate::prelude::*;

/// The thread that moves packets.
const PACKETS: &str = "devices";
/// The thread that performs block requests.
const DISKS: &str = "disks";

/// Bytes that the threads have written to files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// The thread that moves packets.
    pub packets_bytes: u64,
    /// The thread of the disks.
    pub disks_bytes: u64,
}

/// Of the VMM `pid`.
///
/// # Errors
/// It has no such threads, or the kernel does not count (`CONFIG_TASK_IO_ACCOUNTING`).
pub fn written(pid: u32) -> Result<Written> {
    let folder = format!("/proc/{pid}/task");
    let (mut packets, mut disks) = (None, None);
    for entry in std::fs::read_dir(&folder).with_context(|| folder.clone())? {
        let thread = entry?.path();
        let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
        let place = match name.trim_end() {
            PACKETS => &mut packets,
            DISKS => &mut disks,
            _ => continue,
        };
        let io = thread.join("io");
        let text = std::fs::read_to_string(&io).with_context(|| io.display().to_string())?;
        let bytes = bytes(&text).with_context(|| format!("{}: {text:?}", io.display()))?;
        *place = Some(place.unwrap_or(0) + bytes);
    }
    let missing = || format!("{folder}: expected the threads {PACKETS} and {DISKS}");
    let (packets_bytes, disks_bytes) = packets.zip(disks).with_context(missing)?;
    Ok(Written { packets_bytes, disks_bytes })
}

fn bytes(io: &str) -> Option<u64> {
    io.lines().find_map(|line| line.strip_prefix("write_bytes: "))?.trim().parse().ok()
}

impl Written {
    /// The sum over several VMMs.
    pub fn sum(all: &[Self]) -> Self {
        all.iter().fold(Self::default(), |sum, one| Self {
            packets_bytes: sum.packets_bytes + one.packets_bytes,
            disks_bytes: sum.disks_bytes + one.disks_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_kernel_s_count_is_the_line_of_bytes_that_were_written() {
        let text = "rchar: 1\nwchar: 2\nwrite_bytes: 4096\ncancelled_write_bytes: 7\n";
        assert_eq!(bytes(text), Some(4096));
        assert_eq!(bytes("cancelled_write_bytes: 7\n"), None);
    }

    /// On this host, in threads with the names of a VMM's.
    #[test]
    fn bytes_to_a_file_count_for_the_thread_that_wrote_them_and_messages_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let (ask, asked) = UnixStream::pair().unwrap();
        let named = |name: &str, file: Option<File>, asked: UnixStream| {
            let act = move || {
                let mut message = [0; 4096];
                (&asked).write_all(&message).unwrap();
                file.into_iter().for_each(|mut file| file.write_all(&[7; 1 << 16]).unwrap());
                (&asked).write_all(&[1]).unwrap();
                (&asked).read_exact(&mut message[..1]).unwrap();
            };
            std::thread::Builder::new().name(name.to_owned()).spawn(act).unwrap()
        };
        let file = File::create(folder.path().join("disk")).unwrap();
        let (ask2, asked2) = UnixStream::pair().unwrap();
        let threads = [named(PACKETS, None, asked), named(DISKS, Some(file), asked2)];
        let (mut message, mut streams) = ([0; 4097], [ask, ask2]);
        streams.iter_mut().for_each(|stream| stream.read_exact(&mut message).unwrap());
        let written = written(std::process::id()).unwrap();
        streams.iter_mut().for_each(|stream| stream.write_all(&[1]).unwrap());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(written.packets_bytes, 0);
        // A file system without a disk behind it, such as a container's, counts nothing.
        assert!(matches!(written.disks_bytes, 0 | 65_536), "{written:?}");
    }
}
