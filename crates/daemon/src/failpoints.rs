//! The names of all failpoints of the daemon and of the store: places between two steps of an
//! operation at which a test ends the daemon ([`dayfly_units::failpoint`]).

/// The failpoints of this crate, each operation's in the order of its steps.
pub const FAILPOINTS: &[&str] = &[
    "daemon.create.source",
    "daemon.create.memory",
    "daemon.create.network",
    "daemon.create.name",
    "daemon.create.vmm",
    "daemon.create.guest",
    "daemon.create.identity",
    "daemon.create.recorded",
    "daemon.start.reserved",
    "daemon.start.emptied",
    "daemon.start.launched",
    "daemon.start.identity",
    "daemon.start.recorded",
    "daemon.fork.files",
    "daemon.fork.precopied",
    "daemon.fork.forking",
    "daemon.fork.frozen",
    "daemon.fork.thawed",
    "daemon.fork.pinned",
    "daemon.fork.child",
    "daemon.fork.children",
    "daemon.fork.committed",
    "daemon.pending.begun",
    "daemon.pending.copied",
    "daemon.pending.stored",
    "daemon.merge.made",
    "daemon.merge.rebased",
    "daemon.merge.recorded",
    "daemon.merge.removed",
    "daemon.snapshot.begun",
    "daemon.snapshot.precopied",
    "daemon.snapshot.freezing",
    "daemon.snapshot.thawed",
    "daemon.snapshot.proven",
    "daemon.snapshot.recorded",
    "daemon.snapshot.released",
    "daemon.snapshot.rebased",
    "daemon.save.files",
    "daemon.save.frozen",
    "daemon.publish.prepared",
    "daemon.packer.started",
    "daemon.packer.classified",
    "daemon.packer.asked",
    "daemon.packer.written",
    "daemon.publish.committed",
    "daemon.publish.pinned",
    "daemon.expire.due",
    "daemon.expire.recorded",
    "daemon.power.switched",
    "daemon.power.recorded",
    "daemon.remove.asked",
    "daemon.remove.unrecorded",
    "daemon.remove.killed",
    "daemon.remove.folder",
    "daemon.remove.unpinned",
    "daemon.remove.layers",
    "daemon.remove.forgotten",
    "daemon.open_snapshot.loaded",
    "daemon.remove_snapshot.removed",
    "daemon.remove_snapshot.layers",
    "daemon.remove_snapshot.pages",
    "daemon.bake.booted",
    "daemon.bake.saved",
    "daemon.bake.ended",
    "daemon.bake.touched",
    "daemon.bake.published",
    "daemon.gc.layers",
    "daemon.gc.pages",
];

/// The failpoints of `dayflyd`.
#[must_use]
pub fn all() -> Vec<&'static str> {
    [FAILPOINTS, dayfly_store::FAILPOINTS].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    #[test]
    fn the_list_has_each_failpoint_of_the_sources_once() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let found = dayfly_units::failpoint::in_sources(&sources).unwrap();
        let listed: BTreeSet<String> = FAILPOINTS.iter().map(ToString::to_string).collect();
        assert_eq!(found, listed);
        assert_eq!(listed.len(), FAILPOINTS.len(), "a name is listed twice");
    }
}
