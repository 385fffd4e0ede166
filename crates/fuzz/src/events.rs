//! An input as a sequence of events: numbers and bytes taken from its front.

/// What is left of an input. Each function returns `None` at its end.
#[derive(Debug)]
pub struct Events<'a> {
    rest: &'a [u8],
}

impl<'a> Events<'a> {
    /// All of `input`.
    #[must_use]
    pub const fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }

    /// A byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Two bytes, little-endian, as all numbers.
    pub fn word(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    /// Four bytes.
    pub fn long(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Eight bytes.
    pub fn quad(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A byte that chooses one of `all`.
    pub fn one<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        let byte = usize::from(self.byte()?);
        all.get(byte % all.len().max(1)).copied()
    }

    /// A byte that says how many bytes follow, and these bytes or those that are left.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = usize::from(self.byte()?).min(self.rest.len());
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        Some(taken)
    }

    /// Everything that is left.
    #[must_use]
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }
}
