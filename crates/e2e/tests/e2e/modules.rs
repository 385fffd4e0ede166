//! Modules of the guest's kernel: loaded by programs of VMs, and needed by docker in a VM.

use crate::harness::{World, fed, inspect, ok, sh, world};
use crate::images::archive;

/// Loads modules, and uses each of them apart from nf_tables. The kernel itself loads overlay,
/// bridge and veth, with the image's /sbin/modprobe.
const USE: &str = r#"set -e
modprobe -a nf_tables vsock_loopback
mkdir -p /tmp/o/lower /tmp/o/upper /tmp/o/work /tmp/o/all
echo below >/tmp/o/lower/file
mount -t overlay -o lowerdir=/tmp/o/lower,upperdir=/tmp/o/upper,workdir=/tmp/o/work o /tmp/o/all
cat /tmp/o/all/file
umount /tmp/o/all
ip link add br0 type bridge
ip link add v0 type veth peer name v1
ip link set v0 master br0
ip -o link show v0 | grep -o 'master br0'
ip link del v0; ip link del br0
python3 -c '
import _socket as s
server = s.socket(40, s.SOCK_STREAM, 0)
server.bind((0xffffffff, 99)); server.listen(1)
client = s.socket(40, s.SOCK_STREAM, 0)
client.connect((1, 99)); client.send(b"looped")
print(s.socket(fileno=server._accept()[0]).recv(6).decode())'
for module in overlay bridge veth nf_tables vsock_loopback; do
    grep -q "^$module " /proc/modules || { echo "$module is not loaded" >&2; exit 1; }
done"#;
const USED: &str = "below\nmaster br0\nlooped";

/// A Debian image with `include`, and its snapshot of the same name.
fn debian(name: &str, include: &str, memory: &str) {
    ok(&["image", "build", "--debian", "bookworm", "--include", include, name]);
    ok(&["bake", name, "-t", name, "-m", memory]);
}

fn end(world: &World, names: &[&str]) {
    world.remove_all();
    for name in names {
        ok(&["snapshots", "rm", name]);
    }
    world.clean();
}

#[test]
#[ignore = "minutes: a Debian image with kmod"]
fn modules_load_in_a_vm_and_its_clones_and_forks() {
    const NAME: &str = "e2e-modules";
    let world = world();
    debian(NAME, "kmod,iproute2,python3-minimal", "256M");
    let shown = ok(&["image", "ls"]);
    assert!(!shown.contains("modules of kernel"), "no root disk: {shown}");

    ok(&["create", "--boot", NAME, "--name", "cold"]);
    // The modules of another kernel that an image has stay visible.
    sh("cold", "mkdir -p /lib/modules/1.2.3 && ls /lib/modules | wc -l | grep -qx 2");
    assert_eq!(sh("cold", USE), USED);
    ok(&["rm", "-f", "cold"]);

    ok(&["create", "--name", "clone", NAME]);
    assert_eq!(inspect("clone")["vm"]["state"], "running");
    ok(&["fork", "clone", "--as", "e2e-modules-later"]);
    let fork = ok(&["fork", "clone"]);
    for vm in ["clone", fork.trim()] {
        assert_eq!(sh(vm, USE), USED, "{vm}");
    }
    // Clones share the disk, so none may write to it.
    assert_eq!(
        sh("clone", "cat /sys/block/vdb/ro; echo x 2>&- >/dev/vdb || echo refused"),
        "1\nrefused"
    );
    ok(&["snapshot", "clone", "-t", "e2e-modules-next"]);
    for snapshot in ["e2e-modules-next", "e2e-modules-later"] {
        ok(&["create", "--name", "after", snapshot]);
        assert_eq!(sh("after", USE), USED, "{snapshot}");
        ok(&["rm", "-f", "after"]);
    }
    end(&world, &["e2e-modules-next", "e2e-modules-later", NAME]);
    ok(&["image", "rm", NAME]);

    // This image has neither modprobe nor a folder /lib. Its VMs have the modules too.
    let folder = tempfile::tempdir().unwrap();
    let tiny = archive(folder.path(), r#"{"Env":["PATH=/bin"]}"#);
    let built = fed(&["image", "build", "--from", "-", "e2e-tiny-modules"], &tiny);
    assert_eq!(built.code, 0, "{}", built.err);
    let insert = "k=/lib/modules/$(cat /proc/sys/kernel/osrelease); \
                  /bin/busybox insmod $k/kernel/fs/overlayfs/overlay.ko* && \
                  grep -c ^overlay /proc/modules";
    assert_eq!(ok(&["run", "e2e-tiny-modules", "--", "/bin/sh", "-c", insert]), "1");
    for name in ok(&["snapshots", "-q"]).lines().filter(|n| n.starts_with("e2e-tiny-modules")) {
        ok(&["snapshots", "rm", name]);
    }
    ok(&["image", "rm", "e2e-tiny-modules"]);
    world.clean();
}

#[test]
#[ignore = "minutes: docker under emulation"]
fn docker_of_debian_runs_a_container_in_a_vm() {
    const NAME: &str = "e2e-docker";
    const SOCKET: &str = "--containerd=/run/containerd/containerd.sock";
    let world = world();
    debian(NAME, "docker.io,iptables,kmod,procps", "1G");
    ok(&["create", "--name", "docker", NAME]);
    // As Debian's units start them: dockerd would give its own containerd 15 s, which are too few
    // under emulation.
    ok(&["exec", "-d", "docker", "--", "containerd"]);
    sh(
        "docker",
        "until ctr version >/dev/null 2>&1; do pgrep -x containerd >/dev/null || exit 1; \
                  sleep 1; done",
    );
    ok(&["exec", "-d", "docker", "--", "dockerd", SOCKET]);
    // Until it serves, or has ended.
    sh(
        "docker",
        "until docker version >/dev/null 2>&1; do pgrep -x dockerd >/dev/null || exit 1; \
                  sleep 1; done",
    );
    let folder = tempfile::tempdir().unwrap();
    let image = archive(folder.path(), r#"{"Env":["PATH=/bin"],"Cmd":["/bin/echo","contained"]}"#);
    std::fs::write(folder.path().join("tiny.tar"), image).unwrap();
    let file = folder.path().join("tiny.tar").display().to_string();
    ok(&["cp", &file, "docker:/root/tiny.tar"]);
    assert!(sh("docker", "docker load -i /root/tiny.tar").contains("tiny:1"));
    assert_eq!(sh("docker", "docker run --rm tiny:1"), "contained");
    // docker also loads what dayfly saves.
    assert_eq!(ok(&["load", "-i", &file]), "Loaded image: tiny:1");
    let saved = folder.path().join("saved.tar").display().to_string();
    ok(&["save", "-o", &saved, "tiny:1"]);
    ok(&["rmi", "tiny:1"]);
    ok(&["cp", &saved, "docker:/root/saved.tar"]);
    sh("docker", "docker rmi -f tiny:1");
    assert!(sh("docker", "docker load -i /root/saved.tar").contains("tiny:1"));
    assert_eq!(sh("docker", "docker run --rm tiny:1"), "contained");
    // In its own network, behind docker's bridge.
    let link = sh("docker", "docker run --rm tiny:1 /bin/cat /proc/net/dev");
    assert!(link.contains("eth0"), "{link}");
    assert_eq!(sh("docker", "docker info -f '{{.Driver}}'"), "overlay2");
    end(&world, &[NAME]);
    ok(&["image", "rm", NAME]);
}
