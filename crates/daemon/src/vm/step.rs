//! The steps of a birth: an error names the one that failed, and tests let each fail.

use crate::error::Fault;
#[cfg(test)]
use crate::error::Outcome;

/// A step of a birth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The snapshot, or the image and the kernel, verified and open.
    Source,
    /// Memory reserved.
    Memory,
    /// An address, and ports of the host.
    Network,
    /// Name, id and slot reserved.
    Name,
    /// There is a VMM, and what its guest needs.
    Vmm,
    /// The guest runs.
    Guest,
    /// Its agent is there and knows who it is.
    Identity,
}

impl Step {
    /// What was being done, for an error.
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

    /// Names this step in an error.
    pub fn failed<E>(self) -> impl FnOnce(E) -> Fault
    where
        Fault: From<E>,
    {
        move |error| Fault::from(error).during(self.text())
    }
}

/// Says that `step` was done for the VM called `name`. In tests that may fail.
#[cfg(not(test))]
#[expect(clippy::unnecessary_wraps, reason = "it fails in tests")]
pub(super) const fn done(_step: Step, _name: Option<&dayfly_units::Name>) -> Result<(), Fault> {
    Ok(())
}

#[cfg(test)]
pub(super) use injected::done;

#[cfg(test)]
pub(super) mod injected {
    //! Failures on order: of the VM with a certain name, after a certain step.

    use super::{Fault, Outcome, Step};
    use dayfly_api::types::ErrorCode;
    use dayfly_units::Name;
    use std::sync::Mutex;

    static ORDERED: Mutex<Vec<(Name, Step)>> = Mutex::new(Vec::new());

    /// The next VM called `name` fails after `step`.
    pub(crate) fn order(name: &Name, step: Step) {
        ORDERED.lock().unwrap().push((name.clone(), step));
    }

    pub(in crate::vm) fn done(step: Step, name: Option<&Name>) -> Outcome<()> {
        let mut ordered = ORDERED.lock().unwrap();
        let place = ordered.iter().position(|(n, s)| Some(n) == name && *s == step);
        match place {
            None => Ok(()),
            Some(place) => {
                ordered.remove(place);
                Err(Fault::new(ErrorCode::Internal, "on purpose").during(step.text()))
            }
        }
    }
}
