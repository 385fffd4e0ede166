//! What unit tests of several rooms need.

use crate::config::{Config, Deadlines};
use crate::vm::budget::{Budget, Reservation};
use dayfly_host::numa::Node;
use std::path::Path;
use std::sync::Arc;

/// A configuration with all folders below `folder`, and no VMM program.
pub(crate) fn config(folder: &Path) -> Config {
    Config {
        state: folder.join("s"),
        run: folder.join("r"),
        vmm: "/nonexistent/dayfly-vmm".into(),
        overcommit: 100,
        pool: 0,
        deadlines: Deadlines::default(),
    }
}

/// A host with one node that has enough.
pub(crate) fn nodes() -> Vec<Node> {
    vec![Node { number: None, cpus: Vec::new(), memory_bytes: 1 << 40 }]
}

/// Some memory of such a host.
pub(crate) fn memory() -> Reservation {
    Arc::new(Budget::new(&nodes(), 100)).reserve(64 << 20, None).unwrap()
}
