//! What is there while no VM is.

use crate::prelude::*;
use crate::proc::{self, Stat};
use crate::requests::{create_many, metric};
use crate::testbed::processes::{Vmm, pids};
use crate::testbed::{Testbed, host};

/// VMMs that wait in the pool: few enough that bursts find none.
pub const POOL: usize = 16;
/// By then all has to be as it was.
const WITHIN: Duration = Duration::from_secs(10);

/// A look at daemon and host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Sample {
    pub births: usize,
    /// Processes of VMMs, each with an id.
    pub vmms: usize,
    /// What they are forked from.
    pub zygotes: usize,
    pub zombies: usize,
    /// In the run folder.
    pub folders: usize,
    /// In the store.
    pub layers: usize,
    /// That listen, below the run folder.
    pub sockets: usize,
    /// Of the daemon.
    pub fds: usize,
    pub reserved_bytes: u64,
    pub rss_bytes: u64,
    pub available_bytes: u64,
}

fn count(folder: &Path) -> Result<usize> {
    Ok(std::fs::read_dir(folder).with_context(|| folder.display().to_string())?.count())
}

fn resident(pid: u32) -> Result<u64> {
    let statm = proc::read(&format!("/proc/{pid}/statm"))?;
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|n| n.parse().ok());
    Ok(pages.context("statm of the daemon")? * PAGE_SIZE)
}

/// Sockets with a name below `run` that listen (`__SO_ACCEPTCON`).
fn listening(run: &Path) -> Result<usize> {
    let (table, run) = (proc::read("/proc/net/unix")?, run.to_string_lossy());
    let ours = |line: &&str| {
        line.contains(&*run) && line.split_ascii_whitespace().nth(3) == Some("00010000")
    };
    Ok(table.lines().filter(ours).count())
}

fn zombies(parent: u32) -> usize {
    let stats = pids().filter_map(Stat::of);
    stats.filter(|stat| stat.number(4) == Some(parent) && stat.state() == "Z").count()
}

/// The columns of samples in a table, but for the births.
pub const COLUMNS: [Column; 8] = [
    ("VMMs", "/vmms", Plain),
    ("zygotes", "/zygotes", Plain),
    ("zombies", "/zombies", Plain),
    ("folders", "/folders", Plain),
    ("sockets", "/sockets", Plain),
    ("fds", "/fds", Plain),
    ("RSS", "/rss_bytes", Mib),
    ("free", "/available_bytes", Mib),
];

impl Sample {
    async fn now(testbed: &Testbed) -> Result<Self> {
        let daemon = testbed.daemon()?;
        let metrics = testbed.client.metrics().await?;
        let all = Vmm::all(&testbed.vmm_name());
        Ok(Self {
            births: 0,
            vmms: all.iter().filter(|vmm| vmm.vm.is_some()).count(),
            zygotes: all.iter().filter(|vmm| vmm.vm.is_none() && vmm.parent == daemon).count(),
            zombies: zombies(daemon),
            folders: count(&testbed.run().join("vms"))?,
            layers: count(&testbed.state().join("vms"))?,
            sockets: listening(testbed.run())?,
            fds: count(Path::new(&format!("/proc/{daemon}/fd")))?,
            reserved_bytes: metric(&metrics, "dayfly_memory_reserved_bytes")?,
            rss_bytes: resident(daemon)?,
            available_bytes: host::available()?,
        })
    }

    /// What is not as it has to be; with `first`, as it was then.
    fn wrong(&self, first: Option<&Self>) -> Vec<String> {
        // One warm VMM waits, which has no layer yet; each has two sockets and the daemon one.
        let counts = [
            ("VMMs", POOL, self.vmms),
            ("zygotes", 1, self.zygotes),
            ("zombies", 0, self.zombies),
            ("folders", POOL, self.folders),
            ("layers", POOL - 1, self.layers),
            ("sockets", 2 * POOL + 1, self.sockets),
            ("descriptors", first.map_or(self.fds, |first| first.fds), self.fds),
            ("bytes of memory reserved", 0, usize::try_from(self.reserved_bytes).unwrap_or(1)),
        ];
        let wrong = counts.into_iter().filter(|(_, expected, got)| expected != got);
        wrong
            .map(|(what, expected, got)| format!("{what}: expected {expected}, got {got}"))
            .collect()
    }
}

/// Has the daemon fill its pool, by a burst of births that are ended at once, and looks once
/// everything is as it has to be.
pub async fn settled(testbed: &Testbed, name: &Name, first: Option<&Sample>) -> Result<Sample> {
    let request = create_many(name, 2 * POOL, &[]);
    let vms =
        testbed.client.create_many(&request).await.context("a burst while nothing is killed")?;
    testbed.remove_all(&vms.iter().map(|vm| vm.id).collect::<Vec<_>>()).await?;
    let begun = Instant::now();
    // Twice the same: descriptors of what is under way are not there for long.
    let mut before = None;
    loop {
        let sample = Sample::now(testbed).await?;
        let wrong = sample.wrong(first);
        let still = before.replace(sample.fds) == Some(sample.fds);
        if wrong.is_empty() && still {
            let leaks = testbed.client.leaks().await?;
            if leaks.is_empty() {
                return Ok(sample);
            }
            if begun.elapsed() > WITHIN {
                bail!("leaks: {leaks:?}");
            }
        } else if begun.elapsed() > WITHIN {
            bail!("while there was no VM: {}", wrong.join("; "));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
