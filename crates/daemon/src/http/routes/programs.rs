//! Detached programs of a VM.

use crate::base::error::{ApiError, Outcome};
use crate::http::listing::Paging;
use crate::http::routes::extract::{Params, Shared, Word, Words};
use crate::ops::programs;
use axum::extract::State;
use axum::http::StatusCode;
use dayfly_api::agent::Program;
use dayfly_api::types::{ApiError as ErrorBody, ErrorCode, List};
use serde::Deserialize;

/// Which programs to list.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// Only programs that run, or only programs that have ended.
    running: Option<bool>,
    /// The most items of the answer, 1 to 1000. Without it, the answer has all.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// The `next` of the page before.
    cursor: Option<String>,
}

/// Lists the detached programs of a VM, the oldest first by the guest's clock: those whose output
/// the guest's agent keeps, the last 32.
#[utoipa::path(get, operation_id = "list_programs",
    path = "/v1/vms/{vm}/programs", params(("vm" = String, Path), ListParams),
    responses((status = 200, body = List<Program>), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 504, body = ErrorBody)))]
pub async fn list(
    State(daemon): Shared,
    Word(vm): Word,
    Params(params): Params<ListParams>,
) -> Outcome<axum::Json<List<Program>>> {
    let paging = Paging::of("programs", params.limit, params.cursor.as_deref())?;
    let vm = daemon.registry.find(&vm)?;
    let mut items = programs::list(&daemon, &vm).await?;
    items.retain(|program| params.running.is_none_or(|runs| runs == program.exit.is_none()));
    let key = |program: &Program| (program.started_unix_ms, program.id.clone());
    items.sort_by_key(key);
    paging.page(items, key).map(axum::Json)
}

/// A detached program, by its id, the unique start of it, or its process id.
#[utoipa::path(get, operation_id = "inspect_program",
    path = "/v1/vms/{vm}/programs/{program}",
    params(("vm" = String, Path), ("program" = String, Path)),
    responses((status = 200, body = Program), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 504, body = ErrorBody)))]
pub async fn inspect(
    State(daemon): Shared,
    Words(vm, program): Words,
) -> Outcome<axum::Json<Program>> {
    let vm = daemon.registry.find(&vm)?;
    programs::one(&daemon, &vm, &program).await.map(axum::Json)
}

/// Forgets a detached program that has ended, and its output.
#[utoipa::path(delete, operation_id = "remove_program",
    path = "/v1/vms/{vm}/programs/{program}",
    params(("vm" = String, Path), ("program" = String, Path)),
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 504, body = ErrorBody)))]
pub async fn remove(State(daemon): Shared, Words(vm, program): Words) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&vm)?;
    programs::forget(&daemon, &vm, &program).await?;
    Ok(StatusCode::NO_CONTENT)
}

const fn terminate() -> i32 {
    15
}

/// Options of a signal.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct KillParams {
    /// The signal's number on x86-64, 15 (SIGTERM) if not given.
    #[serde(default = "terminate")]
    signal: i32,
}

/// Sends a signal to the process group of a detached program.
#[utoipa::path(post, operation_id = "kill_program",
    path = "/v1/vms/{vm}/programs/{program}/kill",
    params(("vm" = String, Path), ("program" = String, Path), KillParams),
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 504, body = ErrorBody)))]
pub async fn kill(
    State(daemon): Shared,
    Words(vm, program): Words,
    Params(params): Params<KillParams>,
) -> Outcome<StatusCode> {
    let vm = daemon.registry.find(&vm)?;
    programs::kill(&daemon, &vm, &program, params.signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Waits until a detached program has ended. The answer comes then.
#[utoipa::path(get, operation_id = "wait_for_program",
    path = "/v1/vms/{vm}/programs/{program}/wait",
    params(("vm" = String, Path), ("program" = String, Path)),
    responses((status = 200, body = Program), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 504, body = ErrorBody)))]
pub async fn wait(
    State(daemon): Shared,
    Words(vm, program): Words,
) -> Outcome<axum::Json<Program>> {
    let vm = daemon.registry.find(&vm)?;
    let _follows = vm.followers.clone().read_owned().await;
    let ended = daemon.stop.run_until_cancelled(programs::wait(&daemon, &vm, &program)).await;
    let stopped =
        || ApiError::new(ErrorCode::Timeout, "the daemon ends before the program; ask again");
    ended.ok_or_else(stopped)?.map(axum::Json)
}
