//! # microguest
//!
//! A guest of a few hundred instructions that needs only a CPU in 64-bit long mode, RAM and a
//! serial port. It boots like a vmlinux and obeys the words of its command line, or of its
//! initramfs if it has one ([`initramfs`]). The VMM's tests therefore run on any `/dev/kvm`, even
//! on one that emulates every instruction (about two million a second).
//!
//! Words that need interrupts or SSE do not belong here; stock kernels test those.
//!
//! The words (numbers in hexadecimal):
//! - `say=TEXT`: prints TEXT.
//! - `fill=SEED:PAGES`: writes SEED's pattern to pages from 32 MiB on, verifies it.
//! - `verify=SEED:PAGES`: prints `verify ok seed SEED` or `verify bad page N`.
//! - `grow=ADDR:COUNT:SEEDS`: grows ([`Growth`]) with the seeds 1 to SEEDS. Then, over and over,
//!   prints `ready`, waits as `until` does, and obeys the generation id. An id that is no
//!   [`Growth`] halts the guest.
//! - `grow=ADDR:COUNT:SEEDS:FIRST:THEN`: as `grow` with SEEDS seeds from FIRST on. An id that is no
//!   [`Growth`] makes the guest check its pages, and then grow by the next seed (THEN is `g`),
//!   churn from that seed on (`c`), churn in the first 256 slots only (`s`), do nothing (`l`), or
//!   churn the first time and halt the next time, as a clone that takes no CPU time then (`h`).
//! - `rings=ADDR:CPUS`: starts the other vCPUs and prints `writing`. All vCPUs write numbered
//!   pages, the first vCPU also writes blocks, until the generation id at ADDR changes. Then each
//!   vCPU checks that it finds all of its writes and nothing else. Prints `rings ok N`, or `rings
//!   wrong: WHY`, and goes on if the id is that of [`Growth::Churn`].
//! - `cpus=ADDR`: over and over prints `ready`, waits until the VM generation id at ADDR changes,
//!   and obeys it ([`cpus`]): starts vCPUs, checks that each runs, and prints `cpus N up M`, the
//!   number that it has started and the number that runs.
//! - `cpus=ADDR:COUNT`: the same with COUNT vCPUs, whatever the id is.
//! - `write=BLOCKS`: writes a page to each of BLOCKS blocks of 4 KiB of the first disk, and prints
//!   `written`, or why not.
//! - `give=FIRST:PAGES`: reports PAGES pages from FIRST on, counted from 32 MiB, as free to the
//!   balloon, and prints `given`, or why not. It may still use them.
//! - `serve`: sends each UDP datagram that comes back to where it came from, for ever. Needs no
//!   address: it is in the datagram. Halts without a network device.
//! - `flood=ADDRESS:PAGES`: the same. What the first datagram holds becomes a question to the name
//!   service at ADDRESS (an IPv4 address as one number). From then on, as fast as the devices take
//!   them, over and over: sends the question, with the next id; asks the host for a vsock
//!   connection, to a port on which no program listens; and after each question writes one word to
//!   the next of PAGES pages from 32 MiB on.
//! - `touch=PAGES`: writes one word to each of PAGES pages from 32 MiB on, without the hole below
//!   4 GiB; at most 11 GiB of RAM.
//! - `sort=SEED:KEYS`: makes KEYS 32-bit integers from SEED, sorts them, looks through them, and
//!   prints the line of [`sorted`] or `sort wrong at N`.
//! - `born=ADDR`: as `until`, and then halts: the least that a clone can do.
//! - `until=ADDR`: prints `ready`, waits until the VM generation id at ADDR changes to any value,
//!   writes to port 0x80 and goes on with the next word.
//! - `count`: prints `count N` now and then, for ever.
//! - `work=PAGES:TURNS`: writes one word to each of PAGES pages from 32 MiB on, over and over, and
//!   prints a dot after each TURNS rounds; for ever.
//! - `wait=ADDR`: over and over prints `ready`, counts until the VM generation id at ADDR changes,
//!   then obeys it ([`orders`]).
//! - `end=HOW`: ends the VM, see [`End`].
//!
//! After the last word the guest prints `done` and halts with interrupts off.

/// How the guest ends its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum End {
    /// Does not end the VM: goes on counting.
    Not = 0,
    /// Writes S5 to the ACPI sleep control register (port 0x600).
    PowerOff = b'o',
    /// Pulses the reset line through the keyboard controller (0xfe to port 0x64).
    Keyboard = b'k',
    /// Writes the ACPI reset register (6 to port 0x602).
    AcpiReset = b'a',
    /// A page fault with an empty IDT (KVM's emulator knows no `int3` in long mode).
    TripleFault = b't',
    /// Reports a panic through pvpanic (1 to port 0x505).
    Panic = b'p',
}

/// The guest as an ELF file that boots like a vmlinux.
#[must_use]
pub fn elf() -> &'static [u8] {
    include_bytes!(concat!(env!("OUT_DIR"), "/microguest.elf"))
}

/// The initramfs of a guest that obeys `words`, at most 1,023 bytes.
#[must_use]
pub fn initramfs(words: &str) -> Vec<u8> {
    [words.as_bytes(), &[0]].concat()
}

/// A VM generation id that is an order to a waiting guest: verify the pages that it filled, fill
/// them with `seed`'s pattern, verify that, print `obeyed SEED`, then end as `end` says.
#[must_use]
pub fn orders(seed: u32, end: End) -> [u8; 16] {
    let mut id = [0; 16];
    id[..4].copy_from_slice(&seed.to_le_bytes());
    id[4] = end as u8;
    id[15] = 0x5a;
    id
}

/// A VM generation id that makes a guest with the word `cpus=` start vCPUs until `running` run, and
/// then send INIT and SIPI to the others below `tried`, which do not exist. `turn` makes ids of the
/// same order differ.
#[must_use]
pub fn cpus(running: u8, tried: u8, turn: u8) -> [u8; 16] {
    let mut id = [0; 16];
    (id[0], id[4], id[8], id[15]) = (running, tried, turn, 0x5a);
    id
}

/// The orders to a guest with the word `grow=`, given by its generation id.
///
/// The guest has 8,192 slots: each is a block, spread over the first disk, and a page, from 32 MiB
/// on. It stores in memory which seed wrote a slot last, so a snapshot's memory shows what the
/// snapshot's disk must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// Write COUNT slots, some of them perhaps twice, and print `grown SEED`. The seed is not 0.
    Grow(u32),
    /// Write slots without end, each with the next seed from this one on, after the line
    /// `churning`.
    Churn(u32),
    /// Do nothing but print `grown 0`.
    Idle,
    /// Read all slots and print `found N`, the number of slots ever written; or print `failed: WHY,
    /// slot N` and halt.
    Look,
}

impl Growth {
    /// The generation id of this order.
    #[must_use]
    pub fn generation(self) -> [u8; 16] {
        let mut id = [0; 16];
        let (seed, what) = match self {
            Self::Grow(seed) => (seed, b'g'),
            Self::Churn(seed) => (seed, b'c'),
            Self::Idle => (0, b'i'),
            Self::Look => (0, b'l'),
        };
        id[..4].copy_from_slice(&seed.to_le_bytes());
        id[4] = what;
        id[8..].copy_from_slice(b"DFChain\n");
        id
    }
}

/// The line that `sort=SEED:KEYS` prints. It is computed here by other means: keys that are sorted
/// but are not those of the seed have another digest.
#[must_use]
pub fn sorted(seed: u64, keys: usize) -> String {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut made: Vec<u64> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 32
    })
    .take(keys)
    .collect();
    made.sort_unstable();
    let digest = made.iter().fold(0u64, |digest, key| digest.wrapping_mul(31).wrapping_add(*key));
    format!("sorted {keys:x} digest {digest:x}\n")
}
