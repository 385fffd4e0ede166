//! The steps of creating a VM. An error names the step that failed, and tests let each step fail.

use crate::base::error::ApiError;
#[cfg(test)]
use crate::base::error::Outcome;
use dayfly_units::{Name, failpoint};

/// A step of creating a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The snapshot, or the image and the kernel, is verified and open.
    Source,
    /// Memory is reserved.
    Memory,
    /// An address and the host's ports are allocated.
    Network,
    /// Name, id and slot are reserved.
    Name,
    /// A VMM exists, with the files that its guest needs.
    Vmm,
    /// The guest runs.
    Guest,
    /// The agent answered and has its identity.
    Identity,
}

impl Step {
    /// The text for an error message.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Source => "opening the source",
            Self::Memory => "reserving memory",
            Self::Network => "giving it an address",
            Self::Name => "reserving the name",
            Self::Vmm => "starting the VMM",
            Self::Guest => "starting the guest",
            Self::Identity => "giving the guest its identity",
        }
    }

    /// Adds this step to an error.
    pub fn failed<E>(self) -> impl FnOnce(E) -> ApiError
    where
        ApiError: From<E>,
    {
        move |error| ApiError::from(error).during(self.text())
    }
}

/// Marks `step` as done for the VM called `name`. It can fail only in tests.
#[cfg_attr(not(test), expect(clippy::unnecessary_wraps, reason = "it fails in tests"))]
pub(crate) fn done(step: Step, name: Option<&Name>) -> Result<(), ApiError> {
    match step {
        Step::Source => failpoint::reached("daemon.create.source"),
        Step::Memory => failpoint::reached("daemon.create.memory"),
        Step::Network => failpoint::reached("daemon.create.network"),
        Step::Name => failpoint::reached("daemon.create.name"),
        Step::Vmm => failpoint::reached("daemon.create.vmm"),
        Step::Guest => failpoint::reached("daemon.create.guest"),
        Step::Identity => failpoint::reached("daemon.create.identity"),
    }
    #[cfg(test)]
    injected::done(step, name)?;
    #[cfg(not(test))]
    let _only_tests_choose_by_name = name;
    Ok(())
}

#[cfg(test)]
pub(crate) mod injected {
    //! Injected failures: the VM with a given name fails after a given step.

    use crate::model::step::{ApiError, Name, Outcome, Step};
    use dayfly_api::types::ErrorCode;
    use dayfly_units::VmName;
    use std::sync::Mutex;

    static ORDERED: Mutex<Vec<(Name, Step)>> = Mutex::new(Vec::new());

    /// The next VM called `name` fails after `step`.
    pub(crate) fn order(name: &VmName, step: Step) {
        ORDERED.lock().unwrap().push((name.clone().into(), step));
    }

    pub(crate) fn done(step: Step, name: Option<&Name>) -> Outcome<()> {
        let mut ordered = ORDERED.lock().unwrap();
        let place = ordered.iter().position(|(n, s)| Some(n) == name && *s == step);
        match place {
            None => Ok(()),
            Some(place) => {
                ordered.remove(place);
                Err(ApiError::new(ErrorCode::Internal, "on purpose").during(step.text()))
            }
        }
    }
}
