//! The threads of a VMM besides its main one: made ahead, each with its filter on, they wait for their work.
//!
//! A thread costs 0.1 ms and more of a birth: the first one of a process 0.2, and each has its filter compiled by the kernel, one after
//! the other. Nothing of that depends on the guest, so a spare of the [`zygote`](crate::zygote) has its crew already when it is told what
//! to become. It is then still root; each thread becomes the VM's user by itself, before anything else of its work, as
//! [`jail::enter`](crate::jail::enter) changes only the thread that calls it.

use crate::config::JailConfig;
use crate::jail;
use crate::seccomp::{self, Filters, Program};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

type Work = Box<dyn FnOnce() + Send>;

/// A thread that waits for its work.
#[derive(Debug)]
pub struct Hand {
    thread: JoinHandle<()>,
    work: Sender<Work>,
    jail: Option<JailConfig>,
}

impl Hand {
    /// Starts one that may call what `filter` allows.
    fn start(name: String, filter: Option<Arc<Program>>) -> io::Result<Self> {
        let (work, waiting): (Sender<Work>, Receiver<Work>) = channel();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            // One that has to be made now is made by a thread of low priority, perhaps; guests run at the normal one.
            jail::normal_priority();
            seccomp::apply(filter.as_deref());
            // Where the other end is gone there is nothing to do.
            if let Ok(work) = waiting.recv() {
                work();
            }
        })?;
        Ok(Self { thread, work, jail: None })
    }

    /// Has it become the VM's user and do `work`, for as long as the process lives.
    pub fn set_to(self, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
        let Self { thread, work: sender, jail } = self;
        let all = move || {
            if let Some(Err(error)) = jail.map(|jail| jail::become_user(&jail)) {
                crate::exit::fail(&error);
            }
            work();
        };
        // It waits for nothing else, so it is there to receive it.
        let _ = sender.send(Box::new(all));
        thread
    }

    /// Ends it, and waits until it has ended.
    fn end(self) {
        drop(self.work);
        let _ = self.thread.join();
    }
}

/// All of them.
#[derive(Debug)]
pub struct Crew {
    /// The device thread.
    pub devices: Hand,
    /// Those of the vCPUs, in order.
    pub vcpus: Vec<Hand>,
}

impl Crew {
    /// Those of a VM with this many vCPUs. They have the rights of their maker, so that has been [`narrow`](crate::jail::narrow)ed before.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn new(filters: &Filters, vcpus: u8) -> io::Result<Self> {
        let devices = Hand::start("devices".to_owned(), filters.devices.clone())?;
        let vcpu = |id| Hand::start(format!("vcpu{id}"), filters.vcpu.clone());
        Ok(Self { devices, vcpus: (0..vcpus).map(vcpu).collect::<io::Result<_>>()? })
    }

    /// Those of a VM with this many vCPUs, all of which live in `jail` before they do anything. The calling thread is in it already: threads
    /// that have to be made now, because there are not as many as wanted, have its rights from the beginning.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn enlist(mut self, filters: &Filters, vcpus: u8, jail: Option<&JailConfig>) -> io::Result<Self> {
        if self.vcpus.len() != usize::from(vcpus) {
            self.devices.end();
            self.vcpus.into_iter().for_each(Hand::end);
            return Self::new(filters, vcpus);
        }
        for hand in self.vcpus.iter_mut().chain([&mut self.devices]) {
            hand.jail = jail.cloned();
        }
        Ok(self)
    }
}
