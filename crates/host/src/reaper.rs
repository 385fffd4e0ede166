//! Threads that free memory of VMs that have ended, near that memory (Swift Birth and Quick Death,
//! section 5; Closer, section IV-D).
//!
//! A job of a VM with booked CPUs runs on these, which no other VM has. All other jobs run on the
//! CPUs of the memory's NUMA node, except CPUs that VMs have booked and those that are kept for
//! dayflyd. A freed page then returns to free lists near the node, and the nodes free in parallel.
//! The threads have the normal policy (SCHED_OTHER) unless a job takes another
//! ([`crate::priority::first`]). They are in dayflyd's control group. With cgroup v2 that is
//! `main`, which has more weight than all VMs together, so that a VM that runs on the same CPU is
//! delayed while they free memory; a VM's booked CPUs are used for its own destruction only.

use crate::cpus::{self, CpuList};
use crate::numa::{self, Node};
use dayfly_units::sync::lock;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// Maximum number of threads for one node. The threads wait most of the time.
const MOST: usize = 4;

/// The CPUs that a VM has booked. No other VM gets them as long as this exists.
pub trait Booked: Send + Sync {
    /// The CPUs.
    fn cpus(&self) -> &CpuList;
}

impl Booked for CpuList {
    fn cpus(&self) -> &CpuList {
        self
    }
}

/// The first half of a job.
type First = Box<dyn FnOnce() -> Option<Arc<dyn Booked>> + Send>;

/// What to do where the thread is, which returns where the rest is done (`None`: on CPUs of the
/// node), and the rest.
struct Job {
    first: First,
    work: Box<dyn FnOnce() + Send>,
}

/// CPUs on which no thread frees memory, except that of the VM that has booked them.
#[derive(Debug, Default)]
pub struct KeptOff {
    cpus: Mutex<CpuList>,
    /// Changes with the CPUs, so that a thread that finds it unchanged takes no lock.
    version: AtomicU64,
}

impl KeptOff {
    /// Replaces the CPUs. Each thread obeys before its next job.
    pub fn set(&self, cpus: CpuList) {
        let mut own = lock(&self.cpus);
        if *own != cpus {
            *own = cpus;
            self.version.fetch_add(1, Ordering::Release);
        }
    }
}

/// The threads of all nodes. After a drop, the threads finish the queued jobs and exit.
#[derive(Debug)]
pub struct Reapers(Vec<Sender<Job>>);

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a job")
    }
}

impl Reapers {
    /// Starts as many threads for each of `nodes` as the node has CPUs, at most four. They stay off
    /// the CPUs `off`.
    ///
    /// # Errors
    /// The host refuses to create a thread.
    pub fn new(nodes: &[Node], off: &Arc<KeptOff>) -> io::Result<Self> {
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut senders = Vec::with_capacity(nodes.len());
        for (number, node) in nodes.iter().enumerate() {
            let (sender, jobs) = channel::<Job>();
            let jobs = Arc::new(Mutex::new(jobs));
            let threads = if node.cpus.is_empty() { all } else { node.cpus.len() };
            for _ in 0..threads.clamp(1, MOST) {
                let jobs = Arc::clone(&jobs);
                let mut place = Place::new(number, node, off.clone());
                let thread = std::thread::Builder::new().name(format!("reaper{number}"));
                thread.spawn(move || serve(&jobs, &mut place))?;
            }
            senders.push(sender);
        }
        Ok(Self(senders))
    }

    /// No threads: each job runs on the caller's thread.
    #[must_use]
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// Queues `work` for node `node`, an index into the nodes of [`Self::new`]. If the index is too
    /// large, the first node is used. It runs on CPUs of the node.
    pub fn run(&self, node: usize, work: impl FnOnce() + Send + 'static) {
        self.run_on(node, || None, work);
    }

    /// As [`Self::run`], after `first`, which is called when a thread begins with the job, on
    /// whatever CPUs it is. `work` runs on the CPUs that `first` returns; the thread keeps the
    /// booking until it has left them.
    pub fn run_on(
        &self,
        node: usize,
        first: impl FnOnce() -> Option<Arc<dyn Booked>> + Send + 'static,
        work: impl FnOnce() + Send + 'static,
    ) {
        let sender = self.0.get(node).or_else(|| self.0.first());
        let job = Job { first: Box::new(first), work: Box::new(work) };
        let unsent = match sender {
            Some(sender) => sender.send(job).err().map(|unsent| unsent.0),
            None => Some(job),
        };
        // The channel closes only if every thread of the node ended; the caller then runs the job
        // itself.
        if let Some(job) = unsent {
            let _booked = (job.first)();
            (job.work)();
        }
    }
}

/// Where one thread runs.
struct Place {
    /// The number of its node in errors.
    number: usize,
    /// The CPUs of its node; empty: all.
    node: CpuList,
    off: Arc<KeptOff>,
    /// The version of `off` that it obeys; `None`: none yet.
    seen: Option<u64>,
    /// Whether it is on CPUs that it has to leave before the next job.
    away: bool,
    /// Whether an error was printed. Each later job would print it again.
    printed: bool,
}

impl Place {
    fn new(number: usize, node: &Node, off: Arc<KeptOff>) -> Self {
        let node = node.cpus.iter().copied().collect();
        Self { number, node, off, seen: None, away: false, printed: false }
    }

    /// Moves the thread to where a job with these booked CPUs runs. Makes no system call for a job
    /// without, if nothing has changed since the one before.
    fn enter(&mut self, booked: Option<&CpuList>) {
        let Some(booked) = booked.filter(|booked| !booked.is_empty()) else { return self.home() };
        match stay_on(booked) {
            Ok(()) => self.away = true,
            // They may be offline.
            Err(e) => {
                self.complain(format_args!("booked CPUs {booked}: {e}"));
                self.home();
            }
        }
    }

    fn home(&mut self) {
        let version = self.off.version.load(Ordering::Acquire);
        if self.seen == Some(version) && !self.away {
            return;
        }
        let off = lock(&self.off.cpus).clone();
        if self.seen.is_none() && !self.away && off.is_empty() && self.node.is_empty() {
            // Those that it inherits.
            self.seen = Some(version);
            return;
        }
        let host = cpus::online().unwrap_or_else(|_| self.node.clone());
        let own = if self.node.is_empty() { host.clone() } else { self.node.and(&host) };
        // A node may have no other CPU.
        let candidates = [own.without(&off), host.without(&off), own, host];
        for place in candidates.iter().filter(|cpus| !cpus.is_empty()) {
            match stay_on(place) {
                Ok(()) => {
                    (self.seen, self.away) = (Some(version), false);
                    return;
                }
                // A CPU may have gone offline.
                Err(e) => self.complain(format_args!("its CPUs {place}: {e}")),
            }
        }
        // Tried again before the next job.
    }

    fn complain(&mut self, what: std::fmt::Arguments<'_>) {
        if !std::mem::replace(&mut self.printed, true) {
            eprintln!("reaper of node {}: {what}; later errors are not shown", self.number);
        }
    }
}

fn stay_on(cpus: &CpuList) -> io::Result<()> {
    numa::stay_on(&cpus.iter().collect::<Vec<_>>())
}

fn serve(jobs: &Mutex<Receiver<Job>>, place: &mut Place) {
    place.home();
    loop {
        let next = lock(jobs).recv();
        match next {
            Ok(Job { first, work }) => {
                // The panic hook has printed the panic. Without this, each panic would cost the
                // node a thread, and after the last one every removal would wait for ever. The job
                // is gone after its panic, so no broken state of it is seen again.
                let mut booked = None;
                let _ = catch_unwind(AssertUnwindSafe(|| {
                    booked = first();
                    place.enter(booked.as_deref().map(Booked::cpus));
                    work();
                }));
                if place.away {
                    // The CPUs are another VM's soon.
                    place.home();
                }
                drop(booked);
            }
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_job_that_panics_costs_no_thread() {
        let node = Node { number: None, cpus: Vec::new(), memory_bytes: 1 };
        let reapers = Reapers::new(&[node], &Arc::default()).unwrap();
        for _ in 0..MOST {
            reapers.run(0, || panic!("a job of a test panics on purpose"));
        }
        let (done, got) = channel();
        reapers.run(0, move || done.send(7).unwrap());
        // Without a thread, the job stays in the queue and its sender with it.
        assert_eq!(got.recv_timeout(Duration::from_secs(60)), Ok(7));
    }

    #[test]
    fn jobs_are_done_on_the_cpus_of_their_node() {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap();
        let cpus: Vec<u32> = (0..1024).filter(|cpu| cpus.is_set(*cpu as usize)).collect();
        // One node per CPU.
        let nodes: Vec<Node> = cpus
            .iter()
            .map(|cpu| Node { number: Some(*cpu), cpus: vec![*cpu], memory_bytes: 1 })
            .collect();
        let reapers = Reapers::new(&nodes, &Arc::default()).unwrap();
        let (done, got) = channel();
        for n in 0..64 {
            let (node, done) = (n % nodes.len(), done.clone());
            reapers.run(node, move || {
                done.send((node, u32::try_from(rustix::thread::sched_getcpu()).unwrap())).unwrap();
            });
        }
        drop(done);
        let got: Vec<_> = got.iter().collect();
        assert_eq!(got.len(), 64);
        assert!(got.iter().all(|(node, cpu)| nodes[*node].cpus == [*cpu]), "{got:?}");
    }

    /// The CPUs on which the calling thread may run, and its policy.
    fn here() -> (CpuList, i32) {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap();
        let cpus = (0..1024).filter(|cpu| cpus.is_set(*cpu as usize)).collect();
        // SAFETY: sched_getscheduler(2) of the calling thread.
        (cpus, unsafe { libc::sched_getscheduler(0) })
    }

    /// CPUs that are booked until this is dropped.
    struct Until(CpuList, Sender<CpuList>);

    impl Booked for Until {
        fn cpus(&self) -> &CpuList {
            &self.0
        }
    }

    impl Drop for Until {
        fn drop(&mut self) {
            self.1.send(here().0).unwrap();
        }
    }

    #[test]
    fn a_booking_is_kept_until_the_thread_has_left_its_cpus() {
        let host = cpus::online().unwrap();
        assert!(host.len() > 1, "it needs two CPUs");
        let booked: CpuList = host.iter().take(1).collect();
        let node = Node { number: None, cpus: Vec::new(), memory_bytes: 1 };
        let off = Arc::new(KeptOff::default());
        off.set(booked.clone());
        let reapers = Reapers::new(&[node], &off).unwrap();
        for _ in 0..3 * MOST {
            let ((dropped, drops), (sender, got)) = (channel(), channel());
            let until: Arc<dyn Booked> = Arc::new(Until(booked.clone(), dropped));
            let before = sender.clone();
            let first = move || {
                before.send(here().0).unwrap();
                Some(until)
            };
            reapers.run_on(0, first, move || sender.send(here().0).unwrap());
            // A thread sends SIGKILL before it waits for a CPU that may be busy.
            assert_eq!(got.iter().collect::<Vec<_>>(), [host.without(&booked), booked.clone()]);
            assert_eq!(drops.recv().unwrap(), host.without(&booked));
        }
    }

    #[test]
    fn booked_cpus_free_their_own_vm_and_no_other() {
        let host = cpus::online().unwrap();
        assert!(host.len() > 1, "it needs two CPUs");
        let booked: CpuList = host.iter().take(1).collect();
        // Without NUMA, and a node with all CPUs.
        for cpus in [Vec::new(), host.iter().collect()] {
            let node = Node { number: None, cpus, memory_bytes: 1 };
            let off = Arc::new(KeptOff::default());
            let reapers = Reapers::new(&[node], &off).unwrap();
            let (done, got) = channel();
            let run = |cpus: &CpuList| {
                let done = done.clone();
                let cpus: Arc<dyn Booked> = Arc::new(cpus.clone());
                reapers.run_on(0, || Some(cpus), move || done.send(here()).unwrap());
                let (cpus, policy) = got.recv().unwrap();
                assert_eq!(policy, libc::SCHED_OTHER);
                cpus
            };
            let none = CpuList::default();
            assert_eq!(run(&none), host);
            off.set(booked.clone());
            // Each of the threads obeys, and comes back from booked CPUs.
            for _ in 0..3 * MOST {
                assert_eq!(run(&none), host.without(&booked));
                assert_eq!(run(&booked), booked);
            }
            // CPUs that do not exist: anywhere but on those of others.
            let missing: CpuList = [8000].into_iter().collect();
            assert_eq!(run(&missing), host.without(&booked));
            off.set(none.clone());
            assert_eq!(run(&none), host);
            // No CPU is left: somewhere.
            off.set(host.clone());
            assert_eq!(run(&none), host);
        }
    }
}
