//! Guests that the emulation of KVM crashes (docs/lab-notes), and that are made again.

use crate::prelude::*;
use dayfly_cli::progress::Steps;
use std::sync::Arc;

/// How many were lost, and how many may be.
#[derive(Debug, Clone)]
pub struct Losses {
    /// What is being done, on the terminal.
    pub steps: Arc<Steps>,
    /// Guests that were lost so far.
    pub count: usize,
    /// On the host's own KVM none may be lost.
    most: usize,
}

impl Losses {
    /// None yet. `emulated`: KVM is not the host's own, so up to `most` guests may be lost.
    pub const fn new(steps: Arc<Steps>, emulated: bool, most: usize) -> Self {
        Self { steps, count: 0, most: if emulated { most } else { 0 } }
    }

    /// What `make` returns; if its guest is lost, it is made again.
    ///
    /// # Errors
    /// As for [`Self::again`].
    pub async fn kept<T>(&mut self, what: &str, make: impl AsyncFn() -> Result<T>) -> Result<T> {
        loop {
            match make().await {
                Ok(made) => return Ok(made),
                Err(why) => self.again(what, why)?,
            }
        }
    }

    /// Counts a guest as lost, which is then made again. The terminal shows `why`.
    ///
    /// # Errors
    /// `why`, if no more may be lost.
    pub fn again(&mut self, what: &str, why: anyhow::Error) -> Result<()> {
        if self.count >= self.most {
            return Err(why.context(what.to_owned()));
        }
        self.count += 1;
        self.steps.say(&format!("{what}: the emulation lost the guest, making it again: {why:#}"));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_guest_of_the_host_s_own_kvm_may_be_lost() {
        let lost = || anyhow::anyhow!("crashed");
        let steps = Arc::new(Steps::new());
        assert!(Losses::new(steps.clone(), false, 2).again("a boot", lost()).is_err());
        let mut emulated = Losses::new(steps, true, 2);
        assert!(
            emulated.again("a boot", lost()).is_ok() && emulated.again("a boot", lost()).is_ok()
        );
        assert_eq!(
            format!("{:#}", emulated.again("a boot", lost()).unwrap_err()),
            "a boot: crashed"
        );
        assert_eq!(emulated.count, 2);
    }
}
