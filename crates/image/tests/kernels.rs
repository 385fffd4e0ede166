//! Debian's real kernels: fetched through apt once (kept under the target folder), unpacked, and
//! packed for a guest.
#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_image::kernel::{KernelSource, build, fetch_debian};
use dayfly_image::{KernelManifest, Sealed};
use std::path::Path;

fn kernel(version: &str, modules: &[&str]) {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("image-cache");
    let tree = fetch_debian(version, Some(&cache)).unwrap();
    assert!(tree.package.starts_with(&format!("linux-image-{version}.")), "{tree:?}");
    // A package in the cache is not fetched again.
    assert_eq!(fetch_debian(version, Some(&cache)).unwrap(), tree);
    let source = KernelSource::in_tree(&tree.folder).unwrap();
    let out = tempfile::tempdir().unwrap();
    // Any static program can stand in for the agent.
    let agent = Path::new("/bin/busybox");
    let built = build(&source, agent, Some(&cache), out.path()).unwrap();
    let manifest = KernelManifest::load(&out.path().join("manifest")).unwrap();
    assert_eq!(manifest, built.manifest);
    assert!(
        manifest.release.starts_with(&format!("{version}."))
            && manifest.release.ends_with("-cloud-amd64")
    );
    assert!(built.vmlinux.metadata().unwrap().len() > 30 << 20);
    let names: Vec<&str> = manifest.modules.iter().map(|m| m.rsplit('/').next().unwrap()).collect();
    assert_eq!(names, modules);
    assert!(build(&source, agent, Some(&cache), out.path()).unwrap().cached);
}

#[test]
fn debian_6_1() {
    kernel(
        "6.1",
        &[
            "virtio_ring.ko",
            "virtio.ko",
            "virtio_mmio.ko",
            "virtio_blk.ko",
            "vsock.ko",
            "vmw_vsock_virtio_transport_common.ko",
            "vmw_vsock_virtio_transport.ko",
            "virtio-rng.ko",
            "pvpanic.ko",
            "pvpanic-mmio.ko",
            "failover.ko",
            "net_failover.ko",
            "virtio_net.ko",
            "inet_diag.ko",
            "tcp_diag.ko",
        ],
    );
}

#[test]
fn debian_6_12() {
    kernel(
        "6.12",
        &[
            "virtio_mmio.ko",
            "virtio_blk.ko",
            "vsock.ko",
            "vmw_vsock_virtio_transport_common.ko",
            "vmw_vsock_virtio_transport.ko",
            "virtio-rng.ko",
            "pvpanic.ko",
            "pvpanic-mmio.ko",
            "failover.ko",
            "net_failover.ko",
            "virtio_net.ko",
            "inet_diag.ko",
            "tcp_diag.ko",
        ],
    );
}
