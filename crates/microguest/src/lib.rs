//! # microguest
//!
//! A guest of a few hundred instructions that needs nothing but a CPU in 64-bit long mode, RAM and a serial port. It
//! starts like a vmlinux and obeys the words of its command line, so that the VMM's tests run on any `/dev/kvm`, even
//! one that emulates every instruction (about two million a second).
//!
//! What may not enter: anything that needs interrupts or SSE; stock kernels test those.
//!
//! | word | what it does |
//! |---|---|
//! | `say=TEXT` | prints TEXT |
//! | `fill=SEED:PAGES` | writes SEED's pattern to pages from 32 MiB on, verifies it (numbers in hexadecimal) |
//! | `verify=SEED:PAGES` | prints `verify ok seed SEED` or `verify bad page N` |
//! | `grow=ADDR:COUNT:SEEDS` | grows ([`Growth`]) with the seeds 1 to SEEDS, prints `ready`, waits as `until` does, and obeys the generation id, over and over; an id that is no [`Growth`] halts it |
//! | `rings=ADDR:CPUS` | starts the other vCPUs, prints `writing`, and all of them write numbered pages, the first one blocks too, until the generation id at ADDR changes; then each looks whether what it wrote is there, all of it and nothing else; prints `rings ok N`, or `rings wrong: WHY`, and goes on where the id is that of [`Growth::Churn`] |
//! | `touch=PAGES` | writes one word to each of PAGES pages from 32 MiB on, jumping over the hole below 4 GiB; at most 11 GiB of RAM |
//! | `sort=SEED:KEYS` | makes KEYS 32-bit integers from SEED, sorts them, looks through them, and prints the line of [`sorted`] or `sort wrong at N` |
//! | `born=ADDR` | as `until`, and then halts: the least that a clone can do |
//! | `until=ADDR` | prints `ready`, waits until the VM generation id at ADDR changes, whatever to, writes to port 0x80 and goes on with the next word |
//! | `count` | prints `count N` now and then, for ever |
//! | `work=PAGES:TURNS` | writes one word to each of PAGES pages from 32 MiB on, over and over, and prints a dot whenever it has done so TURNS times; for ever |
//! | `wait=ADDR` | prints `ready`, counts until the VM generation id at ADDR changes, then obeys it ([`orders`]), over and over |
//! | `end=HOW` | ends the VM, see [`End`] |
//!
//! After the last word it prints `done` and halts with interrupts off.

/// How the guest ends its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum End {
    /// Not at all: counts on.
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

/// The guest as an ELF that boots like a vmlinux.
#[must_use]
pub fn elf() -> &'static [u8] {
    include_bytes!(concat!(env!("OUT_DIR"), "/microguest.elf"))
}

/// A VM generation id that tells a waiting guest what to do: verify the pages it filled, fill them with `seed`'s
/// pattern, verify that, print `obeyed SEED`, then end as `end` says.
#[must_use]
pub fn orders(seed: u32, end: End) -> [u8; 16] {
    let mut id = [0; 16];
    id[..4].copy_from_slice(&seed.to_le_bytes());
    id[4] = end as u8;
    id[15] = 0x5a;
    id
}

/// What a guest with the word `grow=` is told by its generation id.
///
/// It knows 8,192 slots: a block each, spread over the first disk, and a page each, from 32 MiB on. Which seed wrote a slot last it
/// remembers in its memory, so that a snapshot's memory tells what the snapshot's disk must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// Write COUNT slots, some of them perhaps twice, and print `grown SEED`. The seed is not 0.
    Grow(u32),
    /// Write slots without end, each with the next seed from this on, after the line `churning`.
    Churn(u32),
    /// Do nothing but print `grown 0`.
    Idle,
    /// Read all slots, and print `found N`, how many were ever written, or `failed: WHY, slot N` and halt.
    Look,
}

impl Growth {
    /// The generation id that says it.
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

/// The line that `sort=SEED:KEYS` prints. Computed here by other means: keys that are in order but are not those of the seed have
/// another digest.
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
