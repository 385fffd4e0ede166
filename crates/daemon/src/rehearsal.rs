//! Rehearsal: the first moments of a clone, played once before what was saved is stored, to learn which pages every clone will touch.
//!
//! Two throw-away clones take identities, and run the rehearsal program if there is one; their VMMs tell which pages the one touched and the
//! other wrote (`dayfly_vmm::memory::working_set`), and the store keeps the record beside the snapshot. Later clones have those pages
//! laid ready before they run, and a clone whose memory has not arrived gets them first.

use crate::colours::shown;
use crate::daemon::Daemon;
use crate::depot::Loaded;
use crate::error::{Fault, Outcome, blocking, chain};
use crate::ndjson::Teller;
use crate::session;
use crate::time::Asked;
use crate::vm::Vm;
use crate::vm::birth::{Order, Origin, Part, birth};
use crate::vm::control_link;
use dayfly_api::agent::ExecSpec;
use dayfly_api::types::{ErrorCode, MAX_TOUCHES, Progress, Rehearsal, RehearseRequest};
use dayfly_units::Name;
use dayfly_vmm::control::{Answer, Command};
use dayfly_vmm::memory::working_set::{self, Record, Run};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How often a program runs in a rehearsal: the pages that a guest takes from its free lists differ a little from clone to clone; the second run
/// takes the next ones.
const TIMES: usize = 2;

/// Plays the first moments of a clone of `template` twice; gives what that touched and wrote.
///
/// # Errors
/// A clone does not come to life, or the program does not end with 0.
pub async fn rehearse(
    daemon: &Arc<Daemon>,
    template: &Arc<Loaded>,
    program: Option<ExecSpec>,
    tell: &Teller,
) -> Outcome<Record> {
    let touched = play(daemon, template, program.as_ref(), TIMES, Part::Touched, tell).await?;
    let written = play(daemon, template, program.as_ref(), TIMES, Part::Written, tell).await?;
    Ok(working_set::merge(&touched, &written, template.manifest.memory_bytes))
}

/// Plays one run of a clone of the snapshot `name`, and holds what it touched against the working set.
///
/// # Errors
/// There is no such snapshot, the clone does not come to life, or the program does not end with 0.
pub async fn once(
    daemon: Arc<Daemon>,
    name: Name,
    request: RehearseRequest,
    tell: Teller,
) -> Outcome<Rehearsal> {
    let shared = daemon.clone();
    let (template, table) = blocking(move || {
        let (_, table) = shared.depot.store().snapshot_table(&shared.depot.tenant(), &name)?;
        Ok((shared.depot.open_snapshot(&name)?, table))
    })
    .await?;
    if let Some(wanted) = &template.pager {
        // What it touches is compared with the file.
        tell.phase("waiting for all of its memory").await;
        wanted.pager().whole(daemon.config.deadlines.save).await?;
    }
    tell.phase("recording a run of a clone").await;
    let record = play(&daemon, &template, request.program.as_ref(), 1, Part::Touched, &tell).await?;
    let expected = template.working_set.as_ref();
    let expected = expected.map(|file| working_set::read(file, template.manifest.memory_bytes)).transpose();
    let expected = expected.map_err(|e| Fault::new(ErrorCode::Damaged, chain(&e)))?.unwrap_or_default();
    if request.touches {
        for touches in record.order.chunks(MAX_TOUCHES) {
            let touches = touches.iter().map(|touch| [touch.page, touch.us]).collect();
            tell.tell(Progress::Touched { touches }).await;
        }
    }
    Ok(Rehearsal {
        memory_bytes: template.manifest.memory_bytes,
        took_us: record.order.last().map_or(0, |touch| u64::from(touch.us)),
        colours: shown::touched(table.runs(), &record, &expected),
    })
}

/// One throw-away clone, in which the program runs so often; gives the pages it noted.
async fn play(
    daemon: &Arc<Daemon>,
    template: &Arc<Loaded>,
    program: Option<&ExecSpec>,
    times: usize,
    part: Part,
    tell: &Teller,
) -> Outcome<Record> {
    let name = &template.manifest.name;
    let order = Order {
        origin: Origin::Template(template.clone()),
        name: None,
        labels: BTreeMap::new(),
        forks: 0,
        ephemeral: true,
        part,
        network: None,
        next: None,
    };
    let newborn = birth(daemon, Asked::now(), order).await?;
    let vm = newborn.vm();
    // How a second run ends says nothing: the program need not be one that can be repeated.
    for (run, spec) in program.iter().cycle().take(times).copied().cloned().enumerate() {
        let text = spec.argv.join(" ");
        let ended = session::to_its_end(daemon, &vm, spec, tell).await;
        let (exit, stderr) = ended.map_err(|fault| fault.during("rehearsal"))?;
        if run == 0 && exit.code != Some(0) {
            let stderr = String::from_utf8_lossy(&stderr);
            return Err(Fault::new(
                ErrorCode::Guest,
                format_args!(
                    "rehearsal: `{text}`: expected exit code 0, got {exit:?}; {}",
                    stderr.trim_end()
                ),
            ));
        }
    }
    let record = noted(daemon, &vm).await?;
    newborn.end().await?;
    let sum = |runs: &mut dyn Iterator<Item = &Run>| runs.map(|run| run.pages).sum::<u32>();
    let runs = &record.runs;
    let (all, written) = (sum(&mut runs.iter()), sum(&mut runs.iter().filter(|run| run.written)));
    tracing::info!(snapshot = %name, ?part, all, written, "pages of a rehearsal");
    Ok(record)
}

/// What the VMM of a VM that is recorded has noted.
pub async fn noted(daemon: &Daemon, vm: &Vm) -> Outcome<Record> {
    let failed = |e: std::io::Error| Fault::internal(format_args!("rehearsal: the file for the record: {e}"));
    let memfd = rustix::fs::memfd_create("working-set", rustix::fs::MemfdFlags::CLOEXEC);
    let mut file = File::from(memfd.map_err(|e| failed(e.into()))?);
    let fds = vec![OwnedFd::from(file.try_clone().map_err(failed)?)];
    let within = daemon.config.deadlines.control;
    match control_link::with_fds(&vm.dir.control(), Command::WorkingSet, fds, within).await? {
        Answer::Ok => {}
        got => return Err(Fault::internal(format_args!("rehearsal: the VMM: expected Ok, got {got:?}"))),
    }
    let memory_bytes = vm.facts.memory_bytes;
    blocking(move || {
        let mut record = Vec::new();
        file.rewind().map_err(failed)?;
        // What the VMM writes is bounded by what it would read.
        file.take(working_set::MAX_FILE_BYTES).read_to_end(&mut record).map_err(failed)?;
        working_set::decode(&record, memory_bytes)
            .map_err(|e| Fault::internal(format_args!("rehearsal: {e}")))
    })
    .await
}
