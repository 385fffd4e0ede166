//! Extension headers: GNU long names and pax records.

use super::{FILE, sandbox, stream, unpack};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use tar::{Builder, EntryType, Header};

/// An endless stream of letters, with the number of bytes read.
struct Counted(usize);

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        into.fill(b'a');
        self.0 += into.len();
        Ok(into.len())
    }
}

#[test]
fn an_extension_header_takes_no_more_memory_than_its_cap() {
    for kind in [
        EntryType::GNULongName,
        EntryType::GNULongLink,
        EntryType::XHeader,
        EntryType::XGlobalHeader,
    ] {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(1 << 40);
        header.set_cksum();
        let mut taken = Counted(0);
        let mut endless = (&header.as_bytes()[..]).chain(&mut taken);
        let error = unpack(sandbox().target.as_path(), &mut endless).unwrap_err().to_string();
        assert!(taken.0 < 3 << 20, "{} bytes of it were read", taken.0);
        assert!(error.contains("expected at most 1048576 bytes"), "{error}");
    }
}

#[test]
fn pax_records_count() {
    let pax = |records: &[(&str, &[u8])]| {
        let mut builder = Builder::new(Vec::new());
        builder.append_pax_extensions(records.iter().copied()).unwrap();
        let mut bytes = builder.into_inner().unwrap();
        bytes.truncate(bytes.len() - 1024);
        bytes.extend(stream(&[("short", FILE, "", b"four")]));
        bytes
    };
    let sandbox = sandbox();
    let long = "p".repeat(150);
    let good = pax(&[("path", long.as_bytes()), ("mtime", b"1234567890.25"), ("size", b"4")]);
    unpack(&sandbox.target, &mut good.as_slice()).unwrap();
    let meta = fs::metadata(sandbox.target.join(&long)).unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec()), (1_234_567_890, 250_000_000));
    // The header says four bytes, but the pax record takes precedence.
    unpack(&sandbox.target, &mut pax(&[("size", b"5")]).as_slice()).unwrap();
    assert_eq!(fs::read(sandbox.target.join("short")).unwrap(), b"four\0");
    for bad in
        [("path", b"../x".as_slice()), ("path", b"a\0b"), ("size", b"99999"), ("size", b"-4")]
    {
        assert!(unpack(&sandbox.target, &mut pax(&[bad]).as_slice()).is_err(), "{bad:?}");
    }
}
