//! The daemon's end, against a peer that does what a packer that was taken over may do.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use dayfly_packer::client::Client;
use dayfly_packer::wire::{FromPacker, pair, receive, send};
use dayfly_store::{FoundFrame, RamJob, WorkError};
use dayfly_units::{Digest, Name};
use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Generous, because the host may be busy; only a hang takes this long.
const WITHIN: Duration = Duration::from_secs(60);

/// The error of a classification by `peer`, whose socket is closed then.
fn refusal(
    within: Duration,
    is_wanted: impl Fn() -> bool + Send + 'static,
    peer: impl FnOnce(&OwnedFd) + Send + 'static,
) -> WorkError {
    let (ours, theirs) = pair().unwrap();
    let peer = std::thread::spawn(move || peer(&theirs));
    let mut client = Client::new(ours, within, is_wanted);
    let (tenant, memory): (Name, _) = ("one".parse().unwrap(), tempfile::tempfile().unwrap());
    let job = RamJob { tenant: &tenant, memory, free: &[], hints: &[], disks: Vec::new() };
    let error = client.classify(&job, &mut |_, _| Ok(())).unwrap_err();
    drop(client);
    peer.join().unwrap();
    error
}

/// Waits until the daemon closes the socket.
fn says_nothing(socket: &OwnedFd) {
    let (mut buffer, mut fds) = (Vec::new(), Vec::new());
    while receive(socket, &mut buffer, &mut fds).is_ok_and(|packet| packet.is_some()) {
        fds.clear();
    }
}

#[test]
fn packets_of_nothing_are_refused() {
    let error = refusal(
        WITHIN,
        || true,
        |socket| {
            for _ in 0..10_000 {
                if send(socket, b"f", &[]).is_err() {
                    return;
                }
            }
        },
    );
    assert!(error.text.contains("cannot be read"), "{error}");
}

#[test]
fn frames_without_end_do_not_outlast_the_time_limit() {
    let frames = vec![(7, FoundFrame::Page(Digest::of(b"a page")))];
    let packet = FromPacker::Frames(frames).encode();
    let error = refusal(
        Duration::from_millis(300),
        || true,
        move |socket| {
            let begun = Instant::now();
            while begun.elapsed() < WITHIN && send(socket, &packet, &[]).is_ok() {}
        },
    );
    assert!(error.text.contains("has not done its work within"), "{error}");
}

#[test]
fn silence_does_not_outlast_the_time_limit() {
    let error = refusal(Duration::from_millis(300), || true, says_nothing);
    assert!(error.text.contains("has not done its work within"), "{error}");
}

#[test]
fn a_packer_whose_work_nothing_waits_for_is_given_up() {
    let asked = AtomicU32::new(0);
    // The job is sent, and some waits pass.
    let is_wanted = move || asked.fetch_add(1, Ordering::Relaxed) < 3;
    let error = refusal(3 * WITHIN, is_wanted, |socket| {
        let begun = Instant::now();
        let (mut buffer, mut fds) = (Vec::new(), Vec::new());
        rustix::net::sockopt::set_socket_timeout(
            socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(Duration::from_secs(1)),
        )
        .unwrap();
        // It ends first if the daemon does not.
        while begun.elapsed() < WITHIN {
            match receive(socket, &mut buffer, &mut fds) {
                Ok(None) => return,
                _ => fds.clear(),
            }
        }
    });
    assert!(error.text.contains("nothing waits for its work"), "{error}");
}

#[test]
fn a_full_disk_is_reported_as_one() {
    for is_no_space in [true, false] {
        let failed = FromPacker::Failed { text: "writing a pack".to_owned(), is_no_space };
        let error = refusal(
            WITHIN,
            || true,
            move |socket| {
                send(socket, &failed.encode(), &[]).unwrap();
                says_nothing(socket);
            },
        );
        assert!(error.text.contains("writing a pack"), "{error}");
        assert_eq!(error.is_no_space, is_no_space);
    }
}
