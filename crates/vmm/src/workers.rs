//! The threads of a VMM besides its main thread. They are made ahead, each with its seccomp filter
//! installed, and wait for work.
//!
//! A thread costs at least 0.1 ms of a VM's creation, the first one of a process 0.2 ms. The kernel
//! compiles the threads' filters one after the other. Threads do not depend on the guest, so a
//! pre-forked VMM of the [`zygote`](crate::zygote) has its worker threads before it receives its
//! configuration. The process is still root then. Each thread becomes the VM's user before it
//! starts its work, because [`jail::enter`](crate::jail::enter) changes only the calling thread.

use crate::config::JailConfig;
use crate::jail;
use crate::seccomp::{Filters, Stage, ThreadFilter};
use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

type Work = Box<dyn FnOnce() + Send>;

/// A thread that waits for one piece of work.
#[derive(Debug)]
pub struct Worker {
    thread: JoinHandle<()>,
    work: Sender<Work>,
    filter: ThreadFilter,
    jail: Option<JailConfig>,
    /// Dropped once the thread is narrowed ([`Narrowed`]).
    set_up: Sender<Infallible>,
}

/// Ends the wait for worker threads that become the VM's user and enter the guest stage of their
/// filters.
#[derive(Debug)]
pub struct Narrowed(Receiver<Infallible>);

impl Narrowed {
    /// Waits until every worker is narrowed, so that no thread can do more than it should when the
    /// guest runs. A worker that fails ends the process.
    pub fn wait(&self) {
        // Nothing is ever sent: the wait ends when the last sender is gone.
        let _ = self.0.recv();
    }
}

impl Worker {
    /// Starts a thread under `filter`, in the set-up stage.
    fn start(name: String, filter: &ThreadFilter, set_up: Sender<Infallible>) -> io::Result<Self> {
        let (work, waiting): (Sender<Work>, Receiver<Work>) = channel();
        let first = filter.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // The thread may inherit a low priority from the thread that makes it. Guests run at
            // the normal priority.
            jail::normal_priority();
            first.enter(Stage::SetUp);
            // The sender is dropped: the process has no work for this thread.
            if let Ok(work) = waiting.recv() {
                work();
            }
        })?;
        Ok(Self { thread, work, filter: filter.clone(), jail: None, set_up })
    }

    /// Makes the thread become the VM's user, enter the guest stage of its filter, and do `work`. A
    /// worker serves one `work` in its life.
    pub fn set_to(self, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
        let Self { thread, work: sender, filter, jail, set_up } = self;
        let all = move || {
            if let Some(Err(error)) = jail.map(|jail| jail::become_user(&jail)) {
                crate::exit::fail(&error);
            }
            filter.enter(Stage::Guest);
            drop(set_up);
            work();
        };
        // Cannot fail: the thread waits in `recv` until it has work.
        let _ = sender.send(Box::new(all));
        thread
    }

    /// Ends the thread and waits until it has ended.
    fn end(self) {
        drop(self.work);
        let _ = self.thread.join();
    }
}

/// All worker threads of one VM.
#[derive(Debug)]
pub struct Workers {
    /// The device thread, named `devices`.
    pub devices: Worker,
    /// The vCPU threads, in the order of vCPU ids.
    pub vcpus: Vec<Worker>,
    /// The wait until all of them are narrowed.
    pub narrowed: Narrowed,
}

impl Workers {
    /// Makes the threads of a VM with this many vCPUs. They inherit the capabilities of the calling
    /// thread, so the caller calls [`narrow`](crate::jail::narrow) first.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn new(filters: &Filters, vcpus: u8) -> io::Result<Self> {
        let (set_up, narrowed) = channel();
        let devices = Worker::start("devices".to_owned(), &filters.devices, set_up.clone())?;
        let vcpu = |id| Worker::start(format!("vcpu{id}"), &filters.vcpu, set_up.clone());
        let vcpus = (0..vcpus).map(vcpu).collect::<io::Result<_>>()?;
        Ok(Self { devices, vcpus, narrowed: Narrowed(narrowed) })
    }

    /// Gives each thread `jail`, which it enters before its work. If the number of vCPU threads
    /// differs from `vcpus`, all threads are made anew. New threads inherit the calling thread's
    /// user, because the caller is in the jail already.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn prepare(
        mut self,
        filters: &Filters,
        vcpus: u8,
        jail: Option<&JailConfig>,
    ) -> io::Result<Self> {
        if self.vcpus.len() != usize::from(vcpus) {
            self.devices.end();
            self.vcpus.into_iter().for_each(Worker::end);
            return Self::new(filters, vcpus);
        }
        for worker in self.vcpus.iter_mut().chain([&mut self.devices]) {
            worker.jail = jail.cloned();
        }
        Ok(self)
    }
}
