//! The programs that connect the machine with the host's network: passt, and QEMU's user network.

use super::frames::MAX_FRAME_BYTES;
use crate::confine;
use crate::qemu::{find, find_qemu};
use dayfly_machine_init::{UPLINK_ADDRESS, UPLINK_DNS, UPLINK_GATEWAY, UPLINK_MASK};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, setrlimit};
use rustix::process::{pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::thread::JoinHandle;

/// The most descriptors of a program, so of connections and datagram ports of all VMs.
const DESCRIPTORS: u64 = 16_384;
/// Bytes of a program's last words that are kept.
const SAID_BYTES: usize = 4096;
/// Characters of a program's last line in a report.
const LINE_CHARS: usize = 200;

/// A kind of program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// passt(1).
    Passt,
    /// A QEMU that runs no machine, and joins its user network (libslirp) with the socket.
    Qemu,
}

impl Kind {
    /// In the order in which they are tried.
    pub(crate) const ALL: [Self; 2] = [Self::Passt, Self::Qemu];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Passt => "passt",
            Self::Qemu => "QEMU's user network",
        }
    }

    fn find(self) -> io::Result<PathBuf> {
        let (found, why) = match self {
            Self::Passt => (find("passt", &[]), "not installed (Debian package passt)"),
            Self::Qemu => (find_qemu(), "not installed (Debian package qemu-system-x86)"),
        };
        found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, why))
    }

    fn arguments(self, socket: i32) -> Vec<OsString> {
        let bits = UPLINK_MASK.to_bits().count_ones();
        let words = match self {
            // The interface only gives addresses, which are named here. lo exists on every host, so
            // passt starts without a route and follows each change of the host's routes.
            Self::Passt => format!(
                "--foreground --quiet --stderr --fd {socket} --ipv4-only --interface lo --address \
                 {UPLINK_ADDRESS} --netmask {bits} --gateway {UPLINK_GATEWAY} --mac-addr \
                 02:df:00:00:01:03 --dns-forward {UPLINK_DNS} --no-map-gw --no-dhcp --no-ndp \
                 --no-ra --no-dhcpv6"
            ),
            Self::Qemu => format!(
                "-machine none -nodefaults -no-user-config -display none -sandbox {} -netdev \
                 user,id=user,ipv6=off,net={UPLINK_GATEWAY}/{bits},host={UPLINK_GATEWAY},\
                 dns={UPLINK_DNS},dhcpstart={UPLINK_ADDRESS} -netdev socket,id=socket,fd={socket} \
                 -netdev hubport,id=one,hubid=0,netdev=user -netdev \
                 hubport,id=two,hubid=0,netdev=socket",
                crate::qemu::SANDBOX
            ),
        };
        words.split_whitespace().map(OsString::from).collect()
    }
}

/// A running program. It ends with this value.
#[derive(Debug)]
pub(super) struct Program {
    /// The frames that it sends and takes.
    pub(super) frames: UnixStream,
    handle: OwnedFd,
    said: Option<JoinHandle<String>>,
}

impl Program {
    /// Starts the program in the calling thread's network namespace, as `user` if given.
    ///
    /// # Errors
    /// It is not installed, or cannot be started.
    pub(super) fn start(kind: Kind, user: Option<u32>) -> io::Result<Self> {
        let program = kind.find()?;
        let (frames, other) = UnixStream::pair()?;
        let (reader, writer) = io::pipe()?;
        let keep = [other.as_raw_fd()];
        let arguments = kind.arguments(other.as_raw_fd());
        let mut command = confine::command(&program, &arguments, &keep, None);
        command.stderr(writer);
        let descriptors = getrlimit(Resource::Nofile).maximum.unwrap_or(DESCRIPTORS);
        let descriptors = Some(descriptors.min(DESCRIPTORS));
        let limit = Rlimit { current: descriptors, maximum: descriptors };
        // SAFETY: all calls are async-signal-safe and use no memory of the heap.
        unsafe {
            command.pre_exec(move || {
                setrlimit(Resource::Nofile, limit)?;
                user.map_or(Ok(()), confine::become_user)
            });
        }
        // A program that ends at once stays a zombie until the lock is free, so it has a handle,
        // and `end` returns what it said.
        let children = confine::lock_children();
        let child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let handle = pidfd_open(pid.ok_or(io::ErrorKind::InvalidData)?, PidfdFlags::empty())?;
        drop(children);
        // The command holds the pipe's other end, which must close with the program.
        drop((command, other));
        let said = std::thread::Builder::new().name("uplink-said".to_owned());
        let said = said.stack_size(64 << 10).spawn(move || last_line(reader))?;
        Ok(Self { frames, handle, said: Some(said) })
    }

    /// Ends the program, and returns the last line that it said.
    pub(super) fn end(mut self) -> String {
        self.kill();
        self.said.take().and_then(|said| said.join().ok()).unwrap_or_default()
    }

    fn kill(&self) {
        // A program that has ended is not there any more (ESRCH).
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last line until the pipe's end, without control characters. However much the program says,
/// [`SAID_BYTES`] are kept.
fn last_line(mut from: PipeReader) -> String {
    let (mut kept, mut piece) = (Vec::new(), [0; SAID_BYTES]);
    while let Ok(count) = from.read(&mut piece) {
        let Some(new) = piece.get(..count).filter(|new| !new.is_empty()) else { break };
        kept.extend_from_slice(new);
        kept.drain(..kept.len().saturating_sub(SAID_BYTES));
    }
    let text = String::from_utf8_lossy(&kept);
    // passt reports each line that the host's syslog did not take.
    let line = text.lines().rev().map(str::trim);
    let mut line = line.filter(|line| !line.is_empty() && !line.ends_with("bytes to syslog"));
    let line = line.next().unwrap_or_default().chars();
    line.filter(|c| !c.is_control()).take(LINE_CHARS).collect()
}

const _: () = assert!(MAX_FRAME_BYTES > SAID_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn last_words_are_bounded_and_harmless() {
        let said = |bytes: &[u8]| {
            let (reader, mut writer) = io::pipe().unwrap();
            std::thread::scope(|scope| {
                let line = scope.spawn(move || last_line(reader));
                writer.write_all(bytes).unwrap();
                drop(writer);
                line.join().unwrap()
            })
        };
        assert_eq!(said(b""), "");
        assert_eq!(said(b"one\ntwo\n\n"), "two");
        assert_eq!(said(b"why\nFailed to send 4 bytes to syslog\n"), "why");
        assert_eq!(said(b"\x1b[31mred\x07\n"), "[31mred");
        assert_eq!(said(&vec![b'x'; 1 << 20]).len(), LINE_CHARS);
    }

    #[test]
    fn the_hosts_loopback_is_not_mapped() {
        let words = |kind: Kind| -> Vec<String> {
            kind.arguments(7).into_iter().map(|word| word.into_string().unwrap()).collect()
        };
        let passt = words(Kind::Passt);
        for word in ["--no-map-gw", "--ipv4-only", "--foreground"] {
            assert!(passt.iter().any(|has| has == word), "{passt:?}");
        }
        assert!(words(Kind::Qemu).iter().any(|word| word.contains("ipv6=off")));
    }
}
