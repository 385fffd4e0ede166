//! The parts of a PC besides RAM, CPUs and virtio: the serial console, and the registers through
//! which a guest ends its VM. Ports and addresses without a device read as all ones, as on a bus.

use crate::arch::layout;
use crate::control::ExitReason;
use crate::timeline::now_us;
use crate::virtio::DeviceSet;
use dayfly_units::sync::lock;
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

/// Why the platform could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// eventfd(2) or KVM_IRQFD failed.
    #[error("the interrupt of {what} (GSI {gsi})")]
    Interrupt {
        /// The device that raises the interrupt.
        what: &'static str,
        /// The interrupt's number (GSI).
        gsi: u32,
        /// The error of the host.
        #[source]
        source: io::Error,
    },
    /// The saved registers of the serial port are invalid.
    #[error("serial port state: {0}")]
    Serial(String),
}

/// An interrupt line that KVM raises when its eventfd is written (KVM_IRQFD).
#[derive(Debug)]
pub struct Line(EventFd);

impl Line {
    fn new(vm: &VmFd, what: &'static str, gsi: u32) -> Result<Self, PlatformError> {
        let fails = |source| PlatformError::Interrupt { what, gsi, source };
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(fails)?;
        vm.register_irqfd(&event, gsi).map_err(|e| fails(e.into()))?;
        Ok(Self(event))
    }
}

impl Trigger for Line {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The start of the first line of a console file, for every file but the first; see [`start_of`].
const START: &str = "[dayfly: the console from byte ";
const START_END: &str = " on]\n";
/// More bytes than such a line has.
pub const START_BYTES: usize = 64;

/// The guest's console output, in two files that take turns. When one file is full, the other is
/// emptied and takes the next output. Together they hold the newest output, at least half of the
/// configured bytes.
///
/// ```text
/// console.log   |---- bytes 0 to 2 Mi ----|                    |[..from byte 4194304 on] ---▶
/// console-2.log                           |[..from byte 2097152 on] -- full --|
/// ```
///
/// A VMM has no path by which to rename its files, so readers order the files by their first lines.
#[derive(Debug)]
pub struct Console {
    files: [File; 2],
    /// The index of the file that is written now.
    at: usize,
    /// Bytes of output in that file.
    length: u64,
    /// Bytes of output before that file.
    before: u64,
    /// The most bytes of output in one file.
    half: u64,
}

/// Parses `head`, the start of a console file. Returns the bytes of output before this file, and
/// the offset at which this file's output begins. The first file has no such line: (0, 0).
#[must_use]
pub fn start_of(head: &[u8]) -> (u64, usize) {
    let parse = || {
        let rest = head.strip_prefix(START.as_bytes())?;
        let digits = rest.iter().position(|b| !b.is_ascii_digit())?;
        rest.get(digits..)?.strip_prefix(START_END.as_bytes())?;
        let before = std::str::from_utf8(rest.get(..digits)?).ok()?.parse().ok()?;
        Some((before, START.len() + digits + START_END.len()))
    };
    parse().unwrap_or((0, 0))
}

impl Console {
    /// A console in two empty files opened for appending, with at most `max` bytes of output.
    #[must_use]
    pub fn new(files: [File; 2], max: u64) -> Self {
        Self { files, at: 0, length: 0, before: 0, half: (max / 2).max(1) }
    }

    /// A copy that writes to the same files; the caller must use only one of both.
    fn again(&self) -> io::Result<Self> {
        let [first, second] = &self.files;
        let files = [first.try_clone()?, second.try_clone()?];
        Ok(Self { files, ..*self })
    }

    /// Empties the other file and continues there.
    fn turn(&mut self) -> io::Result<()> {
        let next = (self.at + 1) % self.files.len();
        let before = self.before + self.length;
        let file = &mut self.files[next];
        file.set_len(0)?;
        file.write_all(format!("{START}{before}{START_END}").as_bytes())?;
        (self.at, self.before, self.length) = (next, before, 0);
        Ok(())
    }
}

impl Write for Console {
    /// Never fails, so that a full disk of the host does not affect the guest.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.length >= self.half && self.turn().is_err() {
                break;
            }
            let room = usize::try_from(self.half - self.length).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(room.min(rest.len()));
            if self.files[self.at].write_all(now).is_err() {
                break;
            }
            self.length += now.len() as u64;
            rest = later;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The registers of the serial port, in a saved state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialSave {
    /// Divisor latch, low and high.
    pub divisor: [u8; 2],
    /// Interrupt enable, interrupt identification, line control, line status, modem control, modem
    /// status, scratch.
    pub registers: [u8; 7],
    /// Bytes received and not yet read, at most 64.
    pub received: Vec<u8>,
}

impl From<&SerialState> for SerialSave {
    fn from(s: &SerialState) -> Self {
        Self {
            divisor: [s.baud_divisor_low, s.baud_divisor_high],
            registers: [
                s.interrupt_enable,
                s.interrupt_identification,
                s.line_control,
                s.line_status,
                s.modem_control,
                s.modem_status,
                s.scratch,
            ],
            received: s.in_buffer.clone(),
        }
    }
}

impl From<&SerialSave> for SerialState {
    fn from(s: &SerialSave) -> Self {
        let [low, high] = s.divisor;
        let [
            enable,
            identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ] = s.registers;
        Self {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: enable,
            interrupt_identification: identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: s.received.clone(),
        }
    }
}

type Com1 = Serial<Line, NoEvents, Console>;

/// How the guest ended its VM: the reason, and a sentence for people.
pub type GuestEnd = (ExitReason, &'static str);

/// The serial port, the VM generation id's interrupt, and the virtio devices of one VM.
pub struct Platform {
    serial: Mutex<Com1>,
    generation: Line,
    devices: Arc<DeviceSet>,
    /// When the guest first wrote to a port, in microseconds of CLOCK_MONOTONIC; 0: never yet.
    first_port_write_us: AtomicU64,
}

impl Platform {
    /// A platform with a serial port after reset.
    ///
    /// # Errors
    /// When KVM refuses an interrupt line.
    pub fn new(
        vm: &VmFd,
        console: Console,
        devices: Arc<DeviceSet>,
    ) -> Result<Self, PlatformError> {
        let line = Line::new(vm, "the serial port", layout::GSI_COM1)?;
        let serial = Serial::new(line, console);
        let generation = Line::new(vm, "the VM generation id", layout::GSI_GENERATION)?;
        let first_port_write_us = AtomicU64::new(0);
        Ok(Self { serial: Mutex::new(serial), generation, devices, first_port_write_us })
    }

    /// Restores the registers of the serial port.
    ///
    /// # Errors
    /// When the registers are invalid, or descriptors are short.
    pub fn load(&self, saved: &SerialSave) -> Result<(), PlatformError> {
        let again = |source| PlatformError::Interrupt {
            what: "the serial port",
            gsi: layout::GSI_COM1,
            source,
        };
        let mut serial = self.serial();
        let line = serial.interrupt_evt().0.try_clone().map(Line).map_err(again)?;
        let console = serial.writer().again().map_err(again)?;
        *serial = Serial::from_state(&saved.into(), line, NoEvents, console)
            .map_err(|e| PlatformError::Serial(format!("{e:?}")))?;
        Ok(())
    }

    fn serial(&self) -> MutexGuard<'_, Com1> {
        lock(&self.serial)
    }

    /// When the guest first wrote to a port in this process, in microseconds of CLOCK_MONOTONIC.
    #[must_use]
    pub fn first_port_write_us(&self) -> Option<u64> {
        Some(self.first_port_write_us.load(Ordering::Relaxed)).filter(|us| *us != 0)
    }

    /// Raises the interrupt that announces a new VM generation id to the guest.
    ///
    /// # Errors
    /// When the eventfd cannot be written.
    pub fn announce_generation(&self) -> io::Result<()> {
        self.generation.trigger()
    }

    /// The registers of the serial port.
    #[must_use]
    pub fn save(&self) -> SerialSave {
        SerialSave::from(&self.serial().state())
    }

    /// A read by the guest from a port. `data` holds one or more accesses to the same port.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match port {
            layout::PORT_COM1..=0x3ff => {
                let mut serial = self.serial();
                for byte in data {
                    *byte = serial.read(register(port));
                }
            }
            // The keyboard controller is never busy, and no sleep state is active.
            layout::PORT_I8042 | layout::PORT_SLEEP_STATUS | layout::PORT_SLEEP_CONTROL => {
                data.fill(0)
            }
            // Bit 0: panics can be reported here (pvpanic's specification).
            layout::PORT_PVPANIC => data.fill(1),
            _ => data.fill(0xff),
        }
    }

    /// A write by the guest to a port. Some writes end the VM.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<GuestEnd> {
        if self.first_port_write_us.load(Ordering::Relaxed) == 0 {
            self.first_port_write_us.store(now_us(), Ordering::Relaxed);
        }
        let &[.., last] = data else { return None };
        match port {
            layout::PORT_COM1..=0x3ff => {
                let mut serial = self.serial();
                for &byte in data {
                    // An error means that the eventfd's counter is full, so the interrupt is
                    // pending already.
                    let _ = serial.write(register(port), byte);
                }
                None
            }
            layout::PORT_I8042 if last == 0xfe => Some((
                ExitReason::Reboot,
                "the guest pulsed the reset line of the keyboard controller",
            )),
            layout::PORT_RESET if last == layout::RESET_VALUE => {
                Some((ExitReason::Reboot, "the guest wrote the ACPI reset register"))
            }
            // SLP_EN and SLP_TYP (ACPI 6.5, table 4.17).
            layout::PORT_SLEEP_CONTROL
                if last >> 5 & 1 == 1 && last >> 2 & 7 == layout::SLEEP_TYPE_S5 =>
            {
                Some((ExitReason::PowerOff, "the guest entered ACPI S5"))
            }
            layout::PORT_PVPANIC if last & 1 == 1 => {
                Some((ExitReason::Panic, "the guest's kernel panicked (pvpanic)"))
            }
            _ => None,
        }
    }

    /// A read by the guest from an address without RAM.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        if !self.devices.mmio_read(address, data) {
            data.fill(0xff);
        }
    }

    /// A write by the guest to an address without RAM.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        // No device has the address: the write is dropped, as on a bus.
        let _ = self.devices.mmio_write(address, data);
    }
}

fn register(port: u16) -> u8 {
    (port - layout::PORT_COM1).to_le_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};

    fn text(file: &File) -> String {
        let (mut file, mut text) = (file.try_clone().unwrap(), String::new());
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    fn appended(folder: &tempfile::TempDir, name: &str) -> File {
        File::options()
            .create_new(true)
            .read(true)
            .append(true)
            .open(folder.path().join(name))
            .unwrap()
    }

    #[test]
    fn the_console_keeps_what_is_newest_within_its_bound() {
        let folder = tempfile::tempdir().unwrap();
        let files = [appended(&folder, "a"), appended(&folder, "b")];
        let mut console =
            Console::new([files[0].try_clone().unwrap(), files[1].try_clone().unwrap()], 20);
        assert_eq!(console.write(b"0123456789").unwrap(), 10);
        assert_eq!((text(&files[0]).as_str(), text(&files[1]).as_str()), ("0123456789", ""));
        assert_eq!(console.write(b"abcdefghijABCDE").unwrap(), 15);
        assert_eq!(text(&files[0]), "[dayfly: the console from byte 20 on]\nABCDE");
        assert_eq!(text(&files[1]), "[dayfly: the console from byte 10 on]\nabcdefghij");
        assert_eq!(start_of(text(&files[0]).as_bytes()), (20, 38));
        // Byte by byte, as a serial port writes, and again in a copy, as after a restore.
        let mut console = console.again().unwrap();
        for n in 0..100_000u32 {
            assert_eq!(console.write(&[b'a' + (n % 26) as u8]).unwrap(), 1);
            assert!(
                files.iter().all(|file| file.metadata().unwrap().len() <= 10 + START_BYTES as u64)
            );
        }
        let mut all: Vec<_> = files.iter().map(text).collect();
        all.sort_by_key(|text| start_of(text.as_bytes()));
        let newest: String = all.iter().map(|text| &text[start_of(text.as_bytes()).1..]).collect();
        let last: String = (0..100_000u32).map(|n| char::from(b'a' + (n % 26) as u8)).collect();
        assert!((10..=20).contains(&newest.len()) && last.ends_with(&newest), "{newest}");
    }

    #[test]
    fn a_file_without_the_line_is_the_first() {
        for head in [
            "",
            "[",
            "microguest\n",
            "[dayfly: the console from byte  on]\n",
            "[dayfly: the console from byte 12",
        ] {
            assert_eq!(start_of(head.as_bytes()), (0, 0), "{head:?}");
        }
        let most = format!("{START}{}{START_END}", u64::MAX);
        assert_eq!(start_of(most.as_bytes()), (u64::MAX, most.len()));
        assert!(most.len() < START_BYTES);
    }

    #[test]
    fn a_serial_port_reads_back_from_its_save() {
        let state = SerialState { in_buffer: vec![1, 2, 3], scratch: 7, ..SerialState::default() };
        assert_eq!(SerialState::from(&SerialSave::from(&state)), state);
    }
}
