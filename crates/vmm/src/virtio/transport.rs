//! The registers of a virtio-mmio device, version 2 (virtio 1.2 section 4.2.2), and the accesses
//! that they allow.
//!
//! This module has no I/O and no threads: a register write changes the state and returns what must
//! follow ([`Effect`]).
//!
//! ```text
//!             0 written at any time: reset
//!  ┌───────┐ ACKNOWLEDGE ┌─────┐ DRIVER ┌──────────┐ FEATURES_OK ┌────────┐ DRIVER_OK ┌──────┐
//!  │ reset │────────────▶│ ack │───────▶│  driver  │────────────▶│ queue  │──────────▶│ live │
//!  └───────┘             └─────┘        │  writes  │             │ set-up │           └──┬───┘
//!                                       │ features │             └────────┘    the driver │
//!                                       └──────────┘                        breaks a rule ▼
//!                                                                           DEVICE_NEEDS_RESET
//! ```
//! FEATURES_OK needs features that the device offers, VERSION_1 among them. The driver may set
//! FAILED in any state; then only a reset helps.
//!
//! No step can be left out, and no bit taken back; a write that tries is ignored. A write to a
//! queue's registers is ignored outside of set-up, if the queue is ready, or if the device needs a
//! reset. Stopping a queue (QueueReady = 0) is always allowed.

use super::registers::register;
use super::registers::status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, NEEDS_RESET};
use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT as _};
use vm_memory::GuestMemoryMmap;

/// VIRTIO_F_INDIRECT_DESC, VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1: every device offers them.
pub const COMMON_FEATURES: u64 = 1 << 28 | EVENT_IDX | VERSION_1;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
/// Our VendorID: "DFLY".
const VENDOR: u32 = 0x594c_4644;

/// What the device must do after a register write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The device has nothing to do.
    None,
    /// The device became live: serve every queue.
    Activated,
    /// The device was reset: forget the driver.
    Reset,
    /// The queue with this index was kicked.
    Notify(usize),
}

/// The registers and positions of one queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRegisters {
    /// QueueNum as the driver wrote it.
    pub size: u32,
    /// Guest physical address of the descriptor table.
    pub desc: u64,
    /// Guest physical address of the available ring.
    pub driver: u64,
    /// Guest physical address of the used ring.
    pub device: u64,
    /// QueueReady.
    pub ready: bool,
    /// The device's position in the available ring, modulo 2^16.
    pub next_avail: u16,
    /// The device's position in the used ring, modulo 2^16.
    pub next_used: u16,
}

/// The saved registers of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// Device status.
    pub status: u8,
    /// InterruptStatus.
    pub interrupt_status: u32,
    /// What the driver wrote to DriverFeatures, both halves.
    pub driver_features: u64,
    /// Whether the driver asked for a feature past bit 63.
    pub foreign_features: bool,
    /// DeviceFeaturesSel.
    pub device_features_sel: u32,
    /// DriverFeaturesSel.
    pub driver_features_sel: u32,
    /// QueueSel.
    pub queue_sel: u32,
    /// The registers of every queue.
    pub queues: Vec<QueueRegisters>,
}

/// Why saved registers were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportStateError {
    /// No driver can have brought about this status.
    #[error("status: expected bits in the order 1, 2, 8, 4, got {0:#x}")]
    Status(u8),
    /// InterruptStatus has an unknown bit.
    #[error("interrupt status: expected at most 3, got {0:#x}")]
    Interrupt(u32),
    /// The agreed features are not offered by this device, or lack VERSION_1.
    #[error("driver features: expected a subset of {offered:#x} with bit 32, got {got:#x}")]
    Features {
        /// Features offered by this device.
        offered: u64,
        /// Features in the state.
        got: u64,
    },
    /// The number of queues differs.
    #[error("queues: expected {expected}, got {got}")]
    Queues {
        /// Queues of this device.
        expected: usize,
        /// Queues in the state.
        got: usize,
    },
    /// A ready queue lies outside of memory, has an invalid size, or is ready before features are
    /// agreed.
    #[error("queue {index}: expected a valid queue of at most {max} in guest memory, got {got:?}")]
    Queue {
        /// Index of the queue.
        index: usize,
        /// Largest size of the queue, in descriptors.
        max: u16,
        /// The saved registers.
        got: QueueRegisters,
    },
}

/// The registers of a device, and its queues.
#[derive(Debug)]
pub struct Transport {
    device_id: u32,
    offered: u64,
    status: u8,
    driver_features: u64,
    foreign_features: bool,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    registers: Vec<QueueRegisters>,
    max_sizes: &'static [u16],
    queues: Vec<Queue>,
}

/// `old` with its low or high half replaced by `value`.
const fn with_half(old: u64, value: u32, high: bool) -> u64 {
    let value = value as u64;
    if high { (old & 0xffff_ffff) | value << 32 } else { (old & !0xffff_ffff) | value }
}

#[expect(clippy::cast_possible_truncation, reason = "the half is meant")]
const fn half(value: u64, index: u32) -> u32 {
    match index {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

impl Transport {
    /// A device after reset. `features` are those besides [`COMMON_FEATURES`]; `max_sizes` are
    /// powers of two.
    #[must_use]
    pub fn new(device_id: u32, features: u64, max_sizes: &'static [u16]) -> Self {
        Self {
            device_id,
            offered: features | COMMON_FEATURES,
            status: 0,
            driver_features: 0,
            foreign_features: false,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            registers: vec![QueueRegisters::default(); max_sizes.len()],
            max_sizes,
            queues: max_sizes.iter().map(|_| Queue::default()).collect(),
        }
    }

    /// Whether the device may touch its queues.
    #[must_use]
    pub const fn live(&self) -> bool {
        self.status & DRIVER_OK != 0 && self.status & (NEEDS_RESET | FAILED) == 0
    }

    /// The features that both sides agreed on; 0 before FEATURES_OK.
    #[must_use]
    pub const fn features(&self) -> u64 {
        if self.status & FEATURES_OK == 0 { 0 } else { self.driver_features }
    }

    /// The virtio device id.
    #[must_use]
    pub const fn device_id(&self) -> u32 {
        self.device_id
    }

    /// The queues. A queue that is not ready gives no chains.
    pub fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    /// Sets DEVICE_NEEDS_RESET. Returns whether the driver must get a configuration interrupt,
    /// which only a live device sends.
    pub const fn need_reset(&mut self) -> bool {
        let was_live = self.live();
        self.status |= NEEDS_RESET;
        was_live
    }

    /// Reads a register below [`register::CONFIG`], except InterruptStatus.
    #[must_use]
    pub fn read(&self, offset: u64) -> u32 {
        let selected = usize::try_from(self.queue_sel).unwrap_or(usize::MAX);
        match offset {
            register::MAGIC => u32::from_le_bytes(*b"virt"),
            register::VERSION => 2,
            register::DEVICE_ID => self.device_id,
            register::VENDOR_ID => VENDOR,
            register::DEVICE_FEATURES => half(self.offered, self.device_features_sel),
            register::QUEUE_NUM_MAX => self.max_sizes.get(selected).copied().map_or(0, u32::from),
            register::QUEUE_READY => self.registers.get(selected).map_or(0, |q| q.ready.into()),
            register::STATUS => self.status.into(),
            // Configurations have no generations. Only a MAC changes, when a network device gets
            // its link, and the balloon's target, a single field of 32 bits.
            register::CONFIG_GENERATION => 0,
            // "If there is no such region, reads give all ones."
            register::SHM_LEN_LOW..=register::SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// Writes a register below [`register::CONFIG`], except InterruptACK.
    pub fn write(&mut self, mem: &GuestMemoryMmap, offset: u64, value: u32) -> Effect {
        match offset {
            register::STATUS => return self.write_status(value),
            register::QUEUE_NOTIFY => {
                let queue = usize::try_from(value).unwrap_or(usize::MAX);
                let ready = self.registers.get(queue).is_some_and(|q| q.ready);
                return if self.live() && ready { Effect::Notify(queue) } else { Effect::None };
            }
            register::DEVICE_FEATURES_SEL => self.device_features_sel = value,
            register::DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            register::DRIVER_FEATURES => self.write_features(value),
            register::QUEUE_SEL => self.queue_sel = value,
            register::QUEUE_READY => self.write_ready(mem, value),
            _ => self.write_queue(offset, value),
        }
        Effect::None
    }

    fn write_features(&mut self, value: u32) {
        if self.status & (DRIVER | FEATURES_OK | FAILED) != DRIVER {
            return;
        }
        match self.driver_features_sel {
            sel @ 0..=1 => self.driver_features = with_half(self.driver_features, value, sel == 1),
            _ => self.foreign_features |= value != 0,
        }
    }

    fn write_status(&mut self, value: u32) -> Effect {
        const STEPS: [u8; 4] = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];
        if value == 0 {
            *self = Self::new(self.device_id, self.offered, self.max_sizes);
            return Effect::Reset;
        }
        let value = u8::try_from(value & 0xff).unwrap_or_default();
        if self.status & FAILED != 0 {
            return Effect::None;
        }
        // Bits are only added, so none can be taken back. A step whose predecessors are missing is
        // ignored.
        self.status |= value & FAILED;
        for step in STEPS {
            if value & step == 0 {
                break;
            }
            if self.status & step != 0 {
                continue;
            }
            if self.status & (NEEDS_RESET | FAILED) != 0
                || step == FEATURES_OK && !self.features_agree()
            {
                break;
            }
            self.status |= step;
            if step == DRIVER_OK {
                let event_idx = self.driver_features & EVENT_IDX != 0;
                self.queues.iter_mut().for_each(|q| q.set_event_idx(event_idx));
                return Effect::Activated;
            }
        }
        Effect::None
    }

    const fn features_agree(&self) -> bool {
        !self.foreign_features
            && self.driver_features & !self.offered == 0
            && self.driver_features & VERSION_1 != 0
    }

    /// Whether queues may be configured now.
    const fn set_up(&self) -> bool {
        self.status & FEATURES_OK != 0 && self.status & (DRIVER_OK | NEEDS_RESET | FAILED) == 0
    }

    fn write_queue(&mut self, offset: u64, value: u32) {
        let set_up = self.set_up();
        let selected = usize::try_from(self.queue_sel).unwrap_or(usize::MAX);
        let Some(queue) = self.registers.get_mut(selected).filter(|q| set_up && !q.ready) else {
            return;
        };
        match offset {
            register::QUEUE_NUM => queue.size = value,
            register::QUEUE_DESC_LOW => queue.desc = with_half(queue.desc, value, false),
            register::QUEUE_DESC_HIGH => queue.desc = with_half(queue.desc, value, true),
            register::QUEUE_DRIVER_LOW => queue.driver = with_half(queue.driver, value, false),
            register::QUEUE_DRIVER_HIGH => queue.driver = with_half(queue.driver, value, true),
            register::QUEUE_DEVICE_LOW => queue.device = with_half(queue.device, value, false),
            register::QUEUE_DEVICE_HIGH => queue.device = with_half(queue.device, value, true),
            _ => {}
        }
    }

    fn write_ready(&mut self, mem: &GuestMemoryMmap, value: u32) {
        let set_up = self.set_up();
        let selected = usize::try_from(self.queue_sel).unwrap_or(usize::MAX);
        let (Some(registers), Some(max)) =
            (self.registers.get_mut(selected), self.max_sizes.get(selected))
        else {
            return;
        };
        if value == 0 {
            registers.ready = false;
            self.queues[selected] = Queue::default();
        } else if set_up && !registers.ready {
            let wanted = QueueRegisters { ready: true, next_avail: 0, next_used: 0, ..*registers };
            if let Some(queue) = build(mem, &wanted, *max, false) {
                (*registers, self.queues[selected]) = (wanted, queue);
            }
        }
    }

    /// The state to be saved. `interrupt_status` comes from [`super::interrupt`].
    #[must_use]
    pub fn save(&self, interrupt_status: u32) -> TransportState {
        let queues = self.registers.iter().zip(&self.queues);
        TransportState {
            status: self.status,
            interrupt_status,
            driver_features: self.driver_features,
            foreign_features: self.foreign_features,
            device_features_sel: self.device_features_sel,
            driver_features_sel: self.driver_features_sel,
            queue_sel: self.queue_sel,
            queues: queues
                .map(|(registers, queue)| QueueRegisters {
                    next_avail: queue.next_avail(),
                    next_used: queue.next_used(),
                    ..*registers
                })
                .collect(),
        }
    }

    /// Checks saved registers against this device and guest memory, and makes a transport of them.
    ///
    /// # Errors
    /// [`TransportStateError`].
    pub fn loaded(
        &self,
        mem: &GuestMemoryMmap,
        state: &TransportState,
    ) -> Result<Self, TransportStateError> {
        let steps = state.status & !(NEEDS_RESET | FAILED);
        let ordered = [0, 1, 3, 11, 15].contains(&steps);
        if !ordered {
            return Err(TransportStateError::Status(state.status));
        }
        if state.interrupt_status > 3 {
            return Err(TransportStateError::Interrupt(state.interrupt_status));
        }
        let mut new = Self {
            status: state.status,
            driver_features: state.driver_features,
            foreign_features: state.foreign_features,
            device_features_sel: state.device_features_sel,
            driver_features_sel: state.driver_features_sel,
            queue_sel: state.queue_sel,
            ..Self::new(self.device_id, self.offered, self.max_sizes)
        };
        let agreed = steps & FEATURES_OK != 0;
        if agreed && !new.features_agree() {
            let (offered, got) = (self.offered, state.driver_features);
            return Err(TransportStateError::Features { offered, got });
        }
        let (expected, got) = (self.max_sizes.len(), state.queues.len());
        if expected != got {
            return Err(TransportStateError::Queues { expected, got });
        }
        let event_idx = steps & DRIVER_OK != 0 && state.driver_features & EVENT_IDX != 0;
        for (index, (registers, max)) in state.queues.iter().zip(self.max_sizes).enumerate() {
            if registers.ready {
                let queue = build(mem, registers, *max, event_idx).filter(|_| agreed);
                new.queues[index] = queue.ok_or(TransportStateError::Queue {
                    index,
                    max: *max,
                    got: *registers,
                })?;
            }
            new.registers[index] = *registers;
        }
        Ok(new)
    }
}

/// A queue made from registers; `None` if its size, alignment or place is invalid.
fn build(
    mem: &GuestMemoryMmap,
    registers: &QueueRegisters,
    max: u16,
    event_idx: bool,
) -> Option<Queue> {
    let size = u16::try_from(registers.size).ok()?;
    let queue = Queue::try_from(QueueState {
        max_size: max,
        next_avail: registers.next_avail,
        next_used: registers.next_used,
        event_idx_enabled: event_idx,
        size,
        ready: true,
        desc_table: registers.desc,
        avail_ring: registers.driver,
        used_ring: registers.device,
    });
    // The crate treats an available ring at address 0 as a queue that was reset.
    queue.ok().filter(|queue| registers.driver != 0 && queue.is_valid(mem))
}

/// Copies a configuration space from `offset` on; past its end come zeroes.
pub(super) fn copy_config(config: &[u8], offset: usize, data: &mut [u8]) {
    let there = config.get(offset..).unwrap_or_default();
    let length = there.len().min(data.len());
    data[..length].copy_from_slice(&there[..length]);
    data[length..].fill(0);
}
