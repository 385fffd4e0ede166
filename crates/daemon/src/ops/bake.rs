//! Bake: boot an image, warm it up, save it, record clones, store it.
//!
//! Clones record before RAM is stored, so that the pages they touch lie together in the packs, in
//! the order of the touches.
//!
//! A failed bake, or one whose client went away, leaves nothing. Its
//! [`VmGuard`](crate::ops::create::VmGuard) removes the VM, and the writer's drop removes the saved
//! files. A snapshot that is stored after the client went away is removed again.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::model::state::Event;
use crate::ops::create::{Order, Origin, create};
use crate::ops::publish::{self, Ready};
use crate::ops::recording::record;
use crate::ops::{admit, exec, immutable, save};
use crate::vmm::sizes::Template;
use crate::vmm::source;
use dayfly_api::agent::Exit;
use dayfly_api::types::{BakeRequest, BootSource, ErrorCode, NetworkRequest, Snapshot, Source};
use dayfly_units::{Bytes, failpoint};
use dayfly_vmm::config::{MAX_NETS, Shape};
use std::sync::Arc;

/// The label of a VM that is being baked; its value is the snapshot's name.
const LABEL: &str = "dayfly.bake";

/// How the VM of a bake boots.
fn boot_of(request: &BakeRequest) -> BootSource {
    BootSource {
        image: request.image.clone(),
        kernel: request.kernel.clone(),
        memory_bytes: request.memory_bytes,
        vcpus: request.vcpus,
        init: request.init.clone(),
        cpu_model: request.cpu_model,
    }
}

/// Checks what can be checked of a request before its answer begins.
///
/// # Errors
/// Names the field.
pub fn check(request: &BakeRequest) -> Outcome<()> {
    source::check(&boot_of(request))
}

/// Makes a snapshot from an image.
///
/// # Errors
/// The step that failed; everything made is removed.
pub async fn bake(
    daemon: Arc<Daemon>,
    request: BakeRequest,
    progress: ProgressSender,
) -> Outcome<Snapshot> {
    let asked = Asked::now();
    let boot = boot_of(&request);
    let BakeRequest {
        image, name, memory_bytes, vcpus, cpu_model, warmup, recording, egress, ..
    } = request;
    publish::free(&daemon, &name).await?;
    admit::room(&daemon, "a bake", 0).await?;
    progress.phase(format!("booting {image} with {} and {vcpus} vCPUs", Bytes(memory_bytes))).await;
    let order = Order {
        labels: [(LABEL.to_owned(), name.to_string())].into(),
        ephemeral: true,
        network: egress.map(|egress| NetworkRequest::default().with_policy(egress)),
        ..Order::of(Origin::Source(Source::Boot(boot)))
    };
    let guard = create(&daemon, asked, order).await?;
    let vm = guard.vm();
    // The client will probably clone soon.
    let disks = u8::try_from(vm.live().disks.len()).unwrap_or(u8::MAX);
    let (nets, max_vcpus) = (MAX_NETS, vm.facts.max_vcpus);
    daemon.pool.expect_shape(Shape { memory_bytes, vcpus, max_vcpus, disks, nets, cpu_model });
    failpoint::reached("daemon.bake.booted");
    let booted_ms = vm.live().ready_us.unwrap_or_default() / 1000;
    progress.phase(format!("booted in {booted_ms} ms")).await;
    if let Some(spec) = warmup {
        let program = spec.argv.join(" ");
        progress.phase(format!("warming up: {program}")).await;
        let ended = exec::to_its_end(&daemon, &vm, spec, &progress).await;
        let (exit, tail) = ended.map_err(|error| error.during("warm-up"))?;
        if exit.code != Some(0) {
            return Err(failed(&program, &exit, &tail));
        }
    }
    progress.phase(format!("saving {} of memory", Bytes(memory_bytes))).await;
    admit::snapshot(&daemon, &vm).await?;
    vm.step(Event::Freeze)?;
    let saved = save::save(&daemon, &vm, &name).await?;
    failpoint::reached("daemon.bake.saved");
    immutable::prove(&daemon, &vm).await?;
    let spec = publish::spec(&vm);
    let prepared = blocking(move || {
        let ready = Ready::new(&vm.name, saved, &spec)?;
        let template = Arc::new(ready.open()?);
        Ok((ready, template))
    });
    // The image stays in the store while the template is open, that is to the end.
    let (mut ready, template) = prepared.await?;
    guard.end().await?;
    failpoint::reached("daemon.bake.ended");
    progress.phase("recording: which pages a clone touches first").await;
    match record(&daemon, &template, recording, &progress).await {
        Ok(record) => ready = blocking(move || ready.expecting(&record)).await?,
        // The record is only a hint, so a host too busy to record in time still gets its snapshot.
        Err(error) if error.0.code == ErrorCode::Timeout => {
            tracing::warn!(snapshot = %name, "no working set: {error}");
            progress.phase(format!("no working set, clones will start slower: {error}")).await;
        }
        Err(error) => return Err(error),
    }
    failpoint::reached("daemon.bake.touched");
    progress.phase("hashing and storing").await;
    let committed = publish::publish(&daemon, ready, name, &progress).await?;
    failpoint::reached("daemon.bake.published");
    drop(template);
    let (shared, name) = (daemon.clone(), committed.manifest.name.clone());
    let template = blocking(move || Template::of(&*shared.templates.open_snapshot(&name)?)).await?;
    daemon.pool.expect(&template).await;
    Ok(daemon.templates.shown(&committed.manifest))
}

fn failed(program: &str, exit: &Exit, stderr: &[u8]) -> ApiError {
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
    ApiError::new(ErrorCode::Guest, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_warm_up_says_how_and_what_it_wrote() {
        let exit = |code, signal, timed_out| Exit { code, signal, timed_out };
        let error = failed("python3 x", &exit(Some(3), None, false), b"Traceback\nImportError\n");
        assert_eq!(error.0.code, ErrorCode::Guest);
        assert!(
            error
                .0
                .message
                .starts_with("warm-up: `python3 x` ended with exit code 3, expected exit code 0")
        );
        assert!(error.0.message.ends_with("ImportError"));
        assert!(failed("x", &exit(None, Some(9), false), b"").0.message.contains("signal 9"));
        assert!(failed("x", &exit(None, Some(9), true), b"").0.message.contains("out of its time"));
    }
}
