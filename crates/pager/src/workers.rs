//! Threads that are started before there is work for them, because the first creation from a
//! template would wait for their start.

use std::ffi::CStr;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

type Work = Box<dyn FnOnce() + Send>;

/// Threads that wait for work. When this is dropped, those that got none end.
#[derive(Debug, Default)]
pub struct Workers(Vec<(Sender<Work>, JoinHandle<()>)>);

impl Workers {
    /// `count` threads that wait.
    ///
    /// # Errors
    /// The host cannot start them.
    pub fn waiting(count: usize) -> io::Result<Self> {
        let one = |_| {
            let (sender, work) = channel::<Work>();
            let waits = move || {
                if let Ok(work) = work.recv() {
                    work();
                }
            };
            Ok((sender, Builder::new().name("waits".to_owned()).spawn(waits)?))
        };
        (0..count).map(one).collect::<io::Result<_>>().map(Self)
    }

    /// Has `work` done by a thread of this name: one that waits, or else a new one.
    ///
    /// # Errors
    /// The host cannot start a thread.
    pub fn start(
        &mut self,
        name: &'static CStr,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let named = move || {
            // For people only.
            let _ = rustix::thread::set_name(name);
            work();
        };
        let Some((sender, thread)) = self.0.pop() else { return Builder::new().spawn(named) };
        sender.send(Box::new(named)).map_err(|_| io::Error::other("a thread has ended"))?;
        Ok(thread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::ThreadId;

    #[test]
    fn waiting_threads_work_first_then_new_ones_and_the_rest_end() {
        let mut workers = Workers::waiting(3).unwrap();
        let waiting: Vec<ThreadId> = workers.0.iter().map(|(_, t)| t.thread().id()).collect();
        let (sender, done) = channel();
        let start = |workers: &mut Workers, n: u32| {
            let sender = sender.clone();
            let work = move || {
                let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
                sender.send((n, name, std::thread::current().id())).unwrap();
            };
            workers.start(c"works", work).unwrap().join().unwrap();
            let (number, name, thread) = done.recv().unwrap();
            assert_eq!((number, name.as_str()), (n, "works\n"));
            thread
        };
        assert!(waiting.contains(&start(&mut workers, 1)));
        assert!(waiting.contains(&start(&mut workers, 2)));
        let mut none = Workers::default();
        assert!(!waiting.contains(&start(&mut none, 3)));
        let (sender, thread) = workers.0.pop().unwrap();
        drop(sender);
        thread.join().unwrap();
    }
}
