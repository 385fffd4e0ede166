//! Bake: boot an image, warm it up, save it, rehearse clones, store it.
//!
//! Clones rehearse before anything of RAM is stored, so that the pages they touch lie together in the packs, in that order.
//!
//! What fails, and a client that goes away, leaves nothing: the VM goes with its [`crate::vm::birth::Newborn`], what was saved with its
//! writer, and a snapshot that nobody waited for while it was stored is removed again.

use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking};
use crate::ndjson::Teller;
use crate::rehearsal::rehearse;
use crate::snapshot::Ready;
use crate::time::Asked;
use crate::vm::birth::{Order, Origin, Part, birth};
use crate::vm::source::Template;
use crate::vm::state::Event;
use crate::{session, snapshot};
use dayfly_api::agent::Exit;
use dayfly_api::types::{BakeRequest, BootSource, ErrorCode, Snapshot, Source};
use dayfly_units::Bytes;
use dayfly_vmm::config::{MAX_NETS, Shape};
use std::sync::Arc;

/// The label of a VM that is being baked; its value is the snapshot's name.
const LABEL: &str = "dayfly.bake";

/// Makes a snapshot from an image.
///
/// # Errors
/// What could not be done; nothing stays of it.
pub async fn bake(daemon: Arc<Daemon>, request: BakeRequest, tell: Teller) -> Outcome<Snapshot> {
    let asked = Asked::now();
    let BakeRequest { image, name, kernel, memory_bytes, vcpus, warmup, rehearsal, init } = request;
    snapshot::free(&daemon, &name).await?;
    tell.phase(format!("booting {image} with {} and {vcpus} vCPUs", Bytes(memory_bytes))).await;
    let order = Order {
        origin: Origin::Source(Source::Boot(BootSource { image, kernel, memory_bytes, vcpus, init })),
        name: None,
        labels: [(LABEL.to_owned(), name.to_string())].into(),
        forks: 0,
        ephemeral: true,
        part: Part::User,
        network: None,
        next: None,
    };
    let newborn = birth(&daemon, asked, order).await?;
    // Whoever bakes clones soon. A VM that is baked has one disk.
    daemon.pool.expect_shape(Shape { memory_bytes, vcpus, disks: 1, nets: MAX_NETS });
    let vm = newborn.vm();
    let booted_ms = vm.live().ready_us.unwrap_or_default() / 1000;
    tell.phase(format!("booted in {booted_ms} ms")).await;
    if let Some(spec) = warmup {
        let program = spec.argv.join(" ");
        tell.phase(format!("warming up: {program}")).await;
        let ended = session::to_its_end(&daemon, &vm, spec, &tell).await;
        let (exit, tail) = ended.map_err(|fault| fault.during("warm-up"))?;
        if exit.code != Some(0) {
            return Err(failed(&program, &exit, &tail));
        }
    }
    tell.phase(format!("saving {} of memory", Bytes(memory_bytes))).await;
    vm.step(Event::Freeze)?;
    let saved = snapshot::save(&daemon, &vm, &name).await?;
    let spec = snapshot::spec(&vm);
    let prepared = blocking(move || {
        let ready = Ready::new(&vm.name, saved, &spec)?;
        let template = Arc::new(ready.open()?);
        Ok((ready, template))
    });
    // While it is open its image stays in the store: to the end.
    let (mut ready, template) = prepared.await?;
    newborn.end().await?;
    tell.phase("rehearsing: which pages a clone touches first").await;
    match rehearse(&daemon, &template, rehearsal, &tell).await {
        Ok(record) => ready = blocking(move || ready.expecting(&record)).await?,
        // The record is a hint: a host too busy to rehearse in time still has its snapshot.
        Err(fault) if fault.0.code == ErrorCode::Timeout => {
            tracing::warn!(snapshot = %name, "no working set: {fault}");
            tell.phase(format!("no working set, clones will start slower: {fault}")).await;
        }
        Err(fault) => return Err(fault),
    }
    tell.phase("hashing and storing").await;
    let committed = snapshot::publish(&daemon, ready, name, &tell).await?;
    drop(template);
    let (shared, name) = (daemon.clone(), committed.manifest.name.clone());
    let template = blocking(move || Template::of(&*shared.depot.open_snapshot(&name)?)).await?;
    daemon.pool.expect(&template).await;
    Ok(daemon.depot.shown(&committed.manifest))
}

fn failed(program: &str, exit: &Exit, stderr: &[u8]) -> Fault {
    let how = match (exit.code, exit.signal, exit.timed_out) {
        (_, _, true) => "ran out of its time".to_owned(),
        (Some(code), ..) => format!("ended with exit code {code}"),
        (None, Some(signal), _) => format!("was ended by signal {signal}"),
        (None, None, _) => "ended without exit code".to_owned(),
    };
    let mut message = format!("warm-up: `{program}` {how}, expected exit code 0");
    let tail = String::from_utf8_lossy(stderr);
    if !tail.trim().is_empty() {
        message.push_str("; the end of its standard error:\n");
        message.push_str(tail.trim_end());
    }
    Fault::new(ErrorCode::Guest, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_warm_up_says_how_and_what_it_wrote() {
        let exit = |code, signal, timed_out| Exit { code, signal, timed_out };
        let fault = failed("python3 x", &exit(Some(3), None, false), b"Traceback\nImportError\n");
        assert_eq!(fault.0.code, ErrorCode::Guest);
        assert!(
            fault.0.message.starts_with("warm-up: `python3 x` ended with exit code 3, expected exit code 0")
        );
        assert!(fault.0.message.ends_with("ImportError"));
        assert!(failed("x", &exit(None, Some(9), false), b"").0.message.contains("signal 9"));
        assert!(failed("x", &exit(None, Some(9), true), b"").0.message.contains("out of its time"));
    }
}
