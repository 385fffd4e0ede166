//! The host's memory nodes and their CPUs (`Documentation/ABI/stable/sysfs-devices-node`).

use std::io;
use std::path::Path;

/// A node that has memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The node's number for set_mempolicy(2); `None` if the host's kernel has no NUMA support.
    pub number: Option<u32>,
    /// The node's CPUs; empty means all CPUs of the host.
    pub cpus: Vec<u32>,
    /// Bytes of RAM on the node.
    pub memory_bytes: u64,
}

/// Every node with memory and CPUs, in ascending order; at least one.
///
/// # Errors
/// The host's memory size cannot be read.
pub fn nodes() -> io::Result<Vec<Node>> {
    let found = nodes_in(Path::new("/sys/devices/system/node"));
    if !found.is_empty() {
        return Ok(found);
    }
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let memory_bytes = total(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo: expected a line MemTotal in kB")
    })?;
    Ok(vec![Node { number: None, cpus: Vec::new(), memory_bytes }])
}

fn nodes_in(folder: &Path) -> Vec<Node> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut nodes: Vec<Node> = entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let read = |file| std::fs::read_to_string(entry.path().join(file)).ok();
            let (cpus, memory_bytes) =
                (cpu_list(read("cpulist")?.trim())?, total(&read("meminfo")?)?);
            // Skips nodes without CPUs and nodes without memory.
            (!cpus.is_empty() && memory_bytes > 0).then_some(Node {
                number: Some(number),
                cpus,
                memory_bytes,
            })
        })
        .collect();
    nodes.sort_by_key(|node| node.number);
    nodes
}

/// Bytes in the line `MemTotal:  24 kB`; in a node's meminfo the line starts with `Node 0`.
fn total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.split_once("MemTotal:"))?;
    let kib: u64 = line.1.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Parses a list such as `0-2,7` (`Documentation/admin-guide/cputopology.rst`). CPU numbers are at
/// most 65535; `None` if the text is malformed.
#[must_use]
pub fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        cpus.extend(u32::from(first)..=u32::from(last));
    }
    Some(cpus)
}

/// Pins the calling thread to `cpus`. An empty list changes nothing.
///
/// # Errors
/// None of the CPUs exists, or this thread may not use them.
pub fn stay_on(cpus: &[u32]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus {
        let cpu = usize::try_from(*cpu).unwrap_or(usize::MAX);
        if cpu < rustix::thread::CpuSet::MAX_CPU {
            set.set(cpu);
        }
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read_and_others_refused() {
        assert_eq!(cpu_list("0-2,7"), Some(vec![0, 1, 2, 7]));
        assert_eq!(cpu_list(""), Some(vec![]));
        for bad in ["a", "1-", "-1", "0-70000", "1 2"] {
            assert_eq!(cpu_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn nodes_are_read_from_sysfs() {
        let folder = tempfile::tempdir().unwrap();
        let node = |name: &str, cpus: &str, kib: u64| {
            let node = folder.path().join(name);
            std::fs::create_dir(&node).unwrap();
            std::fs::write(node.join("cpulist"), format!("{cpus}\n")).unwrap();
            std::fs::write(
                node.join("meminfo"),
                format!("\nNode 1 MemTotal:  {kib} kB\nNode 1 MemFree: 1 kB\n"),
            )
            .unwrap();
        };
        node("node1", "2-3", 2048);
        node("node0", "0-1", 1024);
        node("node2", "", 1024);
        node("node3", "4", 0);
        std::fs::write(folder.path().join("possible"), "0-3\n").unwrap();
        let got = nodes_in(folder.path());
        assert_eq!(
            got,
            [
                Node { number: Some(0), cpus: vec![0, 1], memory_bytes: 1 << 20 },
                Node { number: Some(1), cpus: vec![2, 3], memory_bytes: 2 << 20 },
            ]
        );
        assert_eq!(nodes_in(&folder.path().join("none")), []);
    }

    #[test]
    fn this_host_has_a_node_with_memory() {
        let nodes = nodes().unwrap();
        assert!(nodes.iter().all(|node| node.memory_bytes > 0) && !nodes.is_empty(), "{nodes:?}");
        stay_on(&nodes[0].cpus).unwrap();
    }
}
