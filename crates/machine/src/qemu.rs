//! The command lines of QEMU and virtiofsd.
//!
//! QEMU 7.2 runs each CPU in a thread and loses a race when one CPU patches code that another is just translating: the
//! stale translation, a breakpoint, stays ("Oops: int3" after some hundred flips of a static key under load). With
//! `thread=single` it does not happen, but then guests of four vCPUs do not get going. So the threads stay, and the machine's
//! init sees to it that VMs' births flip no static key.

use crate::layout::Layout;
use crate::proto::{CONTROL_PORT_NAME, LOG_PORT_NAME};
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// The machine's address on the network between it and the supervisor.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// The supervisor's.
pub(crate) const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The mask of both.
pub const GUEST_MASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);

/// Finds QEMU.
pub(crate) fn find_qemu() -> Option<PathBuf> {
    find("qemu-system-x86_64", &[])
}

/// Finds virtiofsd: QEMU's own in Debian 12, the separate one later.
pub(crate) fn find_virtiofsd() -> Option<PathBuf> {
    find("virtiofsd", &["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"])
}

fn find(name: &str, places: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join(name));
    places.iter().map(PathBuf::from).chain(on_path).find(|p| p.is_file())
}

/// What QEMU is told beyond the layout.
pub(crate) struct QemuOptions<'a> {
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u64,
    pub(crate) numa_nodes: u32,
    pub(crate) shares: usize,
    /// The supervisor's ends, as descriptor numbers that QEMU inherits.
    pub(crate) control_fd: i32,
    /// The other end of the supervisor's network interface.
    pub(crate) tap_fd: i32,
    /// The name that `ps` shows.
    pub(crate) process_name: &'a str,
}

/// What one NUMA node has.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    first_cpu: u32,
    last_cpu: u32,
    memory_mib: u64,
}

/// CPUs and memory divided evenly, the first nodes getting what does not divide.
fn nodes(cpus: u32, memory_mib: u64, count: u32) -> Vec<Node> {
    let mut next_cpu = 0;
    (0..count)
        .map(|index| {
            let first_cpu = next_cpu;
            next_cpu += cpus / count + u32::from(index < cpus % count);
            let extra = if index == 0 { memory_mib % u64::from(count) } else { 0 };
            Node { first_cpu, last_cpu: next_cpu - 1, memory_mib: memory_mib / u64::from(count) + extra }
        })
        .collect()
}

/// The arguments of QEMU.
pub(crate) fn arguments(layout: &Layout, options: &QemuOptions<'_>) -> Vec<OsString> {
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| list.extend(words.iter().map(OsString::from));
    // A comma in an option's value is doubled (QEMU's QemuOpts syntax).
    let quoted = |path: &Path| path.display().to_string().replace(',', ",,");
    let cpus = options.cpus.to_string();
    let command_line = "console=ttyS0 quiet panic=-1 oops=panic reboot=t mitigations=off tsc=reliable random.trust_cpu=on rdinit=/init";
    add(&[
        "-name",
        &format!("dayfly-machine,process={}", options.process_name),
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ]);
    add(&["-machine", "q35,usb=off,vmport=off,smbus=off,sata=off,hpet=off", "-cpu", "EPYC-v3", "-no-reboot"]);
    add(&[
        "-accel",
        "tcg,thread=multi,tb-size=1024",
        "-smp",
        &cpus,
        "-m",
        &format!("{}M", options.memory_mib),
    ]);
    // Shared, because virtiofsd maps it, too.
    for (index, node) in nodes(options.cpus, options.memory_mib, options.numa_nodes).iter().enumerate() {
        let memory = format!("memory-backend-memfd,id=memory{index},size={}M,share=on", node.memory_mib);
        let (first, last) = (node.first_cpu, node.last_cpu);
        add(&["-object", &memory]);
        add(&["-numa", &format!("node,nodeid={index},cpus={first}-{last},memdev=memory{index}")]);
    }
    add(&[
        "-kernel",
        &layout.vmlinux().display().to_string(),
        "-initrd",
        &layout.initramfs().display().to_string(),
    ]);
    add(&["-append", command_line]);
    add(&[
        "-chardev",
        &format!("file,id=console,path={}", quoted(&layout.console_log())),
        "-serial",
        "chardev:console",
    ]);
    add(&[
        "-blockdev",
        &format!(
            "driver=file,node-name=file,filename={},aio=threads,discard=unmap,locking=on",
            quoted(&layout.disk())
        ),
    ]);
    add(&["-blockdev", "driver=raw,node-name=disk,file=file,discard=unmap,detect-zeroes=unmap"]);
    add(&["-device", "virtio-blk-pci,drive=disk,disable-legacy=on"]);
    add(&["-netdev", &format!("tap,id=net,fd={}", options.tap_fd)]);
    add(&["-device", "virtio-net-pci,netdev=net,disable-legacy=on,romfile="]);
    add(&["-device", "virtio-serial-pci,disable-legacy=on"]);
    add(&["-chardev", &format!("socket,id=control,fd={}", options.control_fd)]);
    add(&["-device", &format!("virtserialport,chardev=control,name={CONTROL_PORT_NAME}")]);
    add(&["-chardev", &format!("file,id=log,path={}", quoted(&layout.daemon_log()))]);
    add(&["-device", &format!("virtserialport,chardev=log,name={LOG_PORT_NAME}")]);
    add(&[
        "-device",
        "virtio-rng-pci,disable-legacy=on",
        "-device",
        "virtio-balloon-pci,disable-legacy=on,free-page-reporting=on",
    ]);
    for index in 0..options.shares {
        add(&["-chardev", &format!("socket,id=share{index},path={}", quoted(&layout.share_socket(index)))]);
        add(&[
            "-device",
            &format!("vhost-user-fs-pci,chardev=share{index},tag=share{index},queue-size=1024"),
        ]);
    }
    list
}

/// The arguments of virtiofsd; `socket` is a listening descriptor that it inherits.
pub(crate) fn virtiofsd_arguments(folder: &Path, socket: i32) -> Vec<OsString> {
    let mut source = OsString::from("source=");
    source.push(folder);
    let words = [
        OsString::from(format!("--fd={socket}")),
        "-o".into(),
        source,
        "-o".into(),
        "cache=auto".into(),
        "-o".into(),
        "sandbox=chroot".into(),
        "-o".into(),
        "no_posix_lock".into(),
        "-o".into(),
        "no_flock".into(),
        "-o".into(),
        "xattr".into(),
        "-f".into(),
    ];
    words.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_all_cpus_and_all_memory() {
        for count in 1..=4 {
            for cpus in count..=16 {
                let nodes = nodes(cpus, 4097, count);
                assert_eq!(nodes.iter().map(|n| n.memory_mib).sum::<u64>(), 4097);
                assert_eq!(nodes.iter().map(|n| n.last_cpu + 1 - n.first_cpu).sum::<u32>(), cpus);
                assert!(nodes.windows(2).all(|w| w[1].first_cpu == w[0].last_cpu + 1), "{nodes:?}");
            }
        }
    }
}
