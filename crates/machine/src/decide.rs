//! What a command does with the machine that it finds. [`decide`] does no I/O.
//!
//! The end of a machine ends all VMs in it. So a command ends a running machine only if no VM lives
//! in it, or if the user asked for that (`dayfly machine restart`). A machine that does not answer
//! may hold VMs, because no other witness knows.

/// What a command wants of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A running machine that serves.
    Use,
    /// A machine of this installation's programs, started anew.
    Restart,
}

/// Whether a running machine may be ended although VMs live in it, or may live in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consent {
    /// The user has agreed already (`--force`).
    Given,
    /// The user is at a terminal and can be asked.
    Ask,
    /// There is no terminal.
    None,
}

/// The machine that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// No machine runs.
    Down,
    /// The machine never became ready, so its daemon has served no request.
    NeverReady,
    /// The machine answers. `vms` live in it; `None` if its daemon did not say.
    Ready {
        /// Number of VMs.
        vms: Option<u64>,
    },
    /// The machine answers, its daemon does not.
    DaemonSilent,
    /// The machine does not answer.
    Silent,
    /// QEMU has stopped the machine, because this host's disk is full.
    Paused,
}

/// What to do with the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Start it.
    Boot,
    /// Use it as it is.
    Serve,
    /// Use it as it is, and say that it runs older programs.
    ServeOutdated,
    /// End it and start it again.
    Replace,
    /// Ask the user, and then [`Action::Replace`] or [`Action::Refuse`].
    Ask,
    /// Leave it, and report the next step.
    Refuse,
}

/// Decides what to do with `found`, whose programs or settings differ from the wanted ones if
/// `differs`.
#[must_use]
pub fn decide(found: Found, differs: bool, purpose: Purpose, consent: Consent) -> Action {
    match (found, purpose) {
        (Found::Down, _) => Action::Boot,
        (Found::NeverReady, _) | (Found::Ready { vms: Some(0) }, Purpose::Restart) => {
            Action::Replace
        }
        (Found::Ready { .. }, Purpose::Use) if !differs => Action::Serve,
        (Found::Ready { vms: Some(0) }, Purpose::Use) => Action::Replace,
        (Found::Ready { vms: Some(_) }, Purpose::Use) => Action::ServeOutdated,
        (
            Found::Ready { vms: None } | Found::DaemonSilent | Found::Silent | Found::Paused,
            Purpose::Use,
        ) => Action::Refuse,
        (_, Purpose::Restart) => match consent {
            Consent::Given => Action::Replace,
            Consent::Ask => Action::Ask,
            Consent::None => Action::Refuse,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL_FOUND: [Found; 8] = [
        Found::Down,
        Found::NeverReady,
        Found::Ready { vms: Some(0) },
        Found::Ready { vms: Some(7) },
        Found::Ready { vms: None },
        Found::DaemonSilent,
        Found::Silent,
        Found::Paused,
    ];

    #[test]
    fn every_case_is_decided_as_promised() {
        use Action::{Ask, Boot, Refuse, Replace, Serve, ServeOutdated};
        // For each found machine: use of equal programs, use of others, restart with consent, at a
        // terminal, without a terminal.
        let table = [
            [Boot, Boot, Boot, Boot, Boot],
            [Replace, Replace, Replace, Replace, Replace],
            [Serve, Replace, Replace, Replace, Replace],
            [Serve, ServeOutdated, Replace, Ask, Refuse],
            [Serve, Refuse, Replace, Ask, Refuse],
            [Refuse, Refuse, Replace, Ask, Refuse],
            [Refuse, Refuse, Replace, Ask, Refuse],
            [Refuse, Refuse, Replace, Ask, Refuse],
        ];
        for (found, row) in ALL_FOUND.into_iter().zip(table) {
            for consent in [Consent::Given, Consent::Ask, Consent::None] {
                for (differs, wanted) in [(false, row[0]), (true, row[1])] {
                    let action = decide(found, differs, Purpose::Use, consent);
                    assert_eq!(action, wanted, "{found:?}, differs: {differs}, {consent:?}");
                }
            }
            for differs in [false, true] {
                let cases = [Consent::Given, Consent::Ask, Consent::None];
                for (consent, wanted) in cases.into_iter().zip(&row[2..]) {
                    let action = decide(found, differs, Purpose::Restart, consent);
                    assert_eq!(action, *wanted, "restart of {found:?}, {consent:?}");
                }
            }
        }
    }

    #[test]
    fn no_machine_that_may_hold_vms_ends_without_consent() {
        for found in ALL_FOUND {
            let may_hold_vms =
                !matches!(found, Found::Down | Found::NeverReady | Found::Ready { vms: Some(0) });
            for differs in [false, true] {
                for (purpose, consent) in [
                    (Purpose::Use, Consent::Given),
                    (Purpose::Use, Consent::Ask),
                    (Purpose::Use, Consent::None),
                    (Purpose::Restart, Consent::Ask),
                    (Purpose::Restart, Consent::None),
                ] {
                    let ends = decide(found, differs, purpose, consent) == Action::Replace;
                    assert!(!(ends && may_hold_vms), "{found:?}, {purpose:?}, {consent:?}");
                }
            }
        }
    }
}
