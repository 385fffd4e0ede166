//! A typed client of the daemon, with one method for each route, over the daemon's unix socket.
//!
//! A call with a short answer leaves its connection open for the next such call; each other call
//! has a separate connection. A long call returns a [`ProgressStream`], [`ByteStream`], [`Exec`] or
//! [`Connection`]. Dropping that value closes the connection, by which the daemon detects that the
//! caller no longer waits.
//!
//! A call that creates something is sent once more, with the same key, if its connection breaks.
//! This module retries nothing else, does not start a daemon, and prints nothing.

mod call;
mod error;
mod exec;
mod frames;
mod lists;
mod once;
mod outputs;
mod port;
mod reason;
mod stream;
mod volumes;

pub use call::{Body, Client, empty_body, stream_body};
pub use error::ClientError;
pub use exec::{Exec, ExecEvent, ExecInput, ExecOutput, Finished};
pub use lists::VmQuery;
pub use outputs::{EventQuery, LogOptions};
pub use port::Connection;
pub use stream::{ByteStream, EventStream, MAX_LINE_BYTES, ProgressStream};

use crate::agent::ExecSpec;
use crate::types::{
    BakeRequest, CollectRequest, Colours, ConnectRequest, CreateManyRequest, CreateRequest,
    EgressRequest, ExecResult, Footprint, ForkRequest, Forked, Image, ImageUpload, Info, Kernel,
    KernelUpload, Leak, List, RecordRequest, RemoveManyRequest, RunRequest, Snapshot,
    SnapshotRequest, StoreStats, StoreUsage, TtlRequest, VerifyRequest, Vm, VmDetails, VmExit,
};
use call::{query, segment};
use dayfly_units::{Egress, Name};
use http::Method;
use std::time::Duration;

type Result<T> = std::result::Result<T, ClientError>;

impl Client {
    /// Describes the daemon and its host.
    ///
    /// # Errors
    /// [`ClientError`], as for every method: no connection, an unknown answer, or the daemon's
    /// error.
    pub async fn info(&self) -> Result<Info> {
        self.json(Method::GET, "/v1/info".into(), empty_body()).await
    }

    /// Lists all images.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn images(&self) -> Result<Vec<Image>> {
        self.list("/v1/images").await
    }

    /// Describes one image.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn image(&self, name: &Name) -> Result<Image> {
        self.json(Method::GET, format!("/v1/images/{name}"), empty_body()).await
    }

    /// Stores an image. `disk` is one zstd frame of the raw disk.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn upload_image(&self, name: &Name, head: &ImageUpload, disk: Body) -> Result<Image> {
        self.json(Method::PUT, format!("/v1/images/{name}"), call::with_head(head, disk)?).await
    }

    /// Downloads the raw disk of an image, as one zstd frame. The caller compares the digest.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn download_image(&self, name: &Name) -> Result<ByteStream> {
        self.body_stream(&format!("/v1/images/{name}/disk")).await
    }

    /// Removes an image that nothing uses.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_image(&self, name: &Name) -> Result<()> {
        self.nothing(Method::DELETE, format!("/v1/images/{name}"), empty_body()).await
    }

    /// Lists all kernels.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn kernels(&self) -> Result<Vec<Kernel>> {
        self.list("/v1/kernels").await
    }

    /// Describes one kernel.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn kernel(&self, name: &Name) -> Result<Kernel> {
        self.json(Method::GET, format!("/v1/kernels/{name}"), empty_body()).await
    }

    /// Stores a kernel. `files` is one zstd frame of vmlinux followed by the initramfs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn upload_kernel(
        &self,
        name: &Name,
        head: &KernelUpload,
        files: Body,
    ) -> Result<Kernel> {
        self.json(Method::PUT, format!("/v1/kernels/{name}"), call::with_head(head, files)?).await
    }

    /// Removes a kernel that nothing uses.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_kernel(&self, name: &Name) -> Result<()> {
        self.nothing(Method::DELETE, format!("/v1/kernels/{name}"), empty_body()).await
    }

    /// Lists all snapshots.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        self.list("/v1/snapshots").await
    }

    /// Describes one snapshot.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshot(&self, name: &Name) -> Result<Snapshot> {
        self.json(Method::GET, format!("/v1/snapshots/{name}"), empty_body()).await
    }

    /// Reports what a snapshot's RAM is used for, by colour.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn snapshot_colours(&self, name: &Name) -> Result<Colours> {
        self.json(Method::GET, format!("/v1/snapshots/{name}/colours"), empty_body()).await
    }

    /// Returns the colours of a snapshot's RAM as a PNG picture with `width` pages in a row.
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
    /// [`ClientError`] before the stream begins; later failures are reported in the stream.
    pub async fn record(&self, name: &Name, request: &RecordRequest) -> Result<ProgressStream> {
        let path = format!("/v1/snapshots/{name}/record");
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

    /// Boots an image, warms it up, and makes a snapshot of it.
    ///
    /// # Errors
    /// [`ClientError`] before the stream begins; later failures are reported in the stream.
    pub async fn bake(&self, request: &BakeRequest) -> Result<ProgressStream> {
        self.progress_once("/v1/bake", request).await
    }

    /// Lists the running VMs, or all VMs if `all` is set.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn vms(&self, all: bool) -> Result<Vec<Vm>> {
        self.vms_with(&VmQuery { all, ..VmQuery::default() }).await
    }

    /// Lists the VMs that `query` is about, the oldest first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn vms_with(&self, query: &VmQuery) -> Result<Vec<Vm>> {
        self.list(&query.path()).await
    }

    /// Creates and starts a VM. The daemon answers when the VM's agent has its identity.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create(&self, request: &CreateRequest) -> Result<Vm> {
        self.create_once("/v1/vms", request).await
    }

    /// Creates and starts many VMs, all of them or none. The daemon answers when each agent has its
    /// identity.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_many(&self, request: &CreateManyRequest) -> Result<Vec<Vm>> {
        let list: List<Vm> = self.create_once("/v1/batch/create", request).await?;
        Ok(list.items)
    }

    /// Starts clones of a running VM, all of them or none. The daemon answers when each agent has
    /// its identity.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn fork(&self, vm: &str, request: &ForkRequest) -> Result<Forked> {
        self.create_once(&format!("/v1/vms/{}/fork", segment(vm)), request).await
    }

    /// Removes many VMs. The daemon answers when the memory of all is free.
    ///
    /// # Errors
    /// [`ClientError`] names the first VM that was not removed; the others were removed.
    pub async fn remove_many(&self, request: &RemoveManyRequest) -> Result<()> {
        self.nothing(Method::POST, "/v1/batch/remove".into(), call::json_body(request)?).await
    }

    /// Describes and measures a VM, given by id or name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn vm(&self, vm: &str) -> Result<VmDetails> {
        self.json(Method::GET, format!("/v1/vms/{}", segment(vm)), empty_body()).await
    }

    /// Reports a VM's present memory use, by colour.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn footprint(&self, vm: &str) -> Result<Footprint> {
        self.json(Method::GET, format!("/v1/vms/{}/footprint", segment(vm)), empty_body()).await
    }

    /// Removes a VM. Without `force`, only a VM that has exited is removed.
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

    /// Resumes a VM's vCPUs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn unpause(&self, vm: &str) -> Result<()> {
        self.nothing(Method::POST, format!("/v1/vms/{}/unpause", segment(vm)), empty_body()).await
    }

    /// Kills a VM without a shutdown of the guest.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn kill(&self, vm: &str) -> Result<()> {
        self.nothing(Method::POST, format!("/v1/vms/{}/kill", segment(vm)), empty_body()).await
    }

    /// Asks a VM's guest to power off, and kills the VM after `grace`. Returns when it has ended.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn stop(&self, vm: &str, grace: Duration) -> Result<()> {
        let ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let path = format!("/v1/vms/{}/stop?grace_ms={ms}", segment(vm));
        self.nothing(Method::POST, path, empty_body()).await
    }

    /// Starts a VM that has ended: it boots from its own disks. Returns when it is ready.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn start(&self, vm: &str) -> Result<Vm> {
        self.json(Method::POST, format!("/v1/vms/{}/start", segment(vm)), empty_body()).await
    }

    /// Stops a VM as [`Self::stop`], if it has not ended, and starts it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn restart(&self, vm: &str, grace: Duration) -> Result<Vm> {
        let ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let path = format!("/v1/vms/{}/restart?grace_ms={ms}", segment(vm));
        self.json(Method::POST, path, empty_body()).await
    }

    /// Waits until a VM has ended, and returns how.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn wait(&self, vm: &str) -> Result<VmExit> {
        self.json(Method::GET, format!("/v1/vms/{}/wait", segment(vm)), empty_body()).await
    }

    /// Changes a VM's time to live: it ends after `ttl` from now on, or without a limit.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_ttl(&self, vm: &str, ttl: Option<Duration>) -> Result<Vm> {
        let ttl_ms = ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        let body = call::json_body(&TtlRequest { ttl_ms })?;
        self.json(Method::PUT, format!("/v1/vms/{}/ttl", segment(vm)), body).await
    }

    /// Changes the egress policy of a VM, whose open connections the new policy may cut.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_egress(&self, vm: &str, egress: Egress) -> Result<Vm> {
        let body = call::json_body(&EgressRequest { egress })?;
        self.json(Method::PUT, format!("/v1/vms/{}/egress", segment(vm)), body).await
    }

    /// Makes a snapshot of a VM.
    ///
    /// # Errors
    /// [`ClientError`] before the stream begins; later failures are reported in the stream.
    pub async fn snapshot_vm(&self, vm: &str, request: &SnapshotRequest) -> Result<ProgressStream> {
        self.progress_once(&format!("/v1/vms/{}/snapshot", segment(vm)), request).await
    }

    /// Reads a file or folder of a VM as a tar archive. The first entry is that file or folder.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn read_archive(&self, vm: &str, path: &str) -> Result<ByteStream> {
        let path = format!("/v1/vms/{}/archive?path={}", segment(vm), query(path));
        self.stream(vm, &path).await
    }

    /// Unpacks a tar archive into an existing folder of a VM.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn write_archive(&self, vm: &str, folder: &str, archive: Body) -> Result<()> {
        let path = format!("/v1/vms/{}/archive?path={}", segment(vm), query(folder));
        self.put(vm, path, archive).await
    }

    /// Runs a program in a VM.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] if the daemon or the agent did not start the
    /// program.
    pub async fn exec(&self, vm: &str, spec: &ExecSpec) -> Result<Exec> {
        self.upgrade(&format!("/v1/vms/{}/exec", segment(vm)), spec.clone()).await
    }

    /// Runs a program in a VM to its end, and returns the first `max_output_bytes` of what it wrote
    /// to each of its two streams.
    ///
    /// # Errors
    /// As for [`Client::exec`].
    pub async fn exec_to_end(
        &self,
        vm: &str,
        spec: &ExecSpec,
        max_output_bytes: usize,
    ) -> Result<ExecResult> {
        let path = format!("/v1/vms/{}/exec?max_output_bytes={max_output_bytes}", segment(vm));
        // Sent once and without a key: a daemon that was started meanwhile does not know the key,
        // and would run the program again.
        self.json(Method::POST, path, call::json_body(spec)?).await
    }

    /// Clones (or boots) a VM and runs a program in it. The VM ends with the connection, unless
    /// `keep` is set.
    ///
    /// # Errors
    /// As for [`Client::exec`].
    pub async fn run(&self, request: &RunRequest) -> Result<Exec> {
        self.upgrade("/v1/run", request.clone()).await
    }

    /// Connects to the vsock port of a program that runs in a VM. Each direction ends
    /// independently.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] if no program listens on the port.
    pub async fn connect(&self, vm: &str, port: u32) -> Result<Connection> {
        let path = format!("/v1/vms/{}/ports/{port}", segment(vm));
        self.to_port(Method::GET, &path, empty_body()).await
    }

    /// Clones (or boots) a VM and connects to one of its vsock ports. The VM ends with the client's
    /// half of the connection, unless `keep` is set.
    ///
    /// # Errors
    /// As for [`Client::connect`]; no VM is left then.
    pub async fn run_connected(&self, request: &ConnectRequest) -> Result<Connection> {
        self.to_port(Method::POST, "/v1/connect", call::json_body(request)?).await
    }

    /// Lists the leftovers of a crash, and changes nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn leaks(&self) -> Result<Vec<Leak>> {
        let list: List<Leak> = self.json(Method::GET, "/v1/leaks".into(), empty_body()).await?;
        Ok(list.items)
    }

    /// Removes the leftovers of a crash, and lists what was removed.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn sweep(&self) -> Result<Vec<Leak>> {
        let list: List<Leak> = self.json(Method::POST, "/v1/sweep".into(), empty_body()).await?;
        Ok(list.items)
    }

    /// Reports the store's statistics.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn store_stats(&self) -> Result<StoreStats> {
        self.json(Method::GET, "/v1/store".into(), empty_body()).await
    }

    /// Reports the storage that each snapshot takes.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn store_usage(&self) -> Result<StoreUsage> {
        self.json(Method::GET, "/v1/store/usage".into(), empty_body()).await
    }

    /// Reads and hashes everything in the store, or some snapshots and what they depend on.
    ///
    /// # Errors
    /// [`ClientError`] before the stream begins; later failures are reported in the stream.
    pub async fn verify_store(&self, request: &VerifyRequest) -> Result<ProgressStream> {
        let answer = self.call(Method::POST, "/v1/store/verify", call::json_body(request)?).await?;
        Ok(ProgressStream::new(answer))
    }

    /// Removes unreferenced layers and pages from the store.
    ///
    /// # Errors
    /// [`ClientError`] before the stream begins; later failures are reported in the stream.
    pub async fn collect_store(&self, request: &CollectRequest) -> Result<ProgressStream> {
        let answer = self.call(Method::POST, "/v1/store/gc", call::json_body(request)?).await?;
        Ok(ProgressStream::new(answer))
    }

    /// Verifies the store and repairs what can be repaired.
    ///
    /// # Errors
    /// [`ClientError`] before the stream begins; later failures are reported in the stream.
    pub async fn repair_store(&self) -> Result<ProgressStream> {
        let answer = self.call(Method::POST, "/v1/store/repair", empty_body()).await?;
        Ok(ProgressStream::new(answer))
    }

    /// Returns the daemon's metrics in Prometheus' text format.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn metrics(&self) -> Result<String> {
        let text = self.short(Method::GET, "/metrics", empty_body()).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

#[cfg(test)]
mod tests;
