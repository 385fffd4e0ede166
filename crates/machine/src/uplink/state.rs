//! What is known of the uplink.

use serde::{Deserialize, Serialize};

/// The state of a machine's uplink.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Uplink {
    /// Machine and VMs reach what the user's host reaches.
    Up {
        /// The program that connects them: `passt`, or `QEMU's user network`.
        by: String,
        /// What does not work, such as names if the host has no resolver.
        without: Option<String>,
    },
    /// Nothing outside is reached.
    Down {
        /// The cause.
        why: String,
    },
    /// The machine was made without an uplink.
    Off,
}

/// What determines the state.
#[derive(Debug, Default, Clone)]
pub(super) struct Facts {
    /// The program that has answered and still runs.
    pub(super) program: Option<&'static str>,
    /// Why no program runs.
    pub(super) why: String,
    /// Whether a thread of the uplink has failed. No thread is started again.
    pub(super) failed: bool,
    /// Why the host's network is not known, if it is not.
    pub(super) unknown: Option<String>,
    /// Whether the host has a route to another host.
    pub(super) routes: bool,
    /// Whether the host has an IPv4 resolver.
    pub(super) resolvers: bool,
}

impl Facts {
    pub(super) fn state(&self) -> Uplink {
        let failed =
            "a thread of the supervisor has failed; `dayfly machine restart` starts it anew";
        let why = match (&self.unknown, self.program) {
            _ if self.failed => failed.to_owned(),
            (Some(unknown), _) => unknown.clone(),
            (None, None) => self.why.clone(),
            (None, Some(_)) if !self.routes => "this host has no route to another host".to_owned(),
            (None, Some(by)) => {
                let names = "names: /etc/resolv.conf of this host has no IPv4 name server";
                let without = (!self.resolvers).then(|| names.to_owned());
                return Uplink::Up { by: by.to_owned(), without };
            }
        };
        Uplink::Down { why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_needs_a_program_that_answers_and_a_route() {
        let up = Facts {
            program: Some("passt"),
            why: "old".to_owned(),
            failed: false,
            unknown: None,
            routes: true,
            resolvers: true,
        };
        let down = |why: &str| Uplink::Down { why: why.to_owned() };
        let by = || "passt".to_owned();
        assert_eq!(up.state(), Uplink::Up { by: by(), without: None });
        assert_eq!(Facts { program: None, ..up.clone() }.state(), down("old"));
        assert_eq!(Facts { unknown: Some("x".to_owned()), ..up.clone() }.state(), down("x"));
        let Uplink::Down { why } = (Facts { routes: false, ..up.clone() }).state() else {
            panic!("no route")
        };
        assert!(why.contains("no route"), "{why}");
        let failed = Facts { failed: true, ..up.clone() }.state();
        assert!(matches!(failed, Uplink::Down { .. }), "{failed:?}");
        let deaf = Facts { resolvers: false, ..up }.state();
        assert!(matches!(deaf, Uplink::Up { without: Some(_), .. }), "{deaf:?}");
    }

    #[test]
    fn the_state_has_one_tag() {
        let json = |uplink: &Uplink| serde_json::to_string(uplink).unwrap();
        assert_eq!(json(&Uplink::Off), r#"{"state":"off"}"#);
        let down = Uplink::Down { why: "x".to_owned() };
        assert_eq!(json(&down), r#"{"state":"down","why":"x"}"#);
    }
}
