//! Images: root disks of VMs.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::http::listing::NameParams;
use crate::http::routes::extract::{Named, Params, Shared, blocking_reader};
use crate::http::upload;
use crate::ops::admit;
use axum::Json;
use axum::body::{Body, HttpBody as _};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dayfly_api::types::{ApiError as ErrorBody, Image, ImageUpload, List};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;

/// Lists images, by name.
#[utoipa::path(
    get,
    operation_id = "list_images",
    path = "/v1/images",
    params(NameParams),
    responses(
        (status = 200, body = List<Image>), (status = 400, body = ErrorBody),
        (status = 500, body = ErrorBody)
    )
)]
pub async fn list(
    State(daemon): Shared,
    Params(params): Params<NameParams>,
) -> Outcome<Json<List<Image>>> {
    let names = params.checked("images")?;
    let items = blocking(move || daemon.templates.images()).await?;
    names.page(items, |image| &image.name).map(Json)
}

/// One image.
#[utoipa::path(
    get,
    operation_id = "inspect_image",
    path = "/v1/images/{name}",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Image), (status = 404, body = ErrorBody),
        (status = 422, body = ErrorBody)
    )
)]
pub async fn inspect(State(daemon): Shared, Named(name): Named) -> Outcome<Json<Image>> {
    blocking(move || daemon.templates.image(&name)).await.map(Json)
}

/// Stores an image. The body has a 4-byte little-endian length, an ImageUpload of that length as
/// JSON, and the raw disk as one zstd frame.
#[utoipa::path(
    put,
    operation_id = "upload_image",
    path = "/v1/images/{name}",
    params(("name" = String, Path)),
    request_body(content = Vec<u8>, content_type = "application/octet-stream",
        description = "length of the head, ImageUpload in JSON, zstd frame"),
    responses(
        (status = 201, body = Image), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 507, body = ErrorBody)
    )
)]
pub async fn upload(
    State(daemon): Shared,
    Named(name): Named,
    body: Body,
) -> Outcome<(StatusCode, Json<Image>)> {
    admit::room(&daemon, "an upload", body.size_hint().exact().unwrap_or(0)).await?;
    let mut body = admit::Upload::new(daemon.clone(), blocking_reader(body));
    let image = blocking(move || {
        let head: ImageUpload = upload::read_head(&mut body)?;
        let put = daemon.templates.put_image(&name, &head, &mut body);
        body.result(put)
    })
    .await?;
    Ok((StatusCode::CREATED, Json(image)))
}

/// The raw disk of an image, as one zstd frame. Its digest is that of the image. The image stays in
/// the store until the client has the disk.
#[utoipa::path(
    get,
    operation_id = "download_image",
    path = "/v1/images/{name}/disk",
    params(("name" = String, Path)),
    responses(
        (status = 200, body = Vec<u8>, content_type = "application/zstd"),
        (status = 404, body = ErrorBody), (status = 422, body = ErrorBody)
    )
)]
pub async fn download(State(daemon): Shared, Named(name): Named) -> Outcome<Response> {
    // An error means that the semaphore is closed, which it never is.
    let turn = DOWNLOADS.acquire().await.map_err(ApiError::internal)?;
    let image = blocking(move || daemon.templates.open_image(&name)).await?;
    let (sender, pieces) = mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let mut out = Pieces(sender);
        if let Err(e) = compress(&image, &mut out)
            && e.kind() != io::ErrorKind::BrokenPipe
        {
            tracing::error!(image = %image.manifest.name, "a download of its disk: {e}");
            // The connection ends before the last piece, so the client knows.
            let _ = out.0.blocking_send(Err(e));
        }
    });
    let body = Body::from_stream(ReceiverStream::new(pieces));
    Ok(([(header::CONTENT_TYPE, "application/zstd")], body).into_response())
}

/// Downloads at a time; others wait. A client that does not read keeps a thread, of which all other
/// work of the daemon needs some.
static DOWNLOADS: Semaphore = Semaphore::const_new(8);
/// Pieces of an answer that may wait for the client.
const WAITING: usize = 4;
/// Length of a piece.
const PIECE_BYTES: usize = 256 << 10;
/// Speed matters most, because the client is on this computer and most of a disk is zero.
const LEVEL: i32 = 1;

/// A blocking writer of an answer's pieces.
struct Pieces(mpsc::Sender<io::Result<Bytes>>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Ok(Bytes::copy_from_slice(bytes));
        // The client has gone.
        self.0.blocking_send(piece).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn compress(image: &dayfly_store::Image, out: &mut Pieces) -> io::Result<()> {
    let client = out.0.clone();
    let out = io::BufWriter::with_capacity(PIECE_BYTES, out);
    let mut encoder = zstd::Encoder::new(out, LEVEL)?;
    let mut disk = DiskReader { file: &image.disk, at: 0, client };
    io::copy(&mut disk, &mut encoder)?;
    encoder.finish()?.flush()
}

/// A reader that moves no offset, because other processes have the same description.
struct DiskReader<'a> {
    file: &'a File,
    at: u64,
    /// Asked whether the client is still there, because a disk of zeroes gives no piece for long.
    client: mpsc::Sender<io::Result<Bytes>>,
}

impl Read for DiskReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.client.is_closed() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let got = self.file.read_at(buffer, self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

/// Removes an image that no snapshot and no VM uses.
#[utoipa::path(delete, operation_id = "remove_image",
    path = "/v1/images/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove(State(daemon): Shared, Named(name): Named) -> Outcome<StatusCode> {
    blocking(move || daemon.templates.remove_image(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
