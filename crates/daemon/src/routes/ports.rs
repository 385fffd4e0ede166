//! Connections to programs that run in guests, by their vsock ports.

use super::upgrade::{Port, Upgrade};
use super::{Json, Shared};
use crate::error::{Fault, Outcome};
use crate::ports::{self, ClientEnd};
use crate::time::Asked;
use crate::vm::birth::{self, Order};
use axum::extract::{FromRequestParts, Path, State};
use axum::http::HeaderValue;
use axum::http::request::Parts;
use axum::response::Response;
use dayfly_api::types::{ApiError, ConnectRequest, ErrorCode, VM_HEADER, Vm};
use std::fmt::Write;

/// Above this, the labels are left out of the description of a VM in a header: clients read some 400 KiB of them.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// The VM and the port in a path.
pub struct Place {
    word: String,
    port: u32,
}

impl<S: Send + Sync> FromRequestParts<S> for Place {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Outcome<Self> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((word, port)) = path.map_err(|e| Fault::invalid(e.body_text()))?;
        let port = port.parse().map_err(|_| {
            let port: String = port.chars().take(40).collect();
            Fault::invalid(format_args!("port: expected a number from 1 to {}, got {port:?}", u32::MAX))
        })?;
        Ok(Self { word, port })
    }
}

/// JSON with everything but ASCII's printable characters escaped, which outside of strings there is none of.
fn ascii_json(value: &impl serde::Serialize) -> serde_json::Result<String> {
    let json = serde_json::to_string(value)?;
    Ok(json.chars().fold(String::with_capacity(json.len()), |mut ascii, c| {
        if matches!(c, ' '..='~') {
            ascii.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a String cannot fail.
                let _ = write!(ascii, "\\u{unit:04x}");
            }
        }
        ascii
    }))
}

/// Adds the description of the VM that the connection leads to.
fn described(mut response: Response, mut vm: Vm) -> Outcome<Response> {
    let failed =
        |e: &dyn std::fmt::Display| Fault::internal(format_args!("describing a VM in a header: {e}"));
    let mut text = ascii_json(&vm).map_err(|e| failed(&e))?;
    if text.len() > MAX_HEADER_BYTES {
        vm.labels.clear();
        text = ascii_json(&vm).map_err(|e| failed(&e))?;
    }
    let value = HeaderValue::try_from(text).map_err(|e| failed(&e))?;
    response.headers_mut().insert(VM_HEADER, value);
    Ok(response)
}

/// Connects to a program that listens on a vsock port of a running VM. With `Upgrade: dayfly-port`; the 101 comes once the port has taken the
/// connection. What follows are the port's bytes both ways, and each direction ends by itself.
#[utoipa::path(get, path = "/v1/vms/{vm}/ports/{port}", params(("vm" = String, Path), ("port" = u32, Path)),
    responses((status = 101, headers(("dayfly-vm" = String, description = "the Vm, in JSON"))),
        (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError),
        (status = 502, body = ApiError, description = "nobody listens there"), (status = 504, body = ApiError)))]
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

/// Clones (or boots) a VM and connects to a vsock port of it: as above. The client keeps its half open as long as it wants the VM: its end of
/// stream ends the VM, unless `keep`.
#[utoipa::path(post, path = "/v1/connect", request_body = ConnectRequest,
    responses((status = 101, headers(("dayfly-vm" = String, description = "the Vm, in JSON"))),
        (status = 400, body = ApiError), (status = 404, body = ApiError), (status = 409, body = ApiError),
        (status = 422, body = ApiError), (status = 502, body = ApiError), (status = 504, body = ApiError),
        (status = 507, body = ApiError)))]
pub async fn run_connected(
    State(daemon): Shared,
    upgrade: Upgrade<Port>,
    Json(request): Json<ConnectRequest>,
) -> Outcome<Response> {
    let asked = Asked::now();
    ports::check(request.port)?;
    let order = Order { ephemeral: !request.keep, ..Order::create(request.create) };
    let work = async {
        let newborn = birth::birth(&daemon, asked, order).await?;
        let guest = ports::connect(&daemon, &newborn.vm(), request.port).await?;
        Ok::<_, Fault>((newborn, guest))
    };
    // Dropped wherever this ends, the VM goes with it.
    let (newborn, guest) = tokio::select! {
        done = work => done?,
        () = daemon.stop.cancelled() => return Err(Fault::new(ErrorCode::Internal, "the daemon was asked to stop")),
    };
    let vm = newborn.vm();
    let shown = vm.shown();
    let (newborn, end) = if request.keep {
        let _lives_on = newborn.keep();
        (None, ClientEnd::PassedOn)
    } else {
        (Some(newborn), ClientEnd::EndsAll)
    };
    let stop = daemon.stop.clone();
    let response = upgrade.then(async move |client| {
        tokio::select! {
            () = ports::relay(client, guest, end, vm.wait_gone()) => {}
            () = stop.cancelled() => {}
        }
        drop(newborn);
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
