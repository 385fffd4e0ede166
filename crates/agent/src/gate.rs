//! Whether a request may be served now.
//!
//! ```text
//!            Seal                    Identity
//!   Open ───────────▶ Sealed ──────────────────▶ Becoming ──▶ Open    (every step was done)
//!     │                  ▲                          │
//!     │                  └──────────────────────────┘                 (a step failed)
//!     └── Identity ──▶ Becoming
//! ```
//!
//! A snapshot is taken while `Sealed`, so a clone starts in that state and serves only `Ping` and
//! `Identity`. While `Becoming`, the machine has parts of two identities: only `Ping` is served,
//! not even a second `Identity`. The decision does no I/O; [`crate::server`] acts on it.

use dayfly_api::agent::{Failure, FailureCode, Request};

/// The state of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Every request is served.
    Open,
    /// The agent waits for an identity.
    Sealed,
    /// An identity is being taken on.
    Becoming,
}

/// The kinds of requests that the gate distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// [`Request::Ping`].
    Ping,
    /// [`Request::Seal`].
    Seal,
    /// [`Request::Identity`].
    Identity,
    /// Any other request.
    Work,
}

impl From<&Request> for Wish {
    fn from(request: &Request) -> Self {
        match request {
            Request::Ping => Self::Ping,
            Request::Seal => Self::Seal,
            Request::Identity(_) => Self::Identity,
            Request::Exec(_)
            | Request::ReadArchive { .. }
            | Request::WriteArchive { .. }
            | Request::Log { .. }
            | Request::Programs
            | Request::SignalProgram { .. }
            | Request::WaitForProgram { .. }
            | Request::ForgetProgram { .. }
            | Request::Mount { .. }
            | Request::Stat
            | Request::Fork
            | Request::Forked
            | Request::Shutdown { .. } => Self::Work,
        }
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The agent waits for an identity.
    #[error("the agent is sealed: expected an identity first")]
    Sealed,
    /// Another request's identity is being taken on.
    #[error("the agent is taking on an identity: expected nothing but a ping until that is done")]
    Becoming,
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self { code: FailureCode::Sealed, message: refusal.to_string() }
    }
}

/// The state with its transitions.
#[derive(Debug)]
pub struct Gate {
    state: State,
}

impl Gate {
    /// An open gate, as after a cold boot.
    #[must_use]
    pub const fn open() -> Self {
        Self { state: State::Open }
    }

    /// The state.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Whether work is refused.
    #[must_use]
    pub const fn sealed(&self) -> bool {
        !matches!(self.state, State::Open)
    }

    /// Asks whether `wish` may be served, and changes the state. After `Ok` for [`Wish::Identity`]
    /// the caller must call [`Gate::became`].
    ///
    /// # Errors
    /// [`Refusal`]; the state has not changed.
    pub const fn ask(&mut self, wish: Wish) -> Result<(), Refusal> {
        match (self.state, wish) {
            (_, Wish::Ping) | (State::Open, Wish::Work) => Ok(()),
            (State::Open, Wish::Seal) => {
                self.state = State::Sealed;
                Ok(())
            }
            (State::Open | State::Sealed, Wish::Identity) => {
                self.state = State::Becoming;
                Ok(())
            }
            (State::Sealed, Wish::Seal | Wish::Work) => Err(Refusal::Sealed),
            (State::Becoming, Wish::Seal | Wish::Identity | Wish::Work) => Err(Refusal::Becoming),
        }
    }

    /// Opens a sealed gate, if the snapshot after the seal does not take place.
    pub const fn unseal(&mut self) {
        if matches!(self.state, State::Sealed) {
            self.state = State::Open;
        }
    }

    /// Ends `Becoming`: the identity was taken on (`done`), or a step failed.
    pub const fn became(&mut self, done: bool) {
        if matches!(self.state, State::Becoming) {
            self.state = if done { State::Open } else { State::Sealed };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Ask(Wish),
        Became(bool),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let one = prop_oneof![
            Just(Step::Ask(Wish::Ping)),
            Just(Step::Ask(Wish::Seal)),
            Just(Step::Ask(Wish::Identity)),
            Just(Step::Ask(Wish::Work)),
            any::<bool>().prop_map(Step::Became),
        ];
        proptest::collection::vec(one, 0..60)
    }

    proptest! {
        /// The model is the history of granted requests. Work is served exactly if no seal was
        /// granted and no identity begun since the last successful identity (or since boot).
        #[test]
        fn work_is_served_only_after_an_identity_that_ended_well(steps in steps()) {
            let mut gate = Gate::open();
            let mut granted: Vec<Step> = Vec::new();
            for step in steps {
                let since = granted
                    .iter()
                    .rposition(|s| matches!(s, Step::Became(true)))
                    .map_or(0, |i| i + 1);
                let recent = &granted[since..];
                let began = recent.iter().rposition(|s| matches!(s, Step::Ask(Wish::Identity)));
                let ended = recent.iter().rposition(|s| matches!(s, Step::Became(_)));
                let becoming = began.is_some() && ended < began;
                let closed =
                    recent.iter().any(|s| matches!(s, Step::Ask(Wish::Seal | Wish::Identity)));
                let expected = match step {
                    Step::Ask(Wish::Ping) => true,
                    Step::Ask(Wish::Identity) => !becoming,
                    Step::Ask(Wish::Seal | Wish::Work) => !closed,
                    Step::Became(_) => becoming,
                };
                match step {
                    Step::Ask(wish) => {
                        let granted_now = gate.ask(wish).is_ok();
                        prop_assert_eq!(granted_now, expected, "{:?} after {:?}", step, granted);
                    }
                    Step::Became(done) => gate.became(done),
                }
                if expected {
                    granted.push(step);
                }
            }
        }
    }
}
