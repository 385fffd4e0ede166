//! The phases of a VM, and which event each of them accepts, decided without I/O.
//!
//! ```text
//!   reserve            Ready             Freeze
//!  ────────▶ Starting ───────▶ Running ─────────▶ Freezing
//!               │               │ ▲ ▲ ◀─────────── │
//!               │         Pause │ │ │     Thaw     │
//!               │               ▼ │                │
//!               │            Paused  Unpause       │
//!               │               │                  │
//!               └────────┬──────┴──────────────────┘
//!                        │ Die
//!                        ▼        Remove
//!                      Exited ───────────▶ (gone)
//! ```
//!
//! `Fork` leads from `Running` to `Forking`, and `Thaw` leads back. Clients see `Forking` as
//! `Running`, but it accepts no pause, no snapshot and no fork. Such requests usually wait for a
//! lock of the VM ([`crate::vm`]), so they find the phase after the fork.
//!
//! `Unknown` is the phase of a VM that this daemon cannot adopt ([`crate::vm::survey`]). It accepts
//! only `Die`.
//!
//! A mutex guards each [`Phase`]. The task whose event is accepted then does the work. A removal
//! needs no event. While a snapshot is taken the VM is `Freezing`: clients see it as paused, and no
//! other task may stop or start its vCPUs.

use crate::base::error::ApiError;
use dayfly_api::types::{ErrorCode, PauseReason, VmState};

/// The phase of a VM's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Reserved; its process or its guest is not ready yet.
    Starting,
    /// Its agent has its identity.
    Running,
    /// Its vCPUs are stopped on request.
    Paused,
    /// A snapshot is being taken of it.
    Freezing,
    /// It is being forked; its guest runs, except for a moment.
    Forking,
    /// Its process is gone.
    Exited,
    /// Its VMM lives, and this daemon cannot adopt the VM. It is never in a record.
    #[serde(skip)]
    Unknown,
}

/// A request to a VM, or something that happens to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Its agent has its identity.
    Ready,
    /// Stop its vCPUs.
    Pause,
    /// Start its vCPUs again.
    Unpause,
    /// A snapshot begins.
    Freeze,
    /// A fork begins.
    Fork,
    /// A snapshot or a fork ended, successfully or not, and the VM runs.
    Thaw,
    /// Its process is gone.
    Die,
}

/// An event that the phase does not accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cannot {what} a VM that is {phase}: it must be {needs}")]
pub struct Refused {
    what: &'static str,
    phase: Phase,
    needs: &'static str,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Freezing => "being snapshotted",
            Self::Forking => "being forked",
            Self::Exited => "exited",
            Self::Unknown => "in an unknown state",
        })
    }
}

impl Phase {
    /// The phase after `event`.
    ///
    /// # Errors
    /// [`Refused`] if the drawing above has no such arrow. `Pause` of a paused VM, `Unpause` of a
    /// running one and `Die` of an exited one are accepted and change nothing.
    pub fn after(self, event: Event) -> Result<Self, Refused> {
        use Phase::{Exited, Forking, Freezing, Paused, Running, Starting};
        let refused = |what, needs| Err(Refused { what, phase: self, needs });
        match (event, self) {
            (Event::Ready, Starting) => Ok(Running),
            (Event::Ready, _) => refused("start", "starting"),
            (Event::Pause, Running | Paused) => Ok(Paused),
            (Event::Pause, _) => refused("pause", "running"),
            (Event::Unpause, Running | Paused) => Ok(Running),
            (Event::Unpause, _) => refused("unpause", "paused"),
            (Event::Freeze, Running) => Ok(Freezing),
            (Event::Freeze, _) => refused("snapshot", "running"),
            (Event::Fork, Running) => Ok(Forking),
            (Event::Fork, _) => refused("fork", "running"),
            (Event::Thaw, Freezing | Forking) => Ok(Running),
            (Event::Thaw, _) => refused("go on with", "being snapshotted or forked"),
            (Event::Die, _) => Ok(Exited),
        }
    }

    /// Whether the VM has a process, or will have one.
    #[must_use]
    pub fn alive(self) -> bool {
        self != Self::Exited
    }

    /// Checks that the agent serves requests.
    ///
    /// # Errors
    /// [`Refused`] unless the VM runs or is being forked.
    pub fn serves(self, what: &'static str) -> Result<(), Refused> {
        if matches!(self, Self::Running | Self::Forking) {
            Ok(())
        } else {
            Err(Refused { what, phase: self, needs: "running" })
        }
    }

    /// Why clients see the VM as paused, with `stalled` as for [`Self::shown`].
    #[must_use]
    pub fn paused_for(self, stalled: bool) -> Option<PauseReason> {
        match self {
            Self::Paused => Some(PauseReason::Request),
            Self::Freezing => Some(PauseReason::Snapshot),
            Self::Running | Self::Forking if stalled => Some(PauseReason::NoSpace),
            _ => None,
        }
    }

    /// The state that clients see. `stalled`: its VMM has stopped it, because a disk waits for
    /// space.
    #[must_use]
    pub fn shown(self, stalled: bool) -> VmState {
        match self {
            Self::Starting => VmState::Starting,
            Self::Running | Self::Forking if stalled => VmState::Paused,
            Self::Running | Self::Forking => VmState::Running,
            Self::Paused | Self::Freezing => VmState::Paused,
            Self::Exited => VmState::Exited,
            Self::Unknown => VmState::Unknown,
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        Self::new(ErrorCode::State, refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [Event; 7] = [
        Event::Ready,
        Event::Pause,
        Event::Unpause,
        Event::Freeze,
        Event::Fork,
        Event::Thaw,
        Event::Die,
    ];

    /// The model: three independent facts from which the phase follows.
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Model {
        dead: bool,
        ready: bool,
        vcpus_held_by: Option<Event>,
    }

    impl Model {
        /// The next state; `None` if the event must be refused.
        fn next(self, event: Event) -> Option<Self> {
            if event == Event::Die {
                return Some(Self { dead: true, ..self });
            }
            if self.dead || self.ready == (event == Event::Ready) {
                return None;
            }
            let held = |vcpus_held_by| Some(Self { vcpus_held_by, ..self });
            match (event, self.vcpus_held_by) {
                (Event::Ready, _) => Some(Self { ready: true, ..self }),
                (Event::Pause, None | Some(Event::Pause)) => held(Some(Event::Pause)),
                (Event::Unpause, None | Some(Event::Pause)) => held(None),
                (Event::Freeze | Event::Fork, None) => held(Some(event)),
                (Event::Thaw, Some(Event::Freeze | Event::Fork)) => held(None),
                _ => None,
            }
        }

        fn phase(self) -> Phase {
            match self {
                Self { dead: true, .. } => Phase::Exited,
                Self { ready: false, .. } => Phase::Starting,
                Self { vcpus_held_by: None, .. } => Phase::Running,
                Self { vcpus_held_by: Some(Event::Freeze), .. } => Phase::Freezing,
                Self { vcpus_held_by: Some(Event::Fork), .. } => Phase::Forking,
                Self { .. } => Phase::Paused,
            }
        }
    }

    proptest! {
        #[test]
        fn any_order_of_events_agrees_with_the_model(
            events in proptest::collection::vec(0..EVENTS.len(), 0..40),
        ) {
            let mut model = Model { dead: false, ready: false, vcpus_held_by: None };
            let mut phase = Phase::Starting;
            for event in events.into_iter().map(|i| EVENTS[i]) {
                match (phase.after(event), model.next(event)) {
                    (Ok(p), Some(m)) => (phase, model) = (p, m),
                    (Err(_), None) => {}
                    (p, m) => {
                        prop_assert!(false, "{event:?} in {phase}: {p:?}, the model says {m:?}");
                    }
                }
                prop_assert_eq!(phase, model.phase());
                let runs = phase.shown(false) == VmState::Running;
                prop_assert_eq!(phase.serves("exec").is_ok(), runs);
                for stalled in [false, true] {
                    let paused = phase.shown(stalled) == VmState::Paused;
                    prop_assert_eq!(phase.paused_for(stalled).is_some(), paused);
                }
                prop_assert_eq!(phase.alive(), !model.dead);
            }
        }
    }

    #[test]
    fn a_vm_in_an_unknown_state_can_only_end() {
        for event in EVENTS {
            let after = Phase::Unknown.after(event);
            assert_eq!(after.ok(), (event == Event::Die).then_some(Phase::Exited), "{event:?}");
        }
        assert!(Phase::Unknown.alive() && Phase::Unknown.serves("exec").is_err());
        assert!(serde_json::from_str::<Phase>("\"unknown\"").is_err(), "no record has it");
    }

    #[test]
    fn a_refusal_says_what_was_expected_and_found() {
        let refused = Phase::Paused.after(Event::Freeze).unwrap_err();
        assert_eq!(refused.to_string(), "cannot snapshot a VM that is paused: it must be running");
    }
}
