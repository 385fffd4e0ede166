//! A VM in the API's form.

use crate::vm::Vm;
use crate::vm::volumes::shown_volumes;
use dayfly_api::types;

impl Vm {
    /// The VM in the API's form, as `dayfly ps` shows it.
    #[must_use]
    pub fn shown(&self) -> types::Vm {
        let live = self.live();
        let facts = self.facts.clone();
        types::Vm {
            id: self.id,
            name: self.name.clone(),
            state: live.phase.shown(self.no_space().is_some()),
            paused_for: live.phase.paused_for(self.no_space().is_some()),
            exit: live.exit,
            snapshot: facts.snapshot,
            forked_from: facts.fork.from,
            image: facts.image,
            kernel: facts.kernel.name,
            vcpus: facts.vcpus,
            cpus_online: live.cpus_online.map(|online| online.count),
            memory_bytes: facts.memory_bytes,
            created_unix_ms: facts.created_unix_ms,
            ready_us: live.ready_us,
            ephemeral: facts.ephemeral,
            auto_remove: facts.auto_remove,
            ends_unix_ms: live.deadline.map(|deadline| deadline.unix_ms),
            program: live.program,
            network: live.network,
            volumes: shown_volumes(&facts.volumes, &live.volumes),
            labels: facts.labels,
            problem: self.problem(),
        }
    }
}
