//! Threads that free memory of one NUMA node, and run on that node's CPUs (Swift Birth and Quick
//! Death, section 5). A freed page then returns to free lists near the node, and the nodes free in
//! parallel.

use crate::numa::{self, Node};
use dayfly_units::sync::lock;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// Maximum number of threads for one node. The threads wait most of the time.
const MOST: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// The threads of all nodes. After a drop, the threads finish the queued jobs and exit.
#[derive(Debug)]
pub struct Reapers(Vec<Sender<Job>>);

impl Reapers {
    /// Starts as many threads for each of `nodes` as the node has CPUs, at most four.
    ///
    /// # Errors
    /// The host refuses to create a thread.
    pub fn new(nodes: &[Node]) -> io::Result<Self> {
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut senders = Vec::with_capacity(nodes.len());
        for (place, node) in nodes.iter().enumerate() {
            let (sender, jobs) = channel::<Job>();
            let jobs = Arc::new(Mutex::new(jobs));
            let threads = if node.cpus.is_empty() { all } else { node.cpus.len() };
            for _ in 0..threads.clamp(1, MOST) {
                let (jobs, cpus) = (Arc::clone(&jobs), node.cpus.clone());
                std::thread::Builder::new().name(format!("reaper{place}")).spawn(move || {
                    if let Err(e) = numa::stay_on(&cpus) {
                        eprintln!("reaper of node {place}: its CPUs {cpus:?}: {e}");
                    }
                    serve(&jobs);
                })?;
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

    /// Queues `job` for the CPUs of node `node`, an index into the nodes of [`Self::new`]. If the
    /// index is too large, the first node is used.
    pub fn run(&self, node: usize, job: impl FnOnce() + Send + 'static) {
        let sender = self.0.get(node).or_else(|| self.0.first());
        let unsent = match sender {
            Some(sender) => sender.send(Box::new(job)).err().map(|unsent| unsent.0),
            None => Some(Box::new(job) as Job),
        };
        // The channel closes only if every thread of the node ended; the caller then runs the job
        // itself.
        if let Some(job) = unsent {
            job();
        }
    }
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let next = lock(jobs).recv();
        match next {
            Ok(job) => {
                // The panic hook has printed the panic. Without this, each panic would cost the
                // node a thread, and after the last one every removal would wait for ever. The job
                // is gone after its panic, so no broken state of it is seen again.
                let _ = catch_unwind(AssertUnwindSafe(job));
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
        let reapers = Reapers::new(&[node]).unwrap();
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
        let reapers = Reapers::new(&nodes).unwrap();
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
}
