//! Threads that free what was a memory node's, on that node's CPUs (Swift Birth and Quick Death, section 5): a page is then returned to
//! lists that are near to it, and the nodes free in parallel.

use crate::numa::{self, Node};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// The most threads of one node: they wait for most of the time.
const MOST: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// The threads of all nodes. Dropped, they do what they were given, and end.
#[derive(Debug)]
pub struct Reapers(Vec<Sender<Job>>);

impl Reapers {
    /// As many threads for each of `nodes` as it has CPUs, but not more than four.
    ///
    /// # Errors
    /// The host gives no threads.
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

    /// Does `job` on the CPUs of the node at this place; on those of the first where there is no such node.
    pub fn run(&self, node: usize, job: impl FnOnce() + Send + 'static) {
        let sender = self.0.get(node).or_else(|| self.0.first());
        let unsent = match sender {
            Some(sender) => sender.send(Box::new(job)).err().map(|unsent| unsent.0),
            None => Some(Box::new(job) as Job),
        };
        // The threads end with the senders only; whatever happens, the job is done.
        if let Some(job) = unsent {
            job();
        }
    }
}

fn serve(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let next = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match next {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_done_on_the_cpus_of_their_node() {
        let cpus = rustix::thread::sched_getaffinity(None).unwrap();
        let cpus: Vec<u32> = (0..1024).filter(|cpu| cpus.is_set(*cpu as usize)).collect();
        // Each CPU a node of its own.
        let nodes: Vec<Node> =
            cpus.iter().map(|cpu| Node { number: Some(*cpu), cpus: vec![*cpu], memory_bytes: 1 }).collect();
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
