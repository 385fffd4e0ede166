//! Reads in flight without a device: their bounds, and the eventfd that ends a wait for them.

use super::reads::{Nowait, learnt};
use super::{Disk, DiskSpec, Flight, IoList, Reads, Started};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};

const SIZE: usize = 4 << 20;
/// Ends only a hang.
const LONG: Duration = Duration::from_secs(300);

/// A disk of zeroes in memory, whose reads in flight end after their submission.
fn disk() -> Disk {
    let base = File::from(memfd_create("base", MemfdFlags::CLOEXEC).unwrap());
    base.set_len(SIZE as u64).unwrap();
    let (layers, trees) = (Vec::new(), Vec::new());
    let size_bytes = SIZE as u64;
    Disk::open(DiskSpec { size_bytes, base: base.into(), layers, writable: None, trees }).unwrap()
}

/// Reads a block in flight, in a wait that a kick ends too.
fn read_one(disk: &mut Disk, reads: &mut Reads) {
    let mut bytes = vec![1_u8; 4096];
    let list = IoList::of(&mut bytes);
    // SAFETY: it is dropped at the end of this function. Nothing else has the disk.
    let mut flight = unsafe { Flight::new(reads) };
    assert!(matches!(flight.read(disk, 0, &list, false, ()), Started::InFlight));
    let ended = loop {
        flight.wait(disk, true);
        if let Some(ended) = flight.finished(disk) {
            break ended;
        }
    };
    ended.1.unwrap();
    drop(flight);
    assert_eq!(bytes, [0; 4096]);
}

#[test]
fn what_a_pause_waits_for_is_bounded_in_parts_and_bytes() {
    for (bytes, most) in [(4096, 32), (64 << 10, 16), (600 << 10, 2), (3 << 20, 1)] {
        let (mut disk, mut reads) = (disk(), Reads::always());
        let mut buffers = vec![vec![1_u8; bytes]; most + 1];
        let lists: Vec<_> = buffers.iter_mut().map(|buffer| IoList::of(buffer)).collect();
        // SAFETY: it is dropped at the end of this block. Nothing else has the disk.
        let mut flight = unsafe { Flight::new(&mut reads) };
        let mut begun = 0;
        for list in &lists {
            if !flight.has_room() {
                break;
            }
            assert!(matches!(flight.read(&mut disk, 0, list, false, ()), Started::InFlight));
            begun += 1;
        }
        assert_eq!(begun, most, "reads of {bytes} bytes");
        flight.submit_all(&disk);
        let mut ended = 0;
        while flight.busy() {
            flight.wait(&disk, false);
            while let Some(((), read)) = flight.finished(&disk) {
                read.unwrap();
                ended += 1;
            }
        }
        assert_eq!(ended, most);
        assert!(flight.has_room());
    }
}

/// The wait for the eventfd stays armed after a turn, and the thread of the disks reads the eventfd
/// between two turns. The wait ends later, although the eventfd is empty then.
#[test]
fn a_kick_that_was_read_since_does_not_block_the_next_wait() {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        let kick = Arc::new(EventFd::new(EFD_CLOEXEC).unwrap());
        let (mut disk, mut reads) = (disk(), Reads::always());
        reads.watch(&kick, 1);
        read_one(&mut disk, &mut reads);
        assert!(!reads.take_kicked(), "nothing has kicked");
        kick.write(1).unwrap();
        assert_eq!(kick.read().unwrap(), 1);
        for _ in 0..100 {
            read_one(&mut disk, &mut reads);
        }
        let stale = reads.take_kicked();
        // A new kick is noticed as well.
        kick.write(1).unwrap();
        while !reads.take_kicked() {
            read_one(&mut disk, &mut reads);
        }
        done.send(stale).unwrap();
    });
    let stale = is_done.recv_timeout(LONG).expect("a wait does not read an empty eventfd");
    assert!(stale, "the wait has ended for a kick that was read since");
}

#[test]
fn only_an_error_about_the_file_system_decides_how_a_file_is_read() {
    let after = |errno| learnt(&Err(io::Error::from_raw_os_error(errno)));
    assert_eq!([learnt(&Ok(0)), after(libc::EAGAIN)], [Some(Nowait::Supported); 2]);
    assert_eq!(after(libc::EOPNOTSUPP), Some(Nowait::Unsupported));
    for errno in [libc::EIO, libc::ENOMEM, libc::EINTR, libc::EFAULT] {
        assert_eq!(after(errno), None, "{errno}");
    }
}
