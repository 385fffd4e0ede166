//! Connections to programs in guests, by their vsock ports.

use crate::base::error::{ApiError, Outcome};
use crate::base::time::Asked;
use crate::http::ports::{self, ClientEnd};
use crate::http::routes::extract::{Json, Peer, Shared};
use crate::http::routes::upgrade::{Port, Upgrade};
use crate::ops::create::{self, Order};
use crate::ops::volumes;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::HeaderValue;
use axum::http::request::Parts;
use axum::response::Response;
use dayfly_api::types::{ApiError as ErrorBody, ConnectRequest, VM_HEADER, Vm};
use std::fmt::Write;

/// The longest description of a VM in a header; a longer one is sent without labels. Clients accept
/// some 400 KiB of headers.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// Extracts the VM and the port of a path.
pub struct Place {
    word: String,
    port: u32,
}

impl<S: Send + Sync> FromRequestParts<S> for Place {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((word, port)) = path.map_err(|e| ApiError::invalid(e.body_text()))?;
        let port = port.parse().map_err(|_| {
            let port: String = port.chars().take(40).collect();
            ApiError::invalid(format_args!(
                "port: expected a number from 1 to {}, got {port:?}",
                u32::MAX
            ))
        })?;
        Ok(Self { word, port })
    }
}

/// JSON in printable ASCII. Other characters occur only in strings, and are escaped there.
fn ascii_json(value: &impl serde::Serialize) -> serde_json::Result<String> {
    let json = serde_json::to_string(value)?;
    Ok(json.chars().fold(String::with_capacity(json.len()), |mut ascii, c| {
        if matches!(c, ' '..='~') {
            ascii.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a String does not fail.
                let _ = write!(ascii, "\\u{unit:04x}");
            }
        }
        ascii
    }))
}

/// Adds a header with the description of the connected VM.
fn described(mut response: Response, mut vm: Vm) -> Outcome<Response> {
    let failed = |e: &dyn std::fmt::Display| {
        ApiError::internal(format_args!("describing a VM in a header: {e}"))
    };
    let mut text = ascii_json(&vm).map_err(|e| failed(&e))?;
    if text.len() > MAX_HEADER_BYTES {
        vm.labels.clear();
        text = ascii_json(&vm).map_err(|e| failed(&e))?;
    }
    let value = HeaderValue::try_from(text).map_err(|e| failed(&e))?;
    response.headers_mut().insert(VM_HEADER, value);
    Ok(response)
}

/// Connects to a program that listens on a vsock port of a running VM, with `Upgrade: dayfly-port`.
/// The 101 comes once the port has accepted the connection. After it come the port's bytes in both
/// directions, and each direction ends separately.
#[utoipa::path(
    get,
    operation_id = "connect_to_vm",
    path = "/v1/vms/{vm}/ports/{port}",
    params(("vm" = String, Path), ("port" = u32, Path)),
    responses(
        (status = 101, headers(("dayfly-vm" = String, description = "the Vm, in JSON"))),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody, description = "no program listens there"),
        (status = 504, body = ErrorBody)
    )
)]
pub async fn connect(
    State(daemon): Shared,
    Place { word, port }: Place,
    upgrade: Upgrade<Port>,
) -> Outcome<Response> {
    let vm = daemon.registry.find(&word)?;
    let guest = ports::connect(&daemon, &vm, port).await?;
    let shown = vm.shown();
    let stop = daemon.stop.clone();
    let response = upgrade.then(async move |client| {
        tokio::select! {
            () = ports::relay(client, guest, ClientEnd::PassedOn, vm.wait_gone()) => {}
            () = stop.cancelled() => {}
        }
    });
    described(response, shown)
}

/// Clones (or boots) a VM and connects to a vsock port of it: as above. The end of the client's
/// stream removes the VM, unless `keep`; so the client keeps its half open as long as it uses the
/// VM.
#[utoipa::path(
    post,
    operation_id = "run_connected",
    path = "/v1/connect",
    request_body = ConnectRequest,
    responses(
        (status = 101, headers(("dayfly-vm" = String, description = "the Vm, in JSON"))),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
        (status = 507, body = ErrorBody)
    )
)]
pub async fn run_connected(
    State(daemon): Shared,
    Peer(caller): Peer,
    upgrade: Upgrade<Port>,
    Json(request): Json<ConnectRequest>,
) -> Outcome<Response> {
    let asked = Asked::now();
    ports::check(request.port)?;
    let volumes = volumes::asked(&daemon, &request.create.volumes, caller.as_deref())?;
    let order = Order { ephemeral: !request.keep, ..Order::create(request.create, volumes) };
    let work = async {
        let guard = create::create(&daemon, asked, order).await?;
        let guest = ports::connect(&daemon, &guard.vm(), request.port).await?;
        Ok::<_, ApiError>((guard, guest))
    };
    // Dropping the guard at any return removes the VM.
    let (guard, guest) = tokio::select! {
        done = work => done?,
        () = daemon.stop.cancelled() => return Err(ApiError::stopping()),
    };
    let vm = guard.vm();
    let shown = vm.shown();
    let (guard, end) = if request.keep {
        let _lives_on = guard.keep();
        (None, ClientEnd::PassedOn)
    } else {
        (Some(guard), ClientEnd::EndsAll)
    };
    let stop = daemon.stop.clone();
    let response = upgrade.then(async move |client| {
        tokio::select! {
            () = ports::relay(client, guest, end, vm.wait_gone()) => {}
            () = stop.cancelled() => {}
        }
        drop(guard);
    });
    described(response, shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_for_a_header_is_ascii_and_the_same_value() {
        for text in ["plain", "zwölf 🦋", "\"\\\n\u{7f}\0"] {
            let ascii = ascii_json(&text).unwrap();
            assert!(HeaderValue::try_from(&ascii).is_ok() && ascii.is_ascii(), "{ascii:?}");
            assert_eq!(serde_json::from_str::<String>(&ascii).unwrap(), text);
        }
    }
}
