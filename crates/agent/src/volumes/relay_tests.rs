use super::*;
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// The longest message that a socket which stands for the device takes.
const LONG: usize = 100_000;

fn message(length: usize, fill: u8) -> Vec<u8> {
    let mut bytes = vec![fill; length];
    bytes[..4].copy_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
    bytes
}

/// A relay whose device is one end of a socket of whole messages, as the kernel's is.
struct World {
    /// The kernel.
    kernel: OwnedFd,
    /// The host's end of the stream.
    host: UnixStream,
    relay: std::thread::JoinHandle<Result<RelayEnd, RelayError>>,
}

impl World {
    fn new(early: &[u8]) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let (kernel, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        for end in [&kernel, &device] {
            let size = rustix::net::sockopt::set_socket_send_buffer_size_force(end, 8 << 20);
            size.expect("these tests need CAP_NET_ADMIN");
        }
        rustix::io::ioctl_fionbio(&device, true).unwrap();
        let (host, stream) = UnixStream::pair().unwrap();
        let early = early.to_vec();
        let relay = std::thread::spawn(move || relay(stream.as_fd(), device.as_fd(), &early));
        Self { kernel, host, relay }
    }

    fn next(&self) -> Vec<u8> {
        let mut bytes = vec![0; MAX_FUSE_BYTES];
        let got = rustix::io::read(&self.kernel, &mut bytes[..]).unwrap();
        bytes.truncate(got);
        bytes
    }

    /// How the relay ends once the host closes the stream.
    fn end(self) -> Result<RelayEnd, RelayError> {
        drop(self.host);
        self.relay.join().unwrap()
    }
}

#[test]
fn messages_pass_whole_in_both_directions() {
    let early = message(40, 7);
    let mut world = World::new(&early[..30]);
    world.host.write_all(&early[30..]).unwrap();
    assert_eq!(world.next(), early, "bytes that came with the request");
    // Several in one packet, and one in many.
    let several: Vec<_> = [16, 17, LONG, 16].map(|length| message(length, 3)).into();
    world.host.write_all(&several.concat()).unwrap();
    for one in &several {
        assert_eq!(world.next(), *one);
    }
    for byte in &message(50, 9) {
        world.host.write_all(&[*byte]).unwrap();
    }
    assert_eq!(world.next(), message(50, 9));
    for one in &several {
        rustix::io::write(&world.kernel, one).unwrap();
        let mut got = vec![0; one.len()];
        world.host.read_exact(&mut got).unwrap();
        assert_eq!(got, *one);
    }
    assert_eq!(world.end(), Ok(RelayEnd::Host));
}

/// The host writes answers and reads no request meanwhile, and the kernel sends requests and takes
/// no answer meanwhile. Each has more than the sockets hold.
#[test]
fn a_host_whose_answers_are_stuck_is_served() {
    const COUNT: usize = 200;
    let mut world = World::new(&[]);
    let kernel = world.kernel.try_clone().unwrap();
    let sending = std::thread::spawn(move || {
        for _ in 0..COUNT {
            rustix::io::write(&kernel, &message(LONG, 1)).unwrap();
        }
    });
    let mut to = world.host.try_clone().unwrap();
    let answering = std::thread::spawn(move || {
        for _ in 0..COUNT {
            to.write_all(&message(LONG, 2)).unwrap();
        }
    });
    for _ in 0..COUNT {
        assert_eq!(world.next(), message(LONG, 2));
    }
    answering.join().unwrap();
    let mut got = vec![0; LONG];
    for _ in 0..COUNT {
        world.host.read_exact(&mut got).unwrap();
        assert_eq!(got, message(LONG, 1));
    }
    sending.join().unwrap();
    assert_eq!(world.end(), Ok(RelayEnd::Host));
}

#[test]
fn what_is_no_message_ends_the_relay() {
    for length in [0, 15, u32::try_from(MAX_FUSE_BYTES).unwrap() + 1, u32::MAX] {
        let mut world = World::new(&[]);
        world.host.write_all(&length.to_le_bytes()).unwrap();
        assert_eq!(world.relay.join().unwrap(), Err(RelayError::Length(length)));
        // The host learns of it.
        assert_eq!(world.host.read(&mut [0]).unwrap_or(0), 0);
    }
    let mut world = World::new(&[]);
    world.host.write_all(&message(40, 0)[..39]).unwrap();
    assert_eq!(world.end(), Err(RelayError::Cut(39)));
    assert_eq!(World::new(&[1, 0, 0, 0]).end(), Err(RelayError::Length(1)));
}

proptest! {
    #[test]
    fn a_message_is_found_by_its_length(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let length = bytes.first_chunk::<4>().map(|four| u32::from_le_bytes(*four));
        let found = first(&bytes);
        match length.map(|length| usize::try_from(length).unwrap()) {
            None => prop_assert_eq!(found, Ok(None)),
            Some(length) if (MIN_FUSE_BYTES..=MAX_FUSE_BYTES).contains(&length) => {
                prop_assert_eq!(found, Ok(bytes.get(..length)));
            }
            Some(_) => prop_assert!(matches!(found, Err(RelayError::Length(_)))),
        }
    }
}
