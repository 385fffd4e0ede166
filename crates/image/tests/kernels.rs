//! Debian's real kernels: fetched through apt once (kept under the target folder), unpacked, and
//! packed for a guest.
#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_image::kernel::{KernelSource, build, build_modules, fetch_debian};
use dayfly_image::{ImageManifest, KernelManifest, Sealed};
use dayfly_units::MODULES_SOURCE;
use std::path::Path;
use std::process::Command;

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
    modules_disk(&source, &cache);
}

/// The disk of all modules has the lists of depmod, and each module as in the package, as root's.
fn modules_disk(source: &KernelSource, cache: &Path) {
    let out = tempfile::tempdir().unwrap();
    let built = build_modules(source, Some(cache), out.path()).unwrap().unwrap();
    let disk = out.path().join("root.ext4");
    assert_eq!(ImageManifest::load(&out.path().join("manifest")).unwrap(), built.manifest);
    assert!(built.manifest.source.starts_with(MODULES_SOURCE), "{:?}", built.manifest);
    let ask = |request: &str| {
        let mut debugfs = Command::new("/sbin/debugfs");
        let said = debugfs.args(["-R", request]).arg(&disk).output().unwrap();
        String::from_utf8_lossy(&said.stdout).into_owned()
    };
    let dep = ask("cat modules.dep");
    let is_overlay = |name: &&str| name.starts_with("kernel/fs/overlayfs/overlay.ko");
    let mut names = dep.lines().filter_map(|line| Some(line.split_once(':')?.0));
    let overlay = names.find(is_overlay).unwrap_or_else(|| panic!("{dep}"));
    assert!(ask("cat modules.alias").contains("alias rtnl-link-bridge bridge"));
    assert!(ask("ls -l .").contains("modules.builtin.alias.bin"));
    let stat = ask(&format!("stat {overlay}"));
    assert!(stat.contains("Mode:  0644") && stat.contains("User:     0"), "{stat}");
    let dumped = out.path().join("overlay");
    ask(&format!("dump {overlay} {}", dumped.display()));
    let package = std::fs::read(source.modules.as_ref().unwrap().join(overlay)).unwrap();
    assert!(std::fs::read(dumped).unwrap() == package, "{overlay}");
    // Modules without the cache give the same bytes.
    let fresh = tempfile::tempdir().unwrap();
    let again = build_modules(source, Some(fresh.path()), &fresh.path().join("out")).unwrap();
    let again = again.unwrap();
    assert_eq!(again.manifest.digest, built.manifest.digest);
    assert!(!again.cached);
    let again = build_modules(source, Some(fresh.path()), &fresh.path().join("out")).unwrap();
    assert!(again.unwrap().cached);
}

#[test]
fn a_kernel_without_modules_has_no_disk_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let build = |modules| {
        let source = KernelSource { kernel: "/vmlinuz".into(), modules };
        build_modules(&source, Some(folder.path()), folder.path()).unwrap()
    };
    assert_eq!(build(None), None);
    assert_eq!(build(Some(folder.path().to_owned())), None);
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
            "virtio_balloon.ko",
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
            "virtio_balloon.ko",
        ],
    );
}
