//! Whose file it is, on the host and in the guest.
//!
//! The server acts as the caller only, so every file that a guest makes belongs to the caller. The
//! guest sees the caller's files as those of its root.

/// The id that is shown for all other users and groups of the host (overflowuid).
pub const OTHERS: u32 = 65_534;

/// The user or the group of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id(pub u32);

impl Id {
    /// The id that the guest sees for `host`.
    #[must_use]
    pub const fn shown(self, host: u32) -> u32 {
        match (self.0, host) {
            // Root shares its folder as it is.
            (0, host) => host,
            (caller, host) if caller == host => 0,
            _ => OTHERS,
        }
    }

    /// The host's id for one that the guest gives a file. `None`: the caller cannot give it that.
    #[must_use]
    pub const fn given(self, guest: u32) -> Option<u32> {
        match (self.0, guest) {
            (0, guest) => Some(guest),
            (caller, 0) => Some(caller),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_is_the_root_of_the_guest() {
        let (user, root) = (Id(1000), Id(0));
        assert_eq!((user.shown(1000), user.shown(0), user.shown(33)), (0, OTHERS, OTHERS));
        assert_eq!((user.given(0), user.given(1000), user.given(OTHERS)), (Some(1000), None, None));
        assert_eq!((root.shown(0), root.shown(33), root.given(33)), (0, 33, Some(33)));
    }
}
