//! The command lines of QEMU and virtiofsd.
//!
//! QEMU 7.2 runs each CPU in a thread. It has a race if one CPU patches code that another CPU is
//! just translating: the stale translation, a breakpoint, stays. The kernel then reports "Oops:
//! int3" after some hundred flips of a static key under load. `thread=single` avoids the race, but
//! then guests with four vCPUs do not boot. So the threads stay, and the machine's init prevents
//! flips of static keys at a VM's creation (`steady`).

use crate::probe::Accelerator;
use dayfly_machine_init::{CONTROL_MAC, CONTROL_PORT_NAME, LOG_PORT_NAME, UPLINK_MAC};
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// The supervisor's address on the network between machine and supervisor.
pub(crate) const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// Finds QEMU on the PATH.
pub(crate) fn find_qemu() -> Option<PathBuf> {
    find("qemu-system-x86_64", &[])
}

/// Finds virtiofsd: QEMU's own in Debian 12, the separate program in later releases.
pub(crate) fn find_virtiofsd() -> Option<PathBuf> {
    find("virtiofsd", &["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"])
}

/// Finds a program in these places or on the PATH.
pub(crate) fn find(name: &str, places: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join(name));
    places.iter().map(PathBuf::from).chain(on_path).find(|p| p.is_file())
}

/// The options of QEMU. QEMU opens only `kernel` and `initramfs` by path. It inherits all other
/// files as descriptors, so it needs no rights to them.
pub(crate) struct QemuOptions<'a> {
    pub(crate) accelerator: Accelerator,
    pub(crate) cpus: u32,
    pub(crate) memory_mib: u64,
    pub(crate) numa_nodes: u32,
    /// The machine's folder, used only as a name by which the machine's processes are found.
    pub(crate) folder: &'a Path,
    /// Path of the kernel as QEMU sees it, in its jail or outside.
    pub(crate) kernel: PathBuf,
    /// Path of the initramfs as QEMU sees it.
    pub(crate) initramfs: PathBuf,
    /// The disk, open for reading and writing.
    pub(crate) disk_fd: i32,
    /// The console's log, open for writing.
    pub(crate) console_fd: i32,
    /// The daemon's log, open for writing.
    pub(crate) log_fd: i32,
    /// The control line's socket.
    pub(crate) control_fd: i32,
    /// The socket of QEMU's monitor.
    pub(crate) monitor_fd: i32,
    /// The other end of the supervisor's network interface.
    pub(crate) tap_fd: i32,
    /// The socket for the uplink's frames, if the machine has an uplink.
    pub(crate) uplink_fd: Option<i32>,
    /// Each share's tag, with a socket that is connected to its virtiofsd.
    pub(crate) shares: Vec<(String, i32)>,
    /// The process name that `ps` shows.
    pub(crate) process_name: &'a str,
}

/// Numbers of QEMU's descriptor sets.
const DISK_SET: u32 = 1;
const CONSOLE_SET: u32 = 2;
const LOG_SET: u32 = 3;

/// QEMU's system call filter (its manual, `-sandbox`): no obsolete calls, no change of user, no new
/// process, no scheduling.
pub(crate) const SANDBOX: &str =
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The command line of the machine's kernel.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 oops=panic reboot=t mitigations=off \
    tsc=reliable random.trust_cpu=on rdinit=/init";

/// CPUs and memory of one NUMA node.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    first_cpu: u32,
    last_cpu: u32,
    memory_mib: u64,
}

/// Divides CPUs and memory evenly. Remainders go to the first nodes.
fn nodes(cpus: u32, memory_mib: u64, count: u32) -> Vec<Node> {
    let mut next_cpu = 0;
    (0..count)
        .map(|index| {
            let first_cpu = next_cpu;
            next_cpu += cpus / count + u32::from(index < cpus % count);
            let extra = if index == 0 { memory_mib % u64::from(count) } else { 0 };
            Node {
                first_cpu,
                last_cpu: next_cpu - 1,
                memory_mib: memory_mib / u64::from(count) + extra,
            }
        })
        .collect()
}

/// The arguments of QEMU.
pub(crate) fn arguments(options: &QemuOptions<'_>) -> Vec<OsString> {
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| list.extend(words.iter().map(OsString::from));
    // A comma in an option's value is doubled (QEMU's QemuOpts syntax).
    let folder = options.folder.display().to_string().replace(',', ",,");
    let cpus = options.cpus.to_string();
    add(&[
        "-name",
        &format!("{folder}/qemu,process={}", options.process_name),
        "-sandbox",
        SANDBOX,
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ]);
    add(&["-machine", "q35,usb=off,vmport=off,smbus=off,sata=off,hpet=off", "-no-reboot"]);
    let (accelerator, cpu) = match options.accelerator {
        Accelerator::Kvm => ("kvm", "host"),
        Accelerator::Emulation => ("tcg,thread=multi,tb-size=1024", "EPYC-v3"),
    };
    add(&[
        "-accel",
        accelerator,
        "-cpu",
        cpu,
        "-smp",
        &cpus,
        "-m",
        &format!("{}M", options.memory_mib),
    ]);
    // The memory is shared because virtiofsd maps it too.
    for (index, node) in
        nodes(options.cpus, options.memory_mib, options.numa_nodes).iter().enumerate()
    {
        let memory =
            format!("memory-backend-memfd,id=memory{index},size={}M,share=on", node.memory_mib);
        let (first, last) = (node.first_cpu, node.last_cpu);
        add(&["-object", &memory]);
        add(&["-numa", &format!("node,nodeid={index},cpus={first}-{last},memdev=memory{index}")]);
    }
    add(&[
        "-kernel",
        &options.kernel.display().to_string(),
        "-initrd",
        &options.initramfs.display().to_string(),
    ]);
    add(&["-append", COMMAND_LINE]);
    add_devices(options, &mut add);
    for (tag, fd) in &options.shares {
        add(&["-chardev", &format!("socket,id={tag},fd={fd}")]);
        let device = format!("vhost-user-fs-pci,chardev={tag},tag={tag},queue-size=1024");
        add(&["-device", &device]);
    }
    list
}

/// The arguments for the devices that every machine has.
fn add_devices(options: &QemuOptions<'_>, add: &mut dyn FnMut(&[&str])) {
    // A descriptor set with one descriptor, which QEMU opens as /dev/fdset/NUMBER.
    let sets =
        [(DISK_SET, options.disk_fd), (CONSOLE_SET, options.console_fd), (LOG_SET, options.log_fd)];
    for (set, fd) in sets {
        add(&["-add-fd", &format!("fd={fd},set={set}")]);
    }
    add(&["-chardev", &format!("file,id=console,path=/dev/fdset/{CONSOLE_SET}")]);
    add(&["-serial", "chardev:console"]);
    let disk = format!("filename=/dev/fdset/{DISK_SET},aio=threads,discard=unmap,locking=on");
    add(&["-blockdev", &format!("driver=file,node-name=file,{disk}")]);
    add(&["-blockdev", "driver=raw,node-name=disk,file=file,discard=unmap,detect-zeroes=unmap"]);
    add(&["-device", "virtio-blk-pci,drive=disk,disable-legacy=on"]);
    add(&["-netdev", &format!("tap,id=net,fd={}", options.tap_fd)]);
    add(&["-device", &card("net", CONTROL_MAC)]);
    if let Some(fd) = options.uplink_fd {
        add(&["-netdev", &format!("socket,id=uplink,fd={fd}")]);
        add(&["-device", &card("uplink", UPLINK_MAC)]);
    }
    add(&["-device", "virtio-serial-pci,disable-legacy=on"]);
    add(&["-chardev", &format!("socket,id=control,fd={}", options.control_fd)]);
    add(&["-device", &format!("virtserialport,chardev=control,name={CONTROL_PORT_NAME}")]);
    add(&["-chardev", &format!("socket,id=monitor,fd={}", options.monitor_fd)]);
    add(&["-mon", "chardev=monitor,mode=control"]);
    add(&["-chardev", &format!("file,id=log,path=/dev/fdset/{LOG_SET}")]);
    add(&["-device", &format!("virtserialport,chardev=log,name={LOG_PORT_NAME}")]);
    add(&[
        "-device",
        "virtio-rng-pci,disable-legacy=on",
        "-device",
        "virtio-balloon-pci,disable-legacy=on,free-page-reporting=on",
    ]);
}

/// The argument for a network card.
fn card(netdev: &str, mac: [u8; 6]) -> String {
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    format!("virtio-net-pci,netdev={netdev},mac={mac},disable-legacy=on,romfile=")
}

/// The arguments of virtiofsd. `socket` is a listening descriptor that virtiofsd inherits.
/// virtiofsd makes new mount, process and network namespaces with `folder` as the root, and creates
/// no device nodes.
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
        "sandbox=namespace".into(),
        "-o".into(),
        "no_posix_lock".into(),
        "-o".into(),
        "no_flock".into(),
        "-o".into(),
        "modcaps=-mknod:-setfcap".into(),
        "-o".into(),
        "xattr".into(),
        "-f".into(),
    ];
    words.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(shares: Vec<(String, i32)>) -> QemuOptions<'static> {
        QemuOptions {
            accelerator: Accelerator::Emulation,
            cpus: 2,
            memory_mib: 1024,
            numa_nodes: 1,
            folder: Path::new("/home/a,b/machine"),
            kernel: "/vmlinux".into(),
            initramfs: "/initramfs".into(),
            disk_fd: 10,
            console_fd: 11,
            log_fd: 12,
            control_fd: 13,
            monitor_fd: 17,
            tap_fd: 14,
            uplink_fd: None,
            shares,
            process_name: "dayfly-machine",
        }
    }

    fn words(shares: Vec<(String, i32)>) -> Vec<String> {
        arguments(&options(shares)).into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    /// The values of all options with this name.
    fn values<'a>(words: &'a [String], name: &str) -> Vec<&'a str> {
        words.windows(2).filter(|pair| pair[0] == name).map(|pair| pair[1].as_str()).collect()
    }

    #[test]
    fn qemu_is_filtered_and_opens_no_file_of_the_machine_by_its_path() {
        let words = words(vec![("host-src".to_owned(), 15)]);
        assert_eq!(
            values(&words, "-sandbox"),
            ["on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
        );
        let named: Vec<&String> = words.iter().filter(|word| word.contains("/home")).collect();
        assert_eq!(named, ["/home/a,,b/machine/qemu,process=dayfly-machine"]);
        assert_eq!(values(&words, "-add-fd"), ["fd=10,set=1", "fd=11,set=2", "fd=12,set=3"]);
        assert_eq!(values(&words, "-kernel"), ["/vmlinux"]);
    }

    #[test]
    fn kvm_shows_the_hosts_cpu_and_emulation_one_that_has_svm() {
        let words = |accelerator| -> Vec<String> {
            let options = QemuOptions { accelerator, ..options(Vec::new()) };
            arguments(&options).into_iter().map(|word| word.into_string().unwrap()).collect()
        };
        let (kvm, emulated) = (words(Accelerator::Kvm), words(Accelerator::Emulation));
        assert_eq!((values(&kvm, "-accel"), values(&kvm, "-cpu")), (vec!["kvm"], vec!["host"]));
        assert_eq!(values(&emulated, "-accel"), ["tcg,thread=multi,tb-size=1024"]);
        assert_eq!(values(&emulated, "-cpu"), ["EPYC-v3"]);
    }

    #[test]
    fn the_machine_has_only_the_network_cards_and_shares_asked_for() {
        let none = words(Vec::new());
        assert_eq!(values(&none, "-netdev"), ["tap,id=net,fd=14"]);
        let both = arguments(&QemuOptions { uplink_fd: Some(18), ..options(Vec::new()) });
        let both: Vec<String> = both.into_iter().map(|word| word.into_string().unwrap()).collect();
        assert_eq!(values(&both, "-netdev"), ["tap,id=net,fd=14", "socket,id=uplink,fd=18"]);
        for mac in ["netdev=net,mac=02:df:00:00:01:01,", "netdev=uplink,mac=02:df:00:00:01:02,"] {
            assert!(both.iter().any(|word| word.contains(mac)), "{both:?}");
        }
        assert!(!none.iter().any(|word| word.contains("vhost-user")), "{none:?}");
        let some = words(vec![("host-a".to_owned(), 15), ("host-b".to_owned(), 16)]);
        let shares: Vec<&str> = values(&some, "-device")
            .into_iter()
            .filter(|word| word.starts_with("vhost-user-fs"))
            .collect();
        assert_eq!(
            shares,
            ["host-a", "host-b"]
                .map(|tag| format!("vhost-user-fs-pci,chardev={tag},tag={tag},queue-size=1024"))
        );
        assert!(values(&some, "-chardev").contains(&"socket,id=host-b,fd=16"));
    }

    #[test]
    fn the_token_has_no_place_on_the_kernels_command_line() {
        let words = words(Vec::new());
        let [line] = values(&words, "-append")[..] else { panic!("one command line") };
        assert!(line.split(' ').all(|word| word.len() < 32), "{line}");
    }

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
