//! What a PC has besides RAM, CPUs and virtio: the serial console, and the registers through which a guest ends
//! itself. Ports and addresses that nothing answers read as all ones, as on a bus.

use crate::arch::layout;
use crate::control::ExitReason;
use crate::timeline::now_us;
use crate::virtio::DeviceSet;
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

/// Why the platform could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// eventfd(2) or KVM_IRQFD failed.
    #[error("the interrupt of {what} (GSI {gsi})")]
    Interrupt {
        /// The device.
        what: &'static str,
        /// Its interrupt.
        gsi: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The saved serial port is impossible.
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

/// The console file: takes a number of bytes, then one note, then nothing.
#[derive(Debug)]
pub struct Console {
    file: File,
    left: u64,
    max: u64,
    noted: bool,
}

impl Console {
    /// A console that keeps the first `max` bytes.
    #[must_use]
    pub fn new(file: File, max: u64) -> Self {
        Self { file, left: max, max, noted: false }
    }

    /// The same console; only one of both is to be used.
    fn again(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, left: self.left, max: self.max, noted: self.noted })
    }
}

impl Write for Console {
    /// Never fails: a guest does not notice a full disk of its host.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let take = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        if take > 0 && self.file.write_all(&bytes[..take]).is_ok() {
            self.left -= take as u64;
        }
        if take < bytes.len() && !self.noted {
            self.noted = true;
            let note = format!("\n[dayfly: console output after {} bytes is dropped]\n", self.max);
            let _ = self.file.write_all(note.as_bytes());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The serial port's registers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialSave {
    /// Divisor latch, low and high.
    pub divisor: [u8; 2],
    /// Interrupt enable, interrupt identification, line control, line status, modem control, modem status, scratch.
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
        let [enable, identification, line_control, line_status, modem_control, modem_status, scratch] =
            s.registers;
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

/// A guest-made end.
pub type GuestEnd = (ExitReason, &'static str);

/// The platform of one VM.
pub struct Platform {
    serial: Mutex<Com1>,
    generation: Line,
    devices: Arc<DeviceSet>,
    /// When the guest first wrote to a port, in microseconds of CLOCK_MONOTONIC; 0 while it has not.
    first_port_write_us: AtomicU64,
}

impl Platform {
    /// A platform whose serial port is fresh.
    ///
    /// # Errors
    /// When KVM refuses an interrupt.
    pub fn new(vm: &VmFd, console: Console, devices: Arc<DeviceSet>) -> Result<Self, PlatformError> {
        let line = Line::new(vm, "the serial port", layout::GSI_COM1)?;
        let serial = Serial::new(line, console);
        let generation = Line::new(vm, "the VM generation id", layout::GSI_GENERATION)?;
        let first_port_write_us = AtomicU64::new(0);
        Ok(Self { serial: Mutex::new(serial), generation, devices, first_port_write_us })
    }

    /// Gives the serial port the registers that it had.
    ///
    /// # Errors
    /// When they are impossible, or descriptors are short.
    pub fn load(&self, saved: &SerialSave) -> Result<(), PlatformError> {
        let again =
            |source| PlatformError::Interrupt { what: "the serial port", gsi: layout::GSI_COM1, source };
        let mut serial = self.serial();
        let line = serial.interrupt_evt().0.try_clone().map(Line).map_err(again)?;
        let console = serial.writer().again().map_err(again)?;
        *serial = Serial::from_state(&saved.into(), line, NoEvents, console)
            .map_err(|e| PlatformError::Serial(format!("{e:?}")))?;
        Ok(())
    }

    fn serial(&self) -> MutexGuard<'_, Com1> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the guest in this process first wrote to a port, in microseconds of CLOCK_MONOTONIC.
    #[must_use]
    pub fn first_port_write_us(&self) -> Option<u64> {
        Some(self.first_port_write_us.load(Ordering::Relaxed)).filter(|us| *us != 0)
    }

    /// Tells the guest that its generation id changed.
    ///
    /// # Errors
    /// When the eventfd cannot be written.
    pub fn announce_generation(&self) -> io::Result<()> {
        self.generation.trigger()
    }

    /// The serial port's state.
    #[must_use]
    pub fn save(&self) -> SerialSave {
        SerialSave::from(&self.serial().state())
    }

    /// The guest reads from a port. `data` holds one or more accesses to the same port.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match port {
            layout::PORT_COM1..=0x3ff => {
                let mut serial = self.serial();
                for byte in data {
                    *byte = serial.read(register(port));
                }
            }
            // The keyboard controller is never busy, nothing sleeps.
            layout::PORT_I8042 | layout::PORT_SLEEP_STATUS | layout::PORT_SLEEP_CONTROL => data.fill(0),
            // Bit 0: the guest may report a panic here (pvpanic's specification).
            layout::PORT_PVPANIC => data.fill(1),
            _ => data.fill(0xff),
        }
    }

    /// The guest writes to a port; some writes are its end.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<GuestEnd> {
        if self.first_port_write_us.load(Ordering::Relaxed) == 0 {
            self.first_port_write_us.store(now_us(), Ordering::Relaxed);
        }
        let &[.., last] = data else { return None };
        match port {
            layout::PORT_COM1..=0x3ff => {
                let mut serial = self.serial();
                for &byte in data {
                    // An error is an eventfd whose counter is full: the interrupt is pending already.
                    let _ = serial.write(register(port), byte);
                }
                None
            }
            layout::PORT_I8042 if last == 0xfe => {
                Some((ExitReason::Reboot, "the guest pulsed the reset line of the keyboard controller"))
            }
            layout::PORT_RESET if last == layout::RESET_VALUE => {
                Some((ExitReason::Reboot, "the guest wrote the ACPI reset register"))
            }
            // SLP_EN and SLP_TYP (ACPI 6.5, table 4.17).
            layout::PORT_SLEEP_CONTROL if last >> 5 & 1 == 1 && last >> 2 & 7 == layout::SLEEP_TYPE_S5 => {
                Some((ExitReason::PowerOff, "the guest entered ACPI S5"))
            }
            layout::PORT_PVPANIC if last & 1 == 1 => {
                Some((ExitReason::Panic, "the guest's kernel panicked (pvpanic)"))
            }
            _ => None,
        }
    }

    /// The guest reads from an address without RAM.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        if !self.devices.mmio_read(address, data) {
            data.fill(0xff);
        }
    }

    /// The guest writes to an address without RAM.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        // Nobody's address: dropped, as on a bus.
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

    #[test]
    fn the_console_keeps_its_cap_and_notes_once_that_it_drops() {
        let mut file = tempfile::tempfile().unwrap();
        let mut console = Console::new(file.try_clone().unwrap(), 10);
        for _ in 0..5 {
            assert_eq!(console.write(b"1234").unwrap(), 4);
        }
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "1234123412\n[dayfly: console output after 10 bytes is dropped]\n");
    }

    #[test]
    fn a_serial_port_reads_back_from_its_save() {
        let state = SerialState { in_buffer: vec![1, 2, 3], scratch: 7, ..SerialState::default() };
        assert_eq!(SerialState::from(&SerialSave::from(&state)), state);
    }
}
