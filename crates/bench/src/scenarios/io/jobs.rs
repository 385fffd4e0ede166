//! What is measured: jobs of fio on a guest's disk, and traffic between a guest and its host.

use crate::prelude::*;
use std::fmt;

/// The file in the guest that fio reads and writes.
const FILE: &str = "/root/io";

/// A measurement of one guest; more is better for all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// fio, past the guest's page cache.
    Disk(Disk),
    /// Traffic with a program of the host.
    Net(Net),
}

/// A job of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    /// 4 KiB at random places, or 1 MiB in sequence.
    pub block: Block,
    /// Reads, or writes.
    pub is_write: bool,
    /// Requests in flight.
    pub depth: u32,
}

/// Requests of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Block {
    /// 4 KiB, at random places.
    Random4K,
    /// 1 MiB, in sequence.
    Sequential1M,
}

/// Traffic, as netperf has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Net {
    /// `TCP_STREAM`: the guest sends.
    Sends,
    /// `TCP_MAERTS`: the guest receives.
    Receives,
    /// `TCP_RR`: a byte there and back, one at a time.
    TcpRequests,
    /// `UDP_RR`.
    UdpRequests,
}

/// All jobs, in the order in which a guest does them.
pub fn all() -> Vec<Job> {
    let mut jobs = Vec::new();
    for block in [Block::Random4K, Block::Sequential1M] {
        for depth in [1, 32] {
            for is_write in [false, true] {
                jobs.push(Job::Disk(Disk { block, is_write, depth }));
            }
        }
    }
    let traffic = [Net::Sends, Net::Receives, Net::TcpRequests, Net::UdpRequests];
    jobs.extend(traffic.map(Job::Net));
    jobs
}

/// The jobs with names that begin with one of `only`; all of them if it is empty.
///
/// # Errors
/// No name begins with one of them.
pub fn chosen(only: &[String]) -> Result<Vec<Job>> {
    let (mut jobs, names) = (all(), || all().iter().map(Job::to_string).collect::<Vec<_>>());
    for word in only {
        let is_known = !word.is_empty() && names().iter().any(|name| name.starts_with(word));
        ensure!(
            is_known,
            "--only {word:?}: expected the beginning of one of {}",
            names().join(", ")
        );
    }
    let is_chosen = |name: String| only.iter().any(|word| name.starts_with(word));
    jobs.retain(|job| only.is_empty() || is_chosen(job.to_string()));
    Ok(jobs)
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(Disk { block, is_write, depth }) => {
                let block = if *block == Block::Random4K { "4k" } else { "1m" };
                let way = if *is_write { "write" } else { "read" };
                write!(f, "disk-{block}-{way}-{depth}")
            }
            Self::Net(Net::Sends) => f.write_str("net-stream-out"),
            Self::Net(Net::Receives) => f.write_str("net-stream-in"),
            Self::Net(Net::TcpRequests) => f.write_str("net-tcp-rr"),
            Self::Net(Net::UdpRequests) => f.write_str("net-udp-rr"),
        }
    }
}

impl Job {
    /// The unit of its figures.
    pub const fn unit(&self) -> &'static str {
        match self {
            Self::Disk(Disk { block: Block::Random4K, .. }) => "IOPS",
            Self::Net(Net::TcpRequests | Net::UdpRequests) => "req/s",
            _ => "MB/s",
        }
    }

    /// Whether it needs the disk.
    pub const fn is_disk(&self) -> bool {
        matches!(self, Self::Disk(_))
    }
}

impl Disk {
    /// The text for /bin/sh that runs it for `seconds`, on a file of `file_bytes`. The first second
    /// does not count.
    pub fn text(&self, file_bytes: u64, seconds: u64) -> String {
        let (rw, size) = match (self.block, self.is_write) {
            (Block::Random4K, false) => ("randread", "4k"),
            (Block::Random4K, true) => ("randwrite", "4k"),
            (Block::Sequential1M, false) => ("read", "1m"),
            (Block::Sequential1M, true) => ("write", "1m"),
        };
        format!(
            "exec fio --name=io --filename={FILE} --size={file_bytes} --rw={rw} --bs={size} \
             --iodepth={} --ioengine=libaio --direct=1 --time_based --ramp_time=1 \
             --runtime={seconds} --output-format=json",
            self.depth
        )
    }
}

/// The text for /bin/sh that writes the file of the jobs, so that no job finds holes.
pub fn fill(file_bytes: u64) -> String {
    format!(
        "exec fio --name=fill --filename={FILE} --size={file_bytes} --rw=write --bs=1m \
         --ioengine=psync --direct=1 --end_fsync=1 --output-format=json"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(only: &[&str]) -> Result<Vec<String>> {
        let only: Vec<String> = only.iter().map(|word| (*word).to_owned()).collect();
        Ok(chosen(&only)?.iter().map(Job::to_string).collect())
    }

    #[test]
    fn every_pair_of_size_depth_and_direction_is_a_job_with_its_own_name() {
        let mut all = names(&[]).unwrap();
        assert_eq!(all.len(), 12);
        assert_eq!((all[0].as_str(), all[7].as_str()), ("disk-4k-read-1", "disk-1m-write-32"));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 12);
    }

    #[test]
    fn jobs_are_chosen_by_the_beginning_of_their_names() {
        assert_eq!(names(&["disk"]).unwrap().len(), 8);
        let some = names(&["net-tcp", "disk-1m-read"]).unwrap();
        assert_eq!(some, ["disk-1m-read-1", "disk-1m-read-32", "net-tcp-rr"]);
        for bad in ["", "dsk", "rr"] {
            assert!(names(&["net", bad]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn fio_gets_the_job_s_words() {
        let job = Disk { block: Block::Random4K, is_write: true, depth: 32 };
        let text = job.text(1 << 20, 3);
        for word in ["--rw=randwrite", "--bs=4k", "--iodepth=32", "--runtime=3", "--size=1048576"] {
            assert!(text.split(' ').any(|other| other == word), "{word}: {text}");
        }
        assert_eq!(Job::Disk(job).unit(), "IOPS");
    }
}
