use super::*;
use std::os::fd::AsFd;

impl Meter {
    /// The CPU time of a thread, in ns.
    pub fn thread_ns(&self, thread: Thread) -> u64 {
        self.now(thread as usize)
    }
}

fn file() -> (tempfile::TempDir, std::path::PathBuf, File) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("exit.json");
    let file = File::options().create_new(true).read(true).append(true).open(&path).unwrap();
    (folder, path, file)
}

#[test]
fn what_is_counted_is_in_the_file_beside_the_record() {
    let (_folder, path, mut file) = file();
    prepare(&file).unwrap();
    let empty = std::fs::read(&path).unwrap();
    assert_eq!(split(&empty), (None, [].as_slice()));
    let meter = Meter::map(file.as_fd()).unwrap();
    meter.read(3, 4608);
    meter.read(3, 512);
    meter.written(7, 1024);
    meter.read(8, 1);
    meter.received(60);
    meter.sent(70);
    meter.sent(80);
    meter.refused();
    ThreadClock::new(&meter, Thread::Disks).look();
    ThreadClock::new(&meter, Thread::Main).look();
    file.write_all(b"{}").unwrap();
    let mut disks = [DiskTraffic::default(); MAX_DISKS];
    disks[3] = DiskTraffic { reads: 2, read_bytes: 5120, ..DiskTraffic::default() };
    disks[7] = DiskTraffic { writes: 1, written_bytes: 1024, ..DiskTraffic::default() };
    let net = NetTraffic {
        received_packets: 1,
        received_bytes: 60,
        sent_packets: 2,
        sent_bytes: 150,
        refused_packets: 1,
    };
    let bytes = std::fs::read(&path).unwrap();
    let (metered, record) = split(&bytes);
    let metered = metered.unwrap();
    assert_eq!((metered.disks, metered.net, record), (disks, net, b"{}".as_slice()));
    assert_eq!((meter.disks(MAX_DISKS), meter.net()), (disks.to_vec(), net));
    assert_eq!(meter.disks(4), disks[..4]);
    // What came before the first look is set-up, and only the main thread's counts.
    assert!(metered.set_up_us > 0, "{metered:?}");
    assert_eq!((metered.main_us, metered.io_us), (0, 0));
}

#[test]
fn a_record_of_an_earlier_version_and_one_of_a_later_are_told_apart() {
    let old = br#"{"reason":"panic","message":"it panicked"}"#;
    assert_eq!(split(old), (None, old.as_slice()));
    let long = [b"{".as_slice(), &[b' '; METER_BYTES], b"}"].concat();
    assert_eq!(split(&long), (None, long.as_slice()));
    assert_eq!(split(&[]), (None, [].as_slice()));
    let mut page = vec![0; METER_BYTES];
    page[..8].copy_from_slice(&MAGIC);
    page[8] = 2;
    page.extend_from_slice(b"{}");
    assert_eq!(split(&page), (None, b"{}".as_slice()));
    page[8] = 1;
    page[16..40].fill(0xff);
    let (metered, record) = split(&page);
    let most = u64::MAX / 1000;
    assert_eq!(metered.map(|of| (of.io_us, of.main_us)), Some((2 * most, most)));
    assert_eq!(record, b"{}");
    assert_eq!(Metered::decode(&page[..METER_BYTES - 1]), None);
}

#[test]
fn a_thread_notes_its_own_cpu_time_from_its_first_look_on() {
    let meter = Meter::default();
    let spin = || {
        let begun = cpu_ns();
        while cpu_ns() < begun + 2_000_000 {}
    };
    spin();
    let mut clock = ThreadClock::new(&meter, Thread::Disks);
    clock.look();
    assert_eq!(meter.now(Thread::Disks as usize), 0, "what was before does not count");
    spin();
    clock.look();
    let noted = meter.now(Thread::Disks as usize);
    assert!((2_000_000..u64::MAX / 2).contains(&noted), "{noted}");
    assert_eq!(meter.now(Thread::Devices as usize), 0);
    // Another thread's work is not this one's.
    std::thread::spawn(spin).join().unwrap();
    clock.looked -= PERIOD;
    clock.look();
    assert!(meter.now(Thread::Disks as usize) - noted < 2_000_000);
}

#[test]
fn the_page_has_room_before_it_is_mapped_or_there_is_an_error() {
    let (_folder, _path, file) = file();
    prepare(&file).unwrap();
    let held = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
    assert!(held >= METER_BYTES as u64, "{held} bytes");
    let full = File::options().append(true).open("/dev/full").unwrap();
    let error = prepare(&full).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(error.to_string().contains("the page of the VM's bill"), "{error}");
}

#[test]
fn of_two_readings_each_figure_is_the_higher_one() {
    let mut one = Metered { io_us: 2, main_us: 1, ..Metered::default() };
    let mut two = Metered { io_us: 1, main_us: 2, set_up_us: 3, ..Metered::default() };
    (one.net.sent_bytes, two.net.sent_packets) = (7, 8);
    (one.disks[1].reads, two.disks[1].reads, two.disks[7].written_bytes) = (5, 4, 6);
    let mut both = Metered { io_us: 2, main_us: 2, set_up_us: 3, ..Metered::default() };
    (both.net.sent_bytes, both.net.sent_packets) = (7, 8);
    (both.disks[1].reads, both.disks[7].written_bytes) = (5, 6);
    assert_eq!((one.max(two), two.max(one)), (both, both));
}

#[test]
fn a_file_that_cannot_be_mapped_is_an_error() {
    let (_folder, path, _file) = file();
    let only_written = File::options().append(true).open(path).unwrap();
    Meter::map(only_written.as_fd()).unwrap_err();
}
