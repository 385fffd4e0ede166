//! Recording of the working set: which pages every clone will touch. The first moments of a clone
//! are played before the snapshot is stored.
//!
//! Two throw-away clones take identities, and run the recording program if there is one. One VMM
//! reports which pages were touched, the other which were written
//! (`dayfly_vmm::memory::working_set`). The store keeps the record beside the snapshot. A later
//! clone has these pages prefetched before it runs. If its RAM is still loading, the pager fetches
//! these pages first.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::ops::colours::shown;
use crate::ops::create::{Order, Origin, create};
use crate::ops::exec;
use crate::templates::open::OpenTemplate;
use crate::vm::Vm;
use crate::vmm::control_link;
use crate::vmm::source::Purpose;
use dayfly_api::agent::ExecSpec;
use dayfly_api::types::{ErrorCode, MAX_TOUCHES, Progress, RecordRequest, Recording};
use dayfly_units::{Name, error::chain};
use dayfly_vmm::control::{Answer, Command};
use dayfly_vmm::memory::working_set::{self, Record, Run};
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How often the program runs in a recording. The pages that a guest takes from its free lists
/// differ a little between clones, and the second run takes the next ones.
const TIMES: usize = 2;

/// Records which pages clones of `template` touch and write in their first moments.
///
/// # Errors
/// A clone does not start, or the program does not end with 0.
pub async fn record(
    daemon: &Arc<Daemon>,
    template: &Arc<OpenTemplate>,
    program: Option<ExecSpec>,
    progress: &ProgressSender,
) -> Outcome<Record> {
    let touched =
        play(daemon, template, program.as_ref(), TIMES, Purpose::Touched, progress).await?;
    let written =
        play(daemon, template, program.as_ref(), TIMES, Purpose::Written, progress).await?;
    Ok(working_set::merge(&touched, &written, template.manifest.memory_bytes))
}

/// Records one run of a clone of the snapshot `name`, and compares it with the working set.
///
/// # Errors
/// No such snapshot, the clone does not start, or the program does not end with 0.
pub async fn once(
    daemon: Arc<Daemon>,
    name: Name,
    request: RecordRequest,
    progress: ProgressSender,
) -> Outcome<Recording> {
    let shared = daemon.clone();
    let (template, table) = blocking(move || {
        let (_, table) =
            shared.templates.store().snapshot_table(&shared.templates.tenant(), &name)?;
        Ok((shared.templates.open_snapshot(&name)?, table))
    })
    .await?;
    if let Some(wanted) = &template.pager {
        // The recorded pages are compared with the memory file.
        progress.phase("waiting for all of its memory").await;
        wanted.pager().whole(daemon.config.deadlines.save).await?;
    }
    progress.phase("recording a run of a clone").await;
    let record =
        play(&daemon, &template, request.program.as_ref(), 1, Purpose::Touched, &progress).await?;
    let expected = template.working_set.as_ref();
    let expected =
        expected.map(|file| working_set::read(file, template.manifest.memory_bytes)).transpose();
    let expected =
        expected.map_err(|e| ApiError::new(ErrorCode::Damaged, chain(&e)))?.unwrap_or_default();
    if request.touches {
        for touches in record.order.chunks(MAX_TOUCHES) {
            let touches = touches.iter().map(|touch| [touch.page, touch.us]).collect();
            progress.send(Progress::Touched { touches }).await;
        }
    }
    Ok(Recording {
        memory_bytes: template.manifest.memory_bytes,
        took_us: record.order.last().map_or(0, |touch| u64::from(touch.us)),
        colours: shown::touched(table.runs(), &record, &expected),
    })
}

/// Runs the program `times` times in one throw-away clone, and returns the pages that its VMM
/// recorded.
async fn play(
    daemon: &Arc<Daemon>,
    template: &Arc<OpenTemplate>,
    program: Option<&ExecSpec>,
    times: usize,
    purpose: Purpose,
    progress: &ProgressSender,
) -> Outcome<Record> {
    let name = &template.manifest.name;
    let order = Order {
        ephemeral: true,
        purpose,
        volumes: Some(Vec::new()),
        ..Order::of(Origin::Template(template.clone()))
    };
    let guard = create(daemon, Asked::now(), order).await?;
    let vm = guard.vm();
    // How a second run ends is ignored, because the program need not be repeatable.
    for (run, spec) in program.iter().cycle().take(times).copied().cloned().enumerate() {
        let text = spec.argv.join(" ");
        let ended = exec::to_its_end(daemon, &vm, spec, progress).await;
        let (exit, stderr) = ended.map_err(|error| error.during("recording"))?;
        if run == 0 && exit.code != Some(0) {
            let stderr = String::from_utf8_lossy(&stderr);
            return Err(ApiError::new(
                ErrorCode::Guest,
                format_args!(
                    "recording: `{text}`: expected exit code 0, got {exit:?}; {}",
                    stderr.trim_end()
                ),
            ));
        }
    }
    let record = noted(daemon, &vm).await?;
    guard.end().await?;
    let sum = |runs: &mut dyn Iterator<Item = &Run>| runs.map(|run| run.pages).sum::<u32>();
    let runs = &record.runs;
    let (all, written) = (sum(&mut runs.iter()), sum(&mut runs.iter().filter(|run| run.written)));
    tracing::info!(snapshot = %name, ?purpose, all, written, "pages of a recording");
    Ok(record)
}

/// Gets the record of touched pages from a VMM that records.
pub async fn noted(daemon: &Daemon, vm: &Vm) -> Outcome<Record> {
    let failed = |e: std::io::Error| {
        ApiError::internal(format_args!("recording: the file for the record: {e}"))
    };
    let memfd = rustix::fs::memfd_create("working-set", rustix::fs::MemfdFlags::CLOEXEC);
    let mut file = File::from(memfd.map_err(|e| failed(e.into()))?);
    let fds = vec![OwnedFd::from(file.try_clone().map_err(failed)?)];
    let within = daemon.config.deadlines.control;
    match control_link::with_fds(&vm.dir.control(), Command::WorkingSet, fds, within).await? {
        Answer::Ok => {}
        got => {
            return Err(ApiError::internal(format_args!(
                "recording: the VMM: expected Ok, got {got:?}"
            )));
        }
    }
    let memory_bytes = vm.facts.memory_bytes;
    blocking(move || {
        let mut record = Vec::new();
        file.rewind().map_err(failed)?;
        // The limit of the reader also bounds the file that the VMM wrote.
        file.take(working_set::MAX_FILE_BYTES).read_to_end(&mut record).map_err(failed)?;
        working_set::decode(&record, memory_bytes)
            .map_err(|e| ApiError::internal(format_args!("recording: {e}")))
    })
    .await
}
