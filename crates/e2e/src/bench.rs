//! What the long benchmarks have in common: images, a machine of their own, guests in it, and programs that run there.

use std::path::PathBuf;
use std::process::ExitCode;

pub mod guests;
pub mod images;
pub mod place;
pub mod scripts;

/// How a program named `name` ends: as `run` does, or, interrupted, when the machines in `homes` have been stopped; `hint` says what becomes of what it did.
pub async fn end(
    name: &str,
    run: impl Future<Output = anyhow::Result<()>>,
    homes: &[PathBuf],
    hint: &str,
) -> ExitCode {
    let result = tokio::select! {
        result = run => result,
        _ = tokio::signal::ctrl_c() => {
            homes.iter().for_each(|home| place::stop_left(home));
            Err(anyhow::anyhow!("interrupted; {hint}"))
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{name}: {e:#}");
            ExitCode::FAILURE
        }
    }
}
