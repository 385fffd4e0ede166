//! The registers of a virtio-mmio device, version 2 (virtio 1.2 section 4.2.2), and what they allow.
//!
//! No I/O, no threads: a register write changes this state and returns what must follow ([`Effect`]).
//!
//! ```text
//!            0 written at any time: reset
//!  ┌───────┐ ACKNOWLEDGE ┌─────┐ DRIVER ┌────────┐ FEATURES_OK, if the   ┌─────────┐ DRIVER_OK ┌──────┐
//!  │ reset │────────────▶│ ack │───────▶│ driver │ features are offered  │  queue  │──────────▶│ live │
//!  └───────┘             └─────┘        │ writes │──────────────────────▶│ set-up  │           └──┬───┘
//!                                       │features│ and VERSION_1 is one  └─────────┘              │ the driver
//!                                       └────────┘                                                ▼ breaks a rule
//!      FAILED may be set by the driver in any state; then only a reset helps.           DEVICE_NEEDS_RESET
//! ```
//! Steps cannot be left out and bits not be taken back; a write that tries is ignored, as is one to a queue that is
//! ready, outside of set-up, or of a device that needs a reset. Stopping a queue (QueueReady = 0) is always allowed.

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT as _};
use vm_memory::GuestMemoryMmap;

/// Status bits (2.1).
pub mod status {
    /// The driver found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The driver knows how to drive it.
    pub const DRIVER: u8 = 2;
    /// The driver is ready: the device is live.
    pub const DRIVER_OK: u8 = 4;
    /// Features are agreed.
    pub const FEATURES_OK: u8 = 8;
    /// The device cannot go on.
    pub const NEEDS_RESET: u8 = 64;
    /// The driver gave up.
    pub const FAILED: u8 = 128;
}
use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, NEEDS_RESET};

/// Register offsets (4.2.2, table 4.1).
pub mod register {
    /// "virt".
    pub const MAGIC: u64 = 0x000;
    /// 2.
    pub const VERSION: u64 = 0x004;
    /// What kind of device.
    pub const DEVICE_ID: u64 = 0x008;
    /// Whose.
    pub const VENDOR_ID: u64 = 0x00c;
    /// 32 bits of what is offered.
    pub const DEVICE_FEATURES: u64 = 0x010;
    /// Which 32.
    pub const DEVICE_FEATURES_SEL: u64 = 0x014;
    /// 32 bits of what the driver takes.
    pub const DRIVER_FEATURES: u64 = 0x020;
    /// Which 32.
    pub const DRIVER_FEATURES_SEL: u64 = 0x024;
    /// Which queue the next registers are about.
    pub const QUEUE_SEL: u64 = 0x030;
    /// Its largest size, 0: no such queue.
    pub const QUEUE_NUM_MAX: u64 = 0x034;
    /// Its size.
    pub const QUEUE_NUM: u64 = 0x038;
    /// Whether it is in use.
    pub const QUEUE_READY: u64 = 0x044;
    /// The kick.
    pub const QUEUE_NOTIFY: u64 = 0x050;
    /// What happened.
    pub const INTERRUPT_STATUS: u64 = 0x060;
    /// The driver has seen it.
    pub const INTERRUPT_ACK: u64 = 0x064;
    /// Device status.
    pub const STATUS: u64 = 0x070;
    /// Descriptor table, low half.
    pub const QUEUE_DESC_LOW: u64 = 0x080;
    /// Descriptor table, high half.
    pub const QUEUE_DESC_HIGH: u64 = 0x084;
    /// Available ring, low half.
    pub const QUEUE_DRIVER_LOW: u64 = 0x090;
    /// Available ring, high half.
    pub const QUEUE_DRIVER_HIGH: u64 = 0x094;
    /// Used ring, low half.
    pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    /// Used ring, high half.
    pub const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    /// Length of the selected shared memory region, low half: there are none.
    pub const SHM_LEN_LOW: u64 = 0x0b0;
    /// … and its address, high half, the last of four registers.
    pub const SHM_BASE_HIGH: u64 = 0x0bc;
    /// Changes when the configuration does; it never does here.
    pub const CONFIG_GENERATION: u64 = 0x0fc;
    /// Device-specific configuration from here on.
    pub const CONFIG: u64 = 0x100;
}

/// VIRTIO_F_INDIRECT_DESC, VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1: offered by every device.
pub const COMMON_FEATURES: u64 = 1 << 28 | EVENT_IDX | VERSION_1;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
/// "DFLY".
const VENDOR: u32 = 0x594c_4644;

/// What a write asks of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The device became live: look at every queue.
    Activated,
    /// Everything is as at the start: forget the driver.
    Reset,
    /// A queue has work.
    Notify(usize),
}

/// A queue's registers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRegisters {
    /// QueueNum as written.
    pub size: u32,
    /// Descriptor table, guest physical.
    pub desc: u64,
    /// Available ring, guest physical.
    pub driver: u64,
    /// Used ring, guest physical.
    pub device: u64,
    /// In use.
    pub ready: bool,
    /// Where the device stands in the available ring.
    pub next_avail: u16,
    /// Where the device stands in the used ring.
    pub next_used: u16,
}

/// What is saved of a transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// Device status.
    pub status: u8,
    /// InterruptStatus.
    pub interrupt_status: u32,
    /// What the driver wrote to DriverFeatures.
    pub driver_features: u64,
    /// Whether it asked for a feature past bit 63.
    pub foreign_features: bool,
    /// DeviceFeaturesSel.
    pub device_features_sel: u32,
    /// DriverFeaturesSel.
    pub driver_features_sel: u32,
    /// QueueSel.
    pub queue_sel: u32,
    /// Every queue.
    pub queues: Vec<QueueRegisters>,
}

/// Why saved registers were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportStateError {
    /// A status the driver cannot have brought about.
    #[error("status: expected bits in the order 1, 2, 8, 4, got {0:#x}")]
    Status(u8),
    /// An interrupt that does not exist.
    #[error("interrupt status: expected at most 3, got {0:#x}")]
    Interrupt(u32),
    /// Agreed features that this device does not offer.
    #[error("driver features: expected a subset of {offered:#x} with bit 32, got {got:#x}")]
    Features {
        /// What is offered.
        offered: u64,
        /// What was agreed.
        got: u64,
    },
    /// Another number of queues.
    #[error("queues: expected {expected}, got {got}")]
    Queues {
        /// Queues of this device.
        expected: usize,
        /// Queues in the state.
        got: usize,
    },
    /// A queue in use that lies outside of memory, or is not ready for use in this status.
    #[error("queue {index}: expected a valid queue of at most {max} in guest memory, got {got:?}")]
    Queue {
        /// Which.
        index: usize,
        /// Its largest size.
        max: u16,
        /// What was saved.
        got: QueueRegisters,
    },
}

/// The registers.
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

/// The half of a 64-bit register.
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
    /// A device after reset. `max_sizes` are powers of two.
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

    /// What both sides agreed on; nothing before they did.
    #[must_use]
    pub const fn features(&self) -> u64 {
        if self.status & FEATURES_OK == 0 { 0 } else { self.driver_features }
    }

    /// What kind of device this is.
    #[must_use]
    pub const fn device_id(&self) -> u32 {
        self.device_id
    }

    /// The queues; those not ready give nothing.
    pub fn queues(&mut self) -> &mut [Queue] {
        &mut self.queues
    }

    /// The device cannot go on; returns whether the driver is to be told by a configuration interrupt.
    pub const fn need_reset(&mut self) -> bool {
        let tell = self.live();
        self.status |= NEEDS_RESET;
        tell
    }

    /// Reads a register below [`register::CONFIG`], all but the interrupt's.
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
            // No configuration changes while a driver looks: it has no generations.
            register::CONFIG_GENERATION => 0,
            // "If there is no such region, reads give all ones."
            register::SHM_LEN_LOW..=register::SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// Writes a register below [`register::CONFIG`], all but the interrupt's.
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
        // Bits are only ever added, so none can be taken back; a step whose predecessors are missing is not taken.
        self.status |= value & FAILED;
        for step in STEPS {
            if value & step == 0 {
                break;
            }
            if self.status & step != 0 {
                continue;
            }
            if self.status & (NEEDS_RESET | FAILED) != 0 || step == FEATURES_OK && !self.features_agree() {
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

    /// Whether queues may be set up now.
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
        let (Some(registers), Some(max)) = (self.registers.get_mut(selected), self.max_sizes.get(selected))
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

    /// What is to be saved; `interrupt_status` comes from the interrupt.
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

    /// Checks saved registers against this device and this memory, and makes a transport of them.
    ///
    /// # Errors
    /// [`TransportStateError`].
    pub fn loaded(&self, mem: &GuestMemoryMmap, state: &TransportState) -> Result<Self, TransportStateError> {
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
                new.queues[index] =
                    queue.ok_or(TransportStateError::Queue { index, max: *max, got: *registers })?;
            }
            new.registers[index] = *registers;
        }
        Ok(new)
    }
}

/// A queue made of registers, if its size, alignment and place are right.
fn build(mem: &GuestMemoryMmap, registers: &QueueRegisters, max: u16, event_idx: bool) -> Option<Queue> {
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
    // The crate takes an available ring at 0 for a queue that was reset.
    queue.ok().filter(|queue| registers.driver != 0 && queue.is_valid(mem))
}
