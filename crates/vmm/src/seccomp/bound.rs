//! Bounds of one argument of a system call.

/// How many bits of an argument the kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// The kernel takes an `int` and ignores the high half.
    Bits32,
    /// The kernel takes a `long`.
    Bits64,
}

/// The bits of `mask` in an argument equal those of `value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Index of the argument, from 0.
    pub argument: u8,
    /// How much of the argument is compared.
    pub width: Width,
    /// The compared bits.
    pub mask: u64,
    /// Their value; other bits are zero.
    pub value: u64,
}

impl Bound {
    /// Whether `arguments` are within this bound.
    #[must_use]
    pub fn holds(&self, arguments: &[u64; 6]) -> bool {
        let argument = arguments.get(usize::from(self.argument)).copied().unwrap_or(0);
        argument & self.mask == self.value
    }
}

/// The `int` argument is `value`.
pub(super) const fn low(argument: u8, value: u32) -> Bound {
    let (mask, value) = (u32::MAX as u64, value as u64);
    Bound { argument, width: Width::Bits32, mask, value }
}

/// The bits of `mask` in the `int` argument are `value`.
pub(super) const fn low_bits(argument: u8, mask: u32, value: u32) -> Bound {
    let (mask, value) = (mask as u64, value as u64);
    Bound { argument, width: Width::Bits32, mask, value }
}

/// The `long` argument is `value`.
pub(super) const fn all(argument: u8, value: u64) -> Bound {
    Bound { argument, width: Width::Bits64, mask: u64::MAX, value }
}

/// The bits of `mask` in the `long` argument are `value`.
pub(super) const fn bits(argument: u8, mask: u64, value: u64) -> Bound {
    Bound { argument, width: Width::Bits64, mask, value }
}
