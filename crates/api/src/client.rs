//! The typed client of the daemon: one method for each route, over the daemon's unix socket.
//!
//! A call with a short answer leaves its connection open for the next one; any other has a connection of its own. Dropping the answer of a long call ([`ProgressStream`],
//! [`ByteStream`], [`Exec`], [`Connection`]) closes its connection, by which the daemon knows that nobody waits any more.
//!
//! What may not enter: retries, starting a daemon, anything that prints.

mod call;
mod exec;
mod port;
mod stream;

pub use call::{Body, ClientError, empty_body, stream_body};
pub use exec::{Exec, ExecEvent, ExecInput, ExecOutput, Finished};
pub use port::Connection;
pub use stream::{ByteStream, MAX_LINE_BYTES, ProgressStream};

use crate::agent::ExecSpec;
use crate::types::{
    BakeRequest, Colours, ConnectRequest, CreateManyRequest, CreateRequest, Footprint, ForkRequest, Forked,
    Image, ImageUpload, Info, Kernel, KernelUpload, Leak, List, RehearseRequest, RemoveManyRequest,
    RunRequest, Snapshot, SnapshotRequest, StoreStats, StoreUsage, VerifyRequest, Vm, VmDetails,
};
use call::{query, segment};
use dayfly_units::Name;
use http::Method;
use hyper::client::conn::http1::SendRequest;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A daemon, by its socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    /// A connection on which nothing is under way.
    idle: Arc<Mutex<Option<SendRequest<Body>>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Result<T> = std::result::Result<T, ClientError>;

impl Client {
    /// The daemon that listens on `socket`. Nothing is opened yet.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), idle: Arc::default() }
    }

    /// Where the daemon listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What the daemon is and runs on.
    ///
    /// # Errors
    /// [`ClientError`], as for every call below: no connection, an answer that is none of ours, or the daemon's own error.
    pub async fn info(&self) -> Result<Info> {
        self.json(Method::GET, "/v1/info".into(), empty_body()).await
    }

    /// Every image.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn images(&self) -> Result<Vec<Image>> {
        self.list("/v1/images").await
    }

    /// One image.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn image(&self, name: &Name) -> Result<Image> {
        self.json(Method::GET, format!("/v1/images/{name}"), empty_body()).await
    }

    /// Stores an image; `disk` is one zstd frame of the raw disk.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn upload_image(&self, name: &Name, head: &ImageUpload, disk: Body) -> Result<Image> {
        self.json(Method::PUT, format!("/v1/images/{name}"), call::with_head(head, disk)?).await
    }

    /// Removes an image that nothing uses.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_image(&self, name: &Name) -> Result<()> {
        self.nothing(Method::DELETE, format!("/v1/images/{name}"), empty_body()).await
    }

    /// Every kernel.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn kernels(&self) -> Result<Vec<Kernel>> {
        self.list("/v1/kernels").await
    }

    /// One kernel.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn kernel(&self, name: &Name) -> Result<Kernel> {
        self.json(Method::GET, format!("/v1/kernels/{name}"), empty_body()).await
    }

    /// Stores a kernel; `files` is one zstd frame of vmlinux followed by the initramfs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn upload_kernel(&self, name: &Name, head: &KernelUpload, files: Body) -> Result<Kernel> {
        self.json(Method::PUT, format!("/v1/kernels/{name}"), call::with_head(head, files)?).await
    }

    /// Removes a kernel that nothing uses.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_kernel(&self, name: &Name) -> Result<()> {
        self.nothing(Method::DELETE, format!("/v1/kernels/{name}"), empty_body()).await
    }

    /// Every snapshot.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        self.list("/v1/snapshots").await
    }

    /// One snapshot.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshot(&self, name: &Name) -> Result<Snapshot> {
        self.json(Method::GET, format!("/v1/snapshots/{name}"), empty_body()).await
    }

    /// What a snapshot's RAM is used for.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshot_colours(&self, name: &Name) -> Result<Colours> {
        self.json(Method::GET, format!("/v1/snapshots/{name}/colours"), empty_body()).await
    }

    /// The same as a picture, a PNG, `width` pages to a row.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshot_picture(&self, name: &Name, width: u32) -> Result<Vec<u8>> {
        let path = format!("/v1/snapshots/{name}/colours.png?width={width}");
        Ok(self.short(Method::GET, &path, empty_body()).await?.to_vec())
    }

    /// Records which pages one run of a clone touches.
    ///
    /// # Errors
    /// [`ClientError`] until the stream begins; what goes wrong later is in the stream.
    pub async fn rehearse(&self, name: &Name, request: &RehearseRequest) -> Result<ProgressStream> {
        let path = format!("/v1/snapshots/{name}/rehearse");
        let answer = self.call(Method::POST, &path, call::json_body(request)?).await?;
        Ok(ProgressStream::new(answer))
    }

    /// Removes a snapshot that nothing uses.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_snapshot(&self, name: &Name) -> Result<()> {
        self.nothing(Method::DELETE, format!("/v1/snapshots/{name}"), empty_body()).await
    }

    /// Boots an image, warms it up, snapshots it.
    ///
    /// # Errors
    /// [`ClientError`] until the stream begins; what goes wrong later is in the stream.
    pub async fn bake(&self, request: &BakeRequest) -> Result<ProgressStream> {
        let answer = self.call(Method::POST, "/v1/bake", call::json_body(request)?).await?;
        Ok(ProgressStream::new(answer))
    }

    /// The VMs that run, or all.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn vms(&self, all: bool) -> Result<Vec<Vm>> {
        self.list(&format!("/v1/vms?all={all}")).await
    }

    /// Makes and starts a VM; answered when its agent has its identity.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create(&self, request: &CreateRequest) -> Result<Vm> {
        self.json(Method::POST, "/v1/vms".into(), call::json_body(request)?).await
    }

    /// Makes and starts many VMs, all of them or none; answered when each agent has its identity.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_many(&self, request: &CreateManyRequest) -> Result<Vec<Vm>> {
        let list: List<Vm> =
            self.json(Method::POST, "/v1/batch/create".into(), call::json_body(request)?).await?;
        Ok(list.items)
    }

    /// Starts clones of a VM that runs, all of them or none; answered when each agent has its identity.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn fork(&self, vm: &str, request: &ForkRequest) -> Result<Forked> {
        let path = format!("/v1/vms/{}/fork", segment(vm));
        self.json(Method::POST, path, call::json_body(request)?).await
    }

    /// Removes many VMs; answered when the memory of all is free.
    ///
    /// # Errors
    /// [`ClientError`], which names the first that was not removed; the others were.
    pub async fn remove_many(&self, request: &RemoveManyRequest) -> Result<()> {
        self.nothing(Method::POST, "/v1/batch/remove".into(), call::json_body(request)?).await
    }

    /// A VM by id or name, measured now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn vm(&self, vm: &str) -> Result<VmDetails> {
        self.json(Method::GET, format!("/v1/vms/{}", segment(vm)), empty_body()).await
    }

    /// What a VM holds of its RAM now.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn footprint(&self, vm: &str) -> Result<Footprint> {
        self.json(Method::GET, format!("/v1/vms/{}/footprint", segment(vm)), empty_body()).await
    }

    /// Removes a VM; a running one only with `force`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_vm(&self, vm: &str, force: bool) -> Result<()> {
        let path = format!("/v1/vms/{}?force={force}", segment(vm));
        self.nothing(Method::DELETE, path, empty_body()).await
    }

    /// Stops a VM's vCPUs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn pause(&self, vm: &str) -> Result<()> {
        self.nothing(Method::POST, format!("/v1/vms/{}/pause", segment(vm)), empty_body()).await
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn unpause(&self, vm: &str) -> Result<()> {
        self.nothing(Method::POST, format!("/v1/vms/{}/unpause", segment(vm)), empty_body()).await
    }

    /// Ends a VM without asking it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn kill(&self, vm: &str) -> Result<()> {
        self.nothing(Method::POST, format!("/v1/vms/{}/kill", segment(vm)), empty_body()).await
    }

    /// Snapshots a VM.
    ///
    /// # Errors
    /// [`ClientError`] until the stream begins; what goes wrong later is in the stream.
    pub async fn snapshot_vm(&self, vm: &str, request: &SnapshotRequest) -> Result<ProgressStream> {
        let path = format!("/v1/vms/{}/snapshot", segment(vm));
        let answer = self.call(Method::POST, &path, call::json_body(request)?).await?;
        Ok(ProgressStream::new(answer))
    }

    /// What a VM wrote to its console; with `follow` until it ends.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn logs(&self, vm: &str, follow: bool) -> Result<ByteStream> {
        let path = format!("/v1/vms/{}/logs?follow={follow}", segment(vm));
        Ok(ByteStream::new(self.call(Method::GET, &path, empty_body()).await?))
    }

    /// A file or folder of a VM, as a tar archive whose first entry is it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn read_archive(&self, vm: &str, path: &str) -> Result<ByteStream> {
        let path = format!("/v1/vms/{}/archive?path={}", segment(vm), query(path));
        Ok(ByteStream::new(self.call(Method::GET, &path, empty_body()).await?))
    }

    /// Unpacks a tar archive into an existing folder of a VM.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn write_archive(&self, vm: &str, folder: &str, archive: Body) -> Result<()> {
        let path = format!("/v1/vms/{}/archive?path={}", segment(vm), query(folder));
        self.nothing(Method::PUT, path, archive).await
    }

    /// Runs a program in a VM.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] when the daemon or the agent did not start it.
    pub async fn exec(&self, vm: &str, spec: &ExecSpec) -> Result<Exec> {
        self.upgrade(&format!("/v1/vms/{}/exec", segment(vm)), spec).await
    }

    /// Clones (or boots) a VM and runs a program in it; the VM ends with the connection, unless `keep`.
    ///
    /// # Errors
    /// As for [`Client::exec`].
    pub async fn run(&self, request: &RunRequest) -> Result<Exec> {
        self.upgrade("/v1/run", request).await
    }

    /// Connects to the vsock port of a program that runs in a VM. Each direction ends by itself.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] when nobody listens there.
    pub async fn connect(&self, vm: &str, port: u32) -> Result<Connection> {
        let path = format!("/v1/vms/{}/ports/{port}", segment(vm));
        self.to_port(Method::GET, &path, empty_body()).await
    }

    /// Clones (or boots) a VM and connects to a vsock port of it; the VM ends with our half of the connection, unless `keep`.
    ///
    /// # Errors
    /// As for [`Client::connect`]; then there is no VM.
    pub async fn run_connected(&self, request: &ConnectRequest) -> Result<Connection> {
        self.to_port(Method::POST, "/v1/connect", call::json_body(request)?).await
    }

    /// What a crash left behind. Looks, and changes nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn leaks(&self) -> Result<Vec<Leak>> {
        self.list("/v1/leaks").await
    }

    /// Removes what a crash left behind.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn sweep(&self) -> Result<Vec<Leak>> {
        let list: List<Leak> = self.json(Method::POST, "/v1/sweep".into(), empty_body()).await?;
        Ok(list.items)
    }

    /// The store in numbers.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn store_stats(&self) -> Result<StoreStats> {
        self.json(Method::GET, "/v1/store".into(), empty_body()).await
    }

    /// What each snapshot takes.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn store_usage(&self) -> Result<StoreUsage> {
        self.json(Method::GET, "/v1/store/usage".into(), empty_body()).await
    }

    /// Reads and hashes everything that is stored, or some snapshots and what they stand on.
    ///
    /// # Errors
    /// [`ClientError`] until the stream begins; what goes wrong later is in the stream.
    pub async fn verify_store(&self, request: &VerifyRequest) -> Result<ProgressStream> {
        let answer = self.call(Method::POST, "/v1/store/verify", call::json_body(request)?).await?;
        Ok(ProgressStream::new(answer))
    }

    /// Removes from the store what nothing needs.
    ///
    /// # Errors
    /// [`ClientError`] until the stream begins; what goes wrong later is in the stream.
    pub async fn collect_store(&self) -> Result<ProgressStream> {
        let answer = self.call(Method::POST, "/v1/store/gc", empty_body()).await?;
        Ok(ProgressStream::new(answer))
    }

    /// What is counted and timed, as Prometheus reads it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn metrics(&self) -> Result<String> {
        let text = self.short(Method::GET, "/metrics", empty_body()).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    async fn list<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let list: List<T> = self.json(Method::GET, path.to_owned(), empty_body()).await?;
        Ok(list.items)
    }
}

#[cfg(test)]
mod tests;
