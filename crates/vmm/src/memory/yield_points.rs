//! Points of a long copy at which the control thread may look at its connections.
//!
//! One thread copies RAM and serves the control socket. A new daemon asks each VMM for its status,
//! and must not take a VMM that copies for one that hangs.

use std::fmt;

/// Bytes between two points.
const BETWEEN: u64 = 8 << 20;

/// What is called at the points of one operation.
pub struct YieldPoints<'a> {
    act: Option<&'a mut dyn FnMut()>,
    /// Bytes until the next point.
    left: u64,
}

impl fmt::Debug for YieldPoints<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("YieldPoints").field("left", &self.left).finish_non_exhaustive()
    }
}

impl<'a> YieldPoints<'a> {
    /// Points at which `act` is called.
    pub fn new(act: &'a mut dyn FnMut()) -> Self {
        Self { act: Some(act), left: BETWEEN }
    }

    /// No points: for an operation that is short, or during which nothing is served.
    #[must_use]
    pub const fn none() -> Self {
        Self { act: None, left: BETWEEN }
    }

    /// A point after another `bytes` bytes were read or copied, if enough have been since the last.
    pub fn after(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
        if self.left == 0 {
            self.now();
        }
    }

    /// A point.
    pub fn now(&mut self) {
        self.left = BETWEEN;
        if let Some(act) = &mut self.act {
            act();
        }
    }
}
