//! Colours: what a frame is used for (Kaleidoscope, sections 4.1 and 4.2).

use std::fmt;

/// What a frame is used for. The numbers are stored in snapshots: they never change, new ones are added at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Colour {
    /// Nothing is known.
    Unknown = 0,
    /// Nobody needs its contents: free, or given back to the host by a balloon.
    Free = 1,
    /// The kernel can execute it.
    KernelCode = 2,
    /// The kernel's, otherwise.
    KernelData = 3,
    /// The page cache's, and a process can execute it.
    UserCode = 4,
    /// Anonymous memory of processes, huge pages.
    UserData = 5,
    /// The page cache's, otherwise.
    PageCache = 6,
    /// A page table.
    PageTable = 7,
    /// Small objects of the kernel.
    Slab = 8,
}

impl Colour {
    /// All colours, by their numbers.
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

    /// The colour with that number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u8 {
        self as u8
    }

    /// Its name.
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
