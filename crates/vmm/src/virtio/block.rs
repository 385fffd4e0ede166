//! virtio-blk (virtio 1.2 section 5.2) over a [`Disk`].
//!
//! A request is checked whole before a byte moves: its chain ([`super::ring`]), the direction and
//! length of each part, the sectors, the type. An invalid request is answered with a status. Only a
//! chain without a byte for the status makes the device ask for a reset.

use super::ring::Chain;
use crate::disk::page_map::PageMap;
use crate::disk::{DamagedFile, Disk, IoList, NoSpace, Room, ZeroError};
use crate::meter::{Meter, ThreadClock};
use crate::report;
use dayfly_units::error::chain;
use serde::{Deserialize, Serialize};
use std::io;
use virtio_bindings::virtio_blk as spec;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

/// VIRTIO_ID_BLOCK.
pub const DEVICE_ID: u32 = VIRTIO_ID_BLOCK;
/// One queue of 256 descriptors.
pub const QUEUES: &[u16] = &[256];

/// Bytes of a sector, the unit of virtio-blk's addresses and lengths.
const SECTOR: u64 = 512;
/// Most data buffers of a request: the queue's size less header and status.
const MAX_SEGMENTS: u32 = 254;
/// Largest data buffer in bytes, so that no request moves more than 254 MiB.
const MAX_SEGMENT_BYTES: u32 = 1 << 20;
const MAX_DATA_BYTES: usize = MAX_SEGMENTS as usize * MAX_SEGMENT_BYTES as usize;
/// Most sectors of one discarded range, and of all zeroed ranges of a request: 2 GiB.
const MAX_ZERO_SECTORS: u32 = 1 << 22;
/// Most sectors of a WRITE_ZEROES request that the device offers: 16 MiB, because it may have to
/// write them. Guests of older snapshots have read [`MAX_ZERO_SECTORS`] and use that many.
const OFFERED_ZERO_SECTORS: u32 = 1 << 15;
/// Most ranges in one request.
const MAX_ZERO_RANGES: u32 = 16;
/// Most reports of damaged files, because a guest can read one as often as it likes.
const MAX_REPORTS: u64 = 16;
const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;
const ID_BYTES: usize = 20;
/// Bytes of `struct virtio_blk_config`, up to and including `write_zeroes_may_unmap`.
const CONFIG_BYTES: usize = 60;

/// The status byte of an answer (5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// Failed requests since the device was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Requests that had to wait because the host had no space for them.
    pub no_space: u64,
    /// Requests that failed with another error of the host.
    pub host_errors: u64,
    /// Requests that failed because a disk file is not what its hash tree says.
    pub damaged: u64,
    /// Requests that the device refused as invalid or unsupported.
    pub refused: u64,
}

/// The saved state of a disk besides its queue. The layers are saved by freezing them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Whether the disk has no writable layer.
    pub read_only: bool,
}

/// What a device reads and notes beside its disk, for all disks of a VM.
#[derive(Debug)]
pub struct Notes<'n> {
    /// Which frames met which blocks.
    pub pages: &'n mut PageMap,
    /// The host's room for the disks.
    pub room: &'n mut Room,
    /// How much the disks have moved.
    pub meter: &'n Meter,
    /// The CPU time of the thread of the disks, which is noted before each wait for reads.
    pub clock: &'n mut ThreadClock,
}

/// A virtio-blk device.
#[derive(Debug)]
pub struct Block {
    pub(super) disk: Disk,
    pub(super) number: u8,
    id: [u8; ID_BYTES],
    pub(super) counters: DiskCounters,
    /// Why the next request waits until [`Self::retry`].
    pub(super) waits: Option<NoSpace>,
}

impl Block {
    /// A device over `disk`, which is disk `number` of its VM, from 0.
    #[must_use]
    pub fn new(disk: Disk, number: usize) -> Self {
        let mut id = [0; ID_BYTES];
        let text = format!("dayfly-{number}");
        let length = text.len().min(ID_BYTES);
        id[..length].copy_from_slice(&text.as_bytes()[..length]);
        // The page map ignores numbers past the last disk of a VM.
        let number = u8::try_from(number).unwrap_or(u8::MAX);
        Self { disk, number, id, counters: DiskCounters::default(), waits: None }
    }

    /// The features that this device offers, besides the common ones.
    #[must_use]
    pub const fn features(&self) -> u64 {
        let always = 1 << spec::VIRTIO_BLK_F_SIZE_MAX
            | 1 << spec::VIRTIO_BLK_F_SEG_MAX
            | 1 << spec::VIRTIO_BLK_F_BLK_SIZE
            | 1 << spec::VIRTIO_BLK_F_TOPOLOGY
            | 1 << spec::VIRTIO_BLK_F_FLUSH;
        let other = if self.disk.read_only() {
            1 << spec::VIRTIO_BLK_F_RO
        } else {
            1 << spec::VIRTIO_BLK_F_DISCARD | 1 << spec::VIRTIO_BLK_F_WRITE_ZEROES
        };
        always | other
    }

    /// Copies configuration space (5.2.4) from `offset` on; past its end are zeroes.
    pub fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut config = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.disk.size_bytes() / SECTOR).to_le_bytes());
        put(8, &MAX_SEGMENT_BYTES.to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        put(20, &512_u32.to_le_bytes()); // blk_size: a file system of 1 KiB blocks must mount
        put(24, &[3]); // physical_block_exp: a layer's block is 8 logical blocks
        put(26, &8_u16.to_le_bytes()); // min_io_size
        put(36, &MAX_ZERO_SECTORS.to_le_bytes()); // max_discard_sectors
        put(40, &MAX_ZERO_RANGES.to_le_bytes()); // max_discard_seg
        put(44, &8_u32.to_le_bytes()); // discard_sector_alignment
        put(48, &OFFERED_ZERO_SECTORS.to_le_bytes()); // max_write_zeroes_sectors
        put(52, &1_u32.to_le_bytes()); // max_write_zeroes_seg: zeroes may have to be written
        put(56, &[1]); // write_zeroes_may_unmap
        super::transport::copy_config(&config, offset, data);
    }

    /// The state to be saved besides the queue.
    #[must_use]
    pub const fn save(&self) -> BlockState {
        BlockState { size_bytes: self.disk.size_bytes(), read_only: self.disk.read_only() }
    }

    /// The failures so far.
    #[must_use]
    pub const fn counters(&self) -> DiskCounters {
        self.counters
    }

    /// Why the device serves no request until [`Self::retry`]; `None`: it serves.
    #[must_use]
    pub const fn waits(&self) -> Option<NoSpace> {
        self.waits
    }

    /// Makes the device try the request again that had no space. Returns whether there is one.
    pub const fn retry(&mut self) -> bool {
        self.waits.take().is_some()
    }

    /// The disk behind the device.
    pub const fn disk(&mut self) -> &mut Disk {
        &mut self.disk
    }

    /// Counts a failure of the host. The first failures because of a damaged file are reported.
    pub(super) fn count(&mut self, error: &io::Error) {
        let counter = match error.get_ref() {
            Some(cause) if cause.is::<DamagedFile>() => {
                if self.counters.damaged < MAX_REPORTS {
                    let (number, cause) = (self.number, chain(cause));
                    report::line(&format!(
                        "disk {number}, {cause}; the guest gets an I/O error; next: `dayfly store \
                         verify`"
                    ));
                }
                &mut self.counters.damaged
            }
            _ => &mut self.counters.host_errors,
        };
        *counter = counter.saturating_add(1);
    }

    /// Checks a request and performs it, apart from a read, of which it returns what to read.
    /// `data_in` is the number of writable bytes before the status.
    pub(super) fn request<'m>(
        &mut self,
        chain: &Chain<'m>,
        data_in: usize,
        features: u64,
        notes: &mut Notes<'_>,
    ) -> Result<Todo<'m>, Refusal> {
        let Notes { pages, room, meter, .. } = notes;
        let mut header = [0; HEADER_BYTES];
        if !chain.in_order || chain.readable.copy_to(&mut header) != HEADER_BYTES {
            return Err(Refusal::INVALID);
        }
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let sector = u64_at(&header, 8);
        let data_out = chain.readable.window(HEADER_BYTES, chain.readable.len());
        let offered = |bit: u32| features & 1 << bit != 0;
        match kind {
            spec::VIRTIO_BLK_T_IN => {
                if !data_out.is_empty() {
                    return Err(Refusal::INVALID);
                }
                let offset = self.place(sector, data_in)?;
                Ok(Todo::Read { offset, data: chain.writable.window(0, data_in) })
            }
            spec::VIRTIO_BLK_T_OUT => {
                if data_in != 0 || self.disk.read_only() {
                    return Err(Refusal::INVALID);
                }
                let offset = self.place(sector, data_out.len())?;
                self.check_room(room, offset, data_out.len() as u64)?;
                self.disk.write(offset, &data_out)?;
                pages.written(self.number, offset, &data_out);
                meter.written(self.number, data_out.len());
                Ok(Todo::Nothing(0))
            }
            spec::VIRTIO_BLK_T_FLUSH => {
                if data_in != 0 || !data_out.is_empty() {
                    return Err(Refusal::INVALID);
                }
                // A written block is in the host's page cache, which a snapshot reads and which
                // outlives this process. A loss of the host's power ends the VM together with its
                // writable layer. So waiting for the host's disk would protect nothing; the store
                // syncs what a snapshot publishes. A write ends before it is answered, so none is
                // in flight here.
                Ok(Todo::Nothing(0))
            }
            spec::VIRTIO_BLK_T_GET_ID => {
                if data_in < ID_BYTES || !data_out.is_empty() {
                    return Err(Refusal::INVALID);
                }
                Ok(Todo::Nothing(chain.writable.window(0, data_in).copy_from(&self.id)))
            }
            spec::VIRTIO_BLK_T_DISCARD if offered(spec::VIRTIO_BLK_F_DISCARD) => {
                self.zero_ranges(&data_out, data_in, room, false)
            }
            spec::VIRTIO_BLK_T_WRITE_ZEROES if offered(spec::VIRTIO_BLK_F_WRITE_ZEROES) => {
                self.zero_ranges(&data_out, data_in, room, true)
            }
            _ => Err(Refusal::Request(Status::Unsupported)),
        }
    }

    /// The byte offset of a transfer of `len` bytes at `sector`, if all of it lies on the disk.
    fn place(&self, sector: u64, len: usize) -> Result<u64, Refusal> {
        let len = Some(len).filter(|len| *len <= MAX_DATA_BYTES).map(|len| len as u64);
        let whole = len.filter(|len| len % SECTOR == 0).ok_or(Refusal::INVALID)?;
        let offset = sector.checked_mul(SECTOR).ok_or(Refusal::INVALID)?;
        match offset.checked_add(whole) {
            Some(end) if end <= self.disk.size_bytes() => Ok(offset),
            _ => Err(Refusal::INVALID),
        }
    }

    fn check_room(&self, room: &mut Room, offset: u64, len: u64) -> Result<(), Refusal> {
        let number = usize::from(self.number);
        self.disk.check_room(room, number, offset, len).map_err(Refusal::NoSpace)
    }

    /// Performs DISCARD, or WRITE_ZEROES if `exact` (5.2.6.2). All ranges are checked before the
    /// first one changes.
    fn zero_ranges(
        &mut self,
        list: &IoList<'_>,
        data_in: usize,
        room: &mut Room,
        exact: bool,
    ) -> Result<Todo<'static>, Refusal> {
        const UNMAP: u32 = 1;
        let count = list.len() / RANGE_BYTES;
        let fits = list.len().is_multiple_of(RANGE_BYTES)
            && (1..=MAX_ZERO_RANGES as usize).contains(&count);
        if data_in != 0 || !fits || self.disk.read_only() {
            return Err(Refusal::INVALID);
        }
        let mut bytes = [0; RANGE_BYTES * MAX_ZERO_RANGES as usize];
        let copied = list.copy_to(&mut bytes);
        let mut ranges = Vec::with_capacity(count);
        for range in bytes[..copied].chunks_exact(RANGE_BYTES) {
            let (sector, last) = (u64_at(range, 0), u64_at(range, 8));
            let (sectors, flags) = (half(last, false), half(last, true));
            if flags & !UNMAP != 0 || !exact && flags & UNMAP != 0 {
                return Err(Refusal::Request(Status::Unsupported));
            }
            if sectors > MAX_ZERO_SECTORS {
                return Err(Refusal::INVALID);
            }
            let len = u64::from(sectors) * SECTOR;
            let offset = sector.checked_mul(SECTOR).ok_or(Refusal::INVALID)?;
            let end = offset.checked_add(len).ok_or(Refusal::INVALID)?;
            if end > self.disk.size_bytes() {
                return Err(Refusal::INVALID);
            }
            ranges.push((offset, len));
        }
        let zeroed = ranges.iter().fold(0_u64, |sum, (_, len)| sum.saturating_add(*len));
        if exact && zeroed > u64::from(MAX_ZERO_SECTORS) * SECTOR {
            return Err(Refusal::INVALID);
        }
        let number = usize::from(self.number);
        for (offset, len) in ranges {
            let mut check = |disk: &Disk, at, len| disk.check_room(room, number, at, len);
            if exact {
                self.disk.zero_if(offset, len, check)?;
            } else {
                self.disk.discard_if(offset, len, |disk, at, len| check(disk, at, len).is_ok())?;
            }
        }
        Ok(Todo::Nothing(0))
    }
}

/// What is left of a request after its check.
pub(super) enum Todo<'m> {
    /// Nothing more: it is done, and wrote this many bytes to the chain.
    Nothing(usize),
    /// `data` must be filled from byte `offset` on.
    Read { offset: u64, data: IoList<'m> },
}

/// Why a request failed.
pub(super) enum Refusal {
    /// The request is invalid or unsupported.
    Request(Status),
    /// The host has no space for it.
    NoSpace(NoSpace),
    /// A call to the host failed.
    Host(io::Error),
}

impl Refusal {
    const INVALID: Self = Self::Request(Status::IoError);
}

impl From<ZeroError> for Refusal {
    fn from(error: ZeroError) -> Self {
        match error {
            ZeroError::NoSpace(why) => Self::NoSpace(why),
            ZeroError::Host(error) => error.into(),
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Self::NoSpace(NoSpace::Full),
            _ => Self::Host(error),
        }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(out)
}

#[expect(clippy::cast_possible_truncation, reason = "the half is meant")]
const fn half(value: u64, high: bool) -> u32 {
    if high { (value >> 32) as u32 } else { value as u32 }
}
