//! Colours: the uses of a frame (Kaleidoscope, sections 4.1 and 4.2).

use std::fmt;

/// The use of a frame. Snapshots store the numbers, so a number never changes, and a new colour
/// gets the next number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Colour {
    /// The use is not known.
    Unknown = 0,
    /// The content is not needed: the frame is free, or a balloon gave it back to the host.
    Free = 1,
    /// The kernel can execute the frame.
    KernelCode = 2,
    /// Other memory of the kernel.
    KernelData = 3,
    /// Page cache that a process can execute.
    UserCode = 4,
    /// Anonymous memory of processes, and huge pages.
    UserData = 5,
    /// Other page cache.
    PageCache = 6,
    /// A page table.
    PageTable = 7,
    /// Small objects of the kernel.
    Slab = 8,
}

impl Colour {
    /// All colours, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Unknown,
        Self::Free,
        Self::KernelCode,
        Self::KernelData,
        Self::UserCode,
        Self::UserData,
        Self::PageCache,
        Self::PageTable,
        Self::Slab,
    ];

    /// The colour with this number; `None` if there is none.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The stored number.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Free => "free",
            Self::KernelCode => "kernel code",
            Self::KernelData => "kernel data",
            Self::UserCode => "user code",
            Self::UserData => "user data",
            Self::PageCache => "page cache",
            Self::PageTable => "page tables",
            Self::Slab => "slab",
        }
    }
}

impl fmt::Display for Colour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_snapshots_have() {
        let stored = [
            (0, "unknown"),
            (1, "free"),
            (2, "kernel code"),
            (3, "kernel data"),
            (4, "user code"),
            (5, "user data"),
            (6, "page cache"),
            (7, "page tables"),
            (8, "slab"),
        ];
        for (number, name) in stored {
            let colour = Colour::from_number(number).unwrap();
            assert_eq!((colour.number(), colour.name()), (number, name));
        }
        assert_eq!(Colour::from_number(9), None);
    }
}
