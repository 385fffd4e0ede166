//! Folders of other hosts: a process there offers one, and makes the streams to it that the daemon
//! asks for ([`crate::volumes::offers`]).

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::http::routes::extract::{Shared, Word};
use crate::http::routes::upgrade::{Upgrade, Volume};
use crate::http::session::Client;
use crate::ops::volumes::is_used;
use crate::volumes::offers::{Offer, checked};
use axum::extract::State;
use axum::response::Response;
use dayfly_api::types::ApiError as ErrorBody;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::upgrade::downcast;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, interval};

/// How long an offer stays that no VM has used, if the client does not say that its command has
/// ended. The client may bake an image meanwhile.
const UNUSED: Duration = Duration::from_secs(3600);
/// Period of the look whether a VM still has the folder.
const LOOK: Duration = Duration::from_secs(5);

/// Offers a folder of the client's host, with `Upgrade: dayfly-volume`. After the 101 the daemon
/// sends a line for each stream that it needs: the name of the stream. The last line is `end`, when
/// no VM has the folder any more. The client sends a line feed when it makes no VM with the folder
/// any more. The offer ends with the connection.
#[utoipa::path(
    post,
    operation_id = "offer_folder",
    path = "/v1/volumes/offers/{token}",
    params(("token" = String, Path)),
    responses((status = 101), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody))
)]
pub async fn offer(
    State(daemon): Shared,
    Word(token): Word,
    upgrade: Upgrade<Volume>,
) -> Outcome<Response> {
    let offer = daemon.offers.offer(token)?;
    Ok(upgrade.then(move |client| keep(daemon, offer, client)))
}

async fn keep(daemon: Arc<Daemon>, mut offer: Offer, mut client: Client) {
    // Whether the folder may still get its first VM.
    let (begun, mut waits) = (Instant::now(), true);
    let mut look = interval(LOOK);
    let mut byte = [0];
    loop {
        let line = tokio::select! {
            stream = offer.next() => match stream {
                Some(stream) => stream,
                None => return,
            },
            read = client.read(&mut byte) => match (read, byte) {
                (Ok(1), [b'\n']) => {
                    waits = false;
                    continue;
                }
                // The client has gone, or breaks the protocol.
                _ => return,
            },
            () = daemon.stop.cancelled() => return,
            _ = look.tick() => {
                let used = is_used(&daemon, &offer.token);
                waits &= !used && begun.elapsed() < UNUSED;
                if used || waits {
                    continue;
                }
                "end".to_owned()
            }
        };
        let sent = client.write_all(format!("{line}\n").as_bytes()).await;
        if sent.is_err() || client.flush().await.is_err() || line == "end" {
            return;
        }
    }
}

/// Makes a stream that the daemon has asked for, with `Upgrade: dayfly-volume`. After the 101 the
/// connection carries the FUSE messages of a guest, which the client has to serve.
#[utoipa::path(
    post,
    operation_id = "stream_folder",
    path = "/v1/volumes/streams/{stream}",
    params(("stream" = String, Path)),
    responses((status = 101), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody))
)]
pub async fn stream(
    State(daemon): Shared,
    Word(name): Word,
    upgrade: Upgrade<Volume>,
) -> Outcome<Response> {
    checked(&name)?;
    if !daemon.offers.wants(&name) {
        return Err(ApiError::not_found("stream: none of this name is wanted"));
    }
    Ok(upgrade.then(async move |client| match plain(client) {
        Ok(stream) => daemon.offers.deliver(&name, stream),
        Err(why) => tracing::error!("a stream to a folder: {why}"),
    }))
}

/// The socket of a connection, without this daemon's part in it.
fn plain(client: Client) -> Result<StdStream, String> {
    let parts = downcast::<TokioIo<UnixStream>>(client.into_inner());
    let parts = parts.map_err(|_| "expected a connection over a unix socket".to_owned())?;
    if !parts.read_buf.is_empty() {
        return Err(format!(
            "expected nothing of the client before the guest's first message, got {} bytes",
            parts.read_buf.len()
        ));
    }
    let stream = parts.io.into_inner().into_std().map_err(|e| e.to_string())?;
    stream.set_nonblocking(false).map_err(|e| e.to_string())?;
    Ok(stream)
}

#[cfg(test)]
#[path = "offers_tests.rs"]
mod tests;
