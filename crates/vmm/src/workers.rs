//! The threads of a VMM besides its main thread. They are made ahead, each with its seccomp filter
//! installed, and wait for work.
//!
//! A thread costs at least 0.1 ms of a VM's creation, the first one of a process 0.2 ms. The kernel
//! compiles the threads' filters one after the other. Threads do not depend on the guest, so a
//! pre-forked VMM of the [`zygote`](crate::zygote) has its worker threads before it receives its
//! configuration. The process is still root then. Each thread becomes the VM's user before it
//! starts its work, because [`jail::enter`](crate::jail::enter) changes only the calling thread.

use crate::config::{JailConfig, Shape};
use crate::disk::Reads;
use crate::jail;
use crate::seccomp::{Filters, Stage, ThreadFilter};
use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

type Work<T> = Box<dyn FnOnce(T) + Send>;

/// The stack of the thread of the disks. Builds without optimisation touch 36 KiB of it in the
/// daemon's tests; large buffers are on the heap.
const DISKS_STACK_BYTES: usize = 256 << 10;

/// A thread that waits for one piece of work. It has made a `T` before its filter was installed.
#[derive(Debug)]
pub struct Worker<T = ()> {
    thread: JoinHandle<()>,
    work: Sender<Work<T>>,
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

impl<T: 'static> Worker<T> {
    /// Starts a thread that calls `make`, and is then under `filter`, in the set-up stage.
    fn start(
        thread: Builder,
        filter: &ThreadFilter,
        set_up: Sender<Infallible>,
        make: fn() -> T,
    ) -> io::Result<Self> {
        let (work, waiting): (Sender<Work<T>>, Receiver<Work<T>>) = channel();
        let first = filter.clone();
        let thread = thread.spawn(move || {
            // The thread may inherit a low priority from the thread that makes it. Guests run at
            // the normal priority.
            jail::normal_priority();
            let made = make();
            first.enter(Stage::SetUp);
            // The sender is dropped: the process has no work for this thread.
            if let Ok(work) = waiting.recv() {
                work(made);
            }
        })?;
        Ok(Self { thread, work, filter: filter.clone(), jail: None, set_up })
    }

    /// Makes the thread become the VM's user, enter the guest stage of its filter, and do `work`. A
    /// worker serves one `work` in its life.
    pub fn set_to(self, work: impl FnOnce(T) + Send + 'static) -> JoinHandle<()> {
        let Self { thread, work: sender, filter, jail, set_up } = self;
        let all = move |made| {
            if let Some(Err(error)) = jail.map(|jail| jail::become_user(&jail)) {
                crate::exit::fail(&error);
            }
            filter.enter(Stage::Guest);
            drop(set_up);
            work(made);
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
    /// The thread of all devices but the disks, named `devices`.
    pub devices: Worker,
    /// The thread of the disks, named `disks`, which has made its ring; `None` for a VM without
    /// disks.
    pub disks: Option<Worker<Reads>>,
    /// The vCPU threads, in the order of vCPU ids.
    pub vcpus: Vec<Worker>,
    /// The wait until all of them are narrowed.
    pub narrowed: Narrowed,
}

impl Workers {
    /// Makes the threads of a VM with this many vCPUs, and with `disks` that of its disks. They
    /// inherit the capabilities of the calling thread, so the caller calls
    /// [`narrow`](crate::jail::narrow) first.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn new(filters: &Filters, vcpus: u8, disks: bool) -> io::Result<Self> {
        let (set_up, narrowed) = channel();
        let start = |name: &str, filter| {
            Worker::start(Builder::new().name(name.to_owned()), filter, set_up.clone(), || ())
        };
        let devices = start("devices", &filters.devices)?;
        let disks = disks.then(|| Self::for_disks(filters, set_up.clone())).transpose()?;
        let vcpu = |id| start(&format!("vcpu{id}"), &filters.vcpu);
        let vcpus = (0..vcpus).map(vcpu).collect::<io::Result<_>>()?;
        Ok(Self { devices, disks, vcpus, narrowed: Narrowed(narrowed) })
    }

    fn for_disks(filters: &Filters, set_up: Sender<Infallible>) -> io::Result<Worker<Reads>> {
        let thread = Builder::new().name("disks".to_owned()).stack_size(DISKS_STACK_BYTES);
        Worker::start(thread, &filters.disks, set_up, Reads::new)
    }

    /// Gives each thread `jail`, which it enters before its work. If the number of vCPU threads is
    /// not that of `shape`, all threads are made anew; a thread of disks that is missing or not
    /// needed is made or ended. New threads inherit the calling thread's user, because the caller
    /// is in the jail already.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn prepare(
        mut self,
        filters: &Filters,
        shape: Shape,
        jail: Option<&JailConfig>,
    ) -> io::Result<Self> {
        let disks = shape.disks > 0;
        if self.vcpus.len() != usize::from(shape.vcpus) {
            self.devices.end();
            self.vcpus.into_iter().for_each(Worker::end);
            self.disks.into_iter().for_each(Worker::end);
            return Self::new(filters, shape.vcpus, disks);
        }
        for worker in self.vcpus.iter_mut().chain([&mut self.devices]) {
            worker.jail = jail.cloned();
        }
        if let Some(worker) = &mut self.disks {
            worker.jail = jail.cloned();
        }
        self.disks = match self.disks.take() {
            None if disks => Some(Self::for_disks(filters, self.devices.set_up.clone())?),
            Some(worker) if !disks => {
                worker.end();
                None
            }
            same => same,
        };
        Ok(self)
    }
}
