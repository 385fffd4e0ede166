//! What a VM waits for: its VMM's answer to this daemon, or space for a disk; and its share of the
//! disk.

use crate::base::error::{ApiError, Outcome};
use crate::vm::Vm;
use crate::vm::space::Share;
use dayfly_api::types::ErrorCode;
use dayfly_units::sync::lock;
use dayfly_vmm::control::NoSpace;

impl Vm {
    /// Checks that its VMM has answered this daemon, before a command for the VMM.
    ///
    /// # Errors
    /// [`ErrorCode::State`] with the reason.
    pub fn answers(&self) -> Outcome<()> {
        let Some(why) = self.waiting.borrow().clone() else { return Ok(()) };
        Err(ApiError::new(
            ErrorCode::State,
            format_args!(
                "VM {}: its VMM has not answered this daemon yet, which asks it again: {why}; try \
                 later, or remove the VM with force",
                self.name
            ),
        ))
    }

    /// Keeps the share until the VM ends.
    pub fn keep_share(&self, share: Share) {
        let live = lock(&self.live);
        if live.phase.alive() {
            lock(&self.space).share = Some(share);
        }
    }

    /// Whether the VM has a share.
    #[must_use]
    pub fn has_share(&self) -> bool {
        lock(&self.space).share.is_some()
    }

    /// Why its VMM has stopped it; `None`: it has not.
    #[must_use]
    pub fn no_space(&self) -> Option<NoSpace> {
        lock(&self.space).no_space
    }

    /// Notes why its VMM has stopped it. Returns what was noted before.
    pub fn note_no_space(&self, why: Option<NoSpace>) -> Option<NoSpace> {
        let live = lock(&self.live);
        let why = why.filter(|_| live.phase.alive());
        std::mem::replace(&mut lock(&self.space).no_space, why)
    }

    /// Why it does not go on; `None`: it does, or it was stopped on request.
    #[must_use]
    pub fn stalled(&self) -> Option<String> {
        let space = lock(&self.space);
        space.no_space.map(|why| match &space.share {
            Some(share) => share.0.explain(why),
            None => "no space".to_owned(),
        })
    }

    /// Checks that the VM does not wait for space, because its guest then serves no request.
    ///
    /// # Errors
    /// [`ErrorCode::State`] with the reason.
    pub fn has_space(&self, what: &'static str) -> Result<(), ApiError> {
        let Some(why) = self.stalled() else { return Ok(()) };
        let name = &self.name;
        Err(ApiError::new(
            ErrorCode::State,
            format_args!("cannot {what} VM {name}, which is paused: {why}"),
        ))
    }

    /// Checks that its guest serves requests.
    ///
    /// # Errors
    /// It does not run, or it waits for space.
    pub fn serves(&self, what: &'static str) -> Result<(), ApiError> {
        self.phase().serves(what)?;
        self.has_space(what)
    }
}
