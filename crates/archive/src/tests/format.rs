//! Each rule of the format, with archives built by hand.

use super::*;

fn one(entries: &[Vec<u8>]) -> Whole {
    let all = read(of(entries).as_slice()).unwrap();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].clone()
}

fn refused(entries: &[Vec<u8>], words: &str) {
    let text = read(of(entries).as_slice()).unwrap_err().to_string();
    assert!(text.contains(words), "expected {words:?} in {text:?}");
}

#[test]
fn records_are_read_by_their_length() {
    let records = pax(&[
        ("SCHILY.acl.access", b"user::rw-\ngroup::r--\nother::r--\n"),
        ("comment", b"12 path=evil\n"),
        ("SCHILY.xattr.security.capability", b"\x01\0\0\x02=\n\0"),
        ("path", b"a\nb=c"),
    ]);
    let whole = one(&[records, raw(b'0', b"x", 1, b"1")]);
    assert_eq!(whole.head.path, b"a\nb=c");
    assert_eq!(whole.head.xattrs[&b"security.capability"[..]], b"\x01\0\0\x02=\n\0");
    for (body, words) in [
        (&b"x path=a\n"[..], "begins with its length"),
        (b"99 path=a\n", "record of 99 bytes"),
        (b"9 path=ab\n", "ends with a line break"),
        (b"3 \n", "KEY=VALUE"),
        (b"4 =\n", "KEY=VALUE"),
        (b"0 ", "ends with a line break"),
        (b"+9 path=a\n", "begins with its length"),
        (b"99999999999999999999999 a=b\n", "begins with its length"),
        (b"9 size=x\n", "a number in the pax record size"),
        (b"\0\0\0", "begins with its length"),
    ] {
        refused(&[raw(b'x', b"pax", body.len() as u64, body), raw(b'0', b"x", 0, b"")], words);
    }
    // An empty value cancels a record.
    let two = [pax(&[("path", b"a"), ("path", b""), ("size", b"")]), raw(b'0', b"x", 1, b"1")];
    assert_eq!(one(&two).head.path, b"x");
}

#[test]
fn sizes_names_and_times() {
    let whole = one(&[pax(&[("size", b"5")]), raw(b'0', b"big.bin", 0, b"AAAAA")]);
    assert_eq!(whole.content, b"AAAAA");
    for (text, time) in [
        (&b"1.5"[..], (1, 500_000_000)),
        (b"-1.25", (-2, 750_000_000)),
        (b"-0.5", (-1, 500_000_000)),
        (b"7", (7, 0)),
        (b"1.0000000019", (1, 1)),
        (b"nonsense", (0, 0)),
    ] {
        let head = one(&[pax(&[("mtime", text)]), raw(b'0', b"x", 0, b"")]).head;
        assert_eq!((head.mtime_s, head.mtime_ns), time, "{}", String::from_utf8_lossy(text));
    }
    // GNU's long names, over which pax takes precedence.
    let long = [b"n".repeat(200), b"\0".to_vec()].concat();
    let gnu = raw(b'L', b"././@LongLink", 201, &long);
    assert_eq!(one(&[gnu.clone(), raw(b'0', b"x", 0, b"")]).head.path, b"n".repeat(200));
    assert_eq!(one(&[gnu, pax(&[("path", b"p")]), raw(b'0', b"x", 0, b"")]).head.path, b"p");
    let link = raw(b'K', b"././@LongLink", 201, &long);
    assert_eq!(one(&[link, raw(b'2', b"x", 0, b"")]).head.link, b"n".repeat(200));
    // ustar's prefix; a file whose name ends in '/' is a folder.
    for kind in [b'0', 0, b'7'] {
        let mut block = raw(kind, b"name/", 0, b"");
        block[345..351].copy_from_slice(b"prefix");
        let head = one(&[summed(block)]).head;
        assert_eq!((head.path.as_slice(), head.kind), (&b"prefix/name/"[..], Kind::Folder));
    }
    // A global header names no entry.
    let mut global = pax(&[("path", b"evil")]);
    global[156] = b'g';
    assert_eq!(one(&[summed(global), raw(b'0', b"x", 0, b"")]).head.path, b"x");
}

#[test]
fn numbers() {
    let with = |field: std::ops::Range<usize>, bytes: &[u8]| {
        let mut block = raw(b'0', b"x", 0, b"");
        block[field].copy_from_slice(bytes);
        summed(block)
    };
    assert_eq!(one(&[with(108..116, b"  12 \0\0\0")]).head.uid, 0o12);
    assert_eq!(one(&[with(108..116, b"        ")]).head.uid, 0);
    assert_eq!(one(&[with(108..116, b"12345670")]).head.uid, 0o12_345_670);
    assert_eq!(
        one(&[with(108..116, &[0x80, 0, 0, 0, 0xff, 0xff, 0xff, 0xfe])]).head.uid,
        0xffff_fffe
    );
    assert_eq!(one(&[with(136..148, &[0xff; 12])]).head.mtime_s, -1);
    let big = [0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    assert_eq!(one(&[with(136..148, &big)]).head.mtime_s, i64::MAX);
    refused(&[with(108..116, b"12x45670")], "a number as owner");
    refused(&[with(108..116, &[0xff; 8])], "at least 0");
    refused(&[with(136..148, &[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])], "a number as time");
    refused(&[with(124..136, &[0xff; 12])], "at least 0");
    refused(&[with(124..136, b"77777777777\0")], "at most 67108864 bytes");
}

#[test]
fn numbers_of_devices_are_no_larger_than_linux_has() {
    let with = |major: &[u8], minor: &[u8]| {
        let mut block = raw(b'3', b"null", 0, b"");
        block[329..337].copy_from_slice(major);
        block[337..345].copy_from_slice(minor);
        summed(block)
    };
    assert_eq!(one(&[with(b"0007777\0", b"3777777\0")]).head.device, (4095, 1_048_575));
    refused(&[with(b"0010000\0", b"0000003\0")], "a device major of at most 12 bits");
    refused(&[with(b"0000001\0", b"4000000\0")], "a device minor of at most 20 bits");
    refused(&[with(b"0000001\0", b"11111111")], "got 2396745");
    refused(&[with(b"\x80\0\0\x01\0\0\0\x01", b"0000003\0")], "a device major");
}

#[test]
fn sparse_files_in_all_formats() {
    let mut expected = vec![0; 20_000];
    expected[5_000..5_003].copy_from_slice(b"one");
    expected[9_000..9_003].copy_from_slice(b"two");
    let mut gnu = raw(b'S', b"s", 6, b"onetwo");
    gnu[257..265].copy_from_slice(b"ustar  \0");
    for (at, text) in [(386, "5000"), (398, "3"), (410, "9000"), (422, "3"), (483, "20000")] {
        let octal = format!("{:011o}", text.parse::<u64>().unwrap());
        gnu[at..at + 11].copy_from_slice(octal.as_bytes());
    }
    let v00 = pax(&[
        ("GNU.sparse.size", b"20000"),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.offset", b"5000"),
        ("GNU.sparse.numbytes", b"3"),
        ("GNU.sparse.offset", b"9000"),
        ("GNU.sparse.numbytes", b"3"),
        ("path", b"s"),
    ]);
    let v01 = pax(&[
        ("GNU.sparse.size", b"20000"),
        ("GNU.sparse.name", b"s"),
        ("GNU.sparse.map", b"5000,3,9000,3"),
    ]);
    let mut map = b"2\n5000\n3\n9000\n3\n".to_vec();
    map.resize(512, 0);
    let v10 = pax(&[
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("path", b"GNUSparseFile.1/s"),
        ("GNU.sparse.name", b"s"),
        ("GNU.sparse.realsize", b"20000"),
    ]);
    let data = raw(b'0', b"GNUSparseFile.1/s", 6, b"onetwo");
    let with_map = raw(b'0', b"GNUSparseFile.1/s", 518, &[&map[..], b"onetwo"].concat());
    for entries in
        [vec![summed(gnu)], vec![v00, data.clone()], vec![v01, data.clone()], vec![v10, with_map]]
    {
        let whole = one(&entries);
        assert_eq!(whole.head.path, b"s");
        assert!(whole.content == expected, "{:?}", whole.content.len());
    }
    refused(&[pax(&[("GNU.sparse.map", b"1,2,3")]), data.clone()], "pairs");
    refused(&[pax(&[("GNU.sparse.map", b"0,6")]), data.clone()], "the length of a sparse file");
    refused(&[pax(&[("GNU.sparse.numbytes", b"1")]), data.clone()], "offset before");
    refused(&[pax(&[("GNU.sparse.major", b"2")]), data.clone()], "0.0, 0.1 or 1.0");
    refused(
        &[pax(&[("GNU.sparse.map", b"0,6"), ("GNU.sparse.size", b"3")]), data],
        "inside the file",
    );
}

#[test]
fn a_chain_of_sparse_maps_ends() {
    let mut first = raw(b'S', b"s", 0, b"");
    first[482] = 1;
    // A block without runs that announces another block: there could be any number of them.
    let mut more = vec![0; 512];
    more[504] = 1;
    let archive = summed(first).into_iter().collect::<Vec<u8>>();
    let mut endless = archive.as_slice().chain(EndlessBlocks(more, 0, 0));
    let text = read(&mut endless).unwrap_err().to_string();
    assert!(text.contains("runs in a sparse map"), "{text}");
}

/// A block repeated without end. Fails a test that reads too many bytes.
struct EndlessBlocks(Vec<u8>, usize, usize);

impl Read for EndlessBlocks {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        assert!(self.2 < 64 << 20, "{} bytes were read", self.2);
        let some = (self.0.len() - self.1).min(into.len());
        into[..some].copy_from_slice(&self.0[self.1..self.1 + some]);
        self.1 = (self.1 + some) % self.0.len();
        self.2 += some;
        Ok(some)
    }
}

#[test]
fn a_claimed_length_takes_no_memory_and_no_time() {
    for kind in [b'L', b'K', b'x', b'g'] {
        let head = raw(kind, b"x", (1 << 33) - 1, b"");
        let mut endless = EndlessBlocks(vec![b'a'; 512], 0, 0);
        let text = read(head.as_slice().chain(&mut endless)).unwrap_err().to_string();
        assert!(text.contains("at most 1048576 bytes of extended header"), "{text}");
        assert!(endless.2 <= 2 << 20, "{} bytes were read", endless.2);
    }
    // Many small headers together.
    let header = raw(b'x', b"pax", 0, b"");
    let text = read(EndlessBlocks(header, 0, 0)).unwrap_err().to_string();
    assert!(text.contains("at most 64 extended headers"), "{text}");
}

#[test]
fn limits_of_the_caller() {
    let archive = of(&[raw(b'0', b"a", 3, b"abc"), raw(b'0', b"b", 3, b"abc")]);
    let walk = |limits| {
        let mut reader = Reader::new(archive.as_slice(), limits);
        let mut count = 0;
        while reader.next_entry()?.is_some() {
            count += 1;
        }
        Ok::<_, ArchiveError>(count)
    };
    assert_eq!(walk(Limits { max_entries: 2, max_bytes: 6 }).unwrap(), 2);
    let text = walk(Limits { max_entries: 1, max_bytes: 6 }).unwrap_err().to_string();
    assert!(text.contains("\"b\" at byte 1024") && text.contains("at most 1 entries"), "{text}");
    let text = walk(Limits { max_entries: 2, max_bytes: 5 }).unwrap_err().to_string();
    assert!(text.contains("at most 5 bytes, got 6"), "{text}");
}

#[test]
fn the_end() {
    let file = raw(b'0', b"a", 3, b"abc");
    let finish = |tail: &[u8], most| {
        let bytes = [&file[..], tail].concat();
        let mut reader = Reader::new(bytes.as_slice(), Limits::NONE);
        assert!(reader.next_entry().unwrap().is_some());
        assert!(reader.next_entry().unwrap().is_none());
        assert!(reader.next_entry().unwrap().is_none(), "an end stays an end");
        reader.finish(most).map_err(|e| e.to_string())
    };
    assert_eq!(finish(&[0; 1024], 0), Ok(()));
    assert_eq!(finish(&[0; 512], 0), Ok(()));
    assert_eq!(finish(&[0; 10240], 10240), Ok(()));
    assert!(finish(&[], 0).unwrap_err().contains("got the stream's end"));
    assert!(finish(&[0; 2048], 1000).unwrap_err().contains("at most 1000 bytes"));
    assert!(
        finish(&[&[0; 1024][..], b"x"].concat(), 10240).unwrap_err().contains("nothing but zeroes")
    );
    // Padding may be missing at the end of a stream, as umoci leaves it.
    assert_eq!(read(&file[..515]).unwrap().len(), 1);
    let lone = [&file[..], &[0; 512], &file].concat();
    assert!(read(lone.as_slice()).unwrap_err().to_string().contains("two blocks of zeroes"));
}

#[test]
fn names_that_are_accepted() {
    use crate::EntryPath;
    for (name, path) in [
        (&b"a/b"[..], &b"a/b"[..]),
        (b"/etc/passwd", b"etc/passwd"),
        (b"./a//b/.", b"a/b"),
        (b"/", b""),
        (b"./", b""),
        (b"Icon\r", b"Icon\r"),
        (b"...", b"..."),
        (b"\xff\n", b"\xff\n"),
    ] {
        assert_eq!(EntryPath::parse(name).unwrap().as_bytes(), path);
    }
    for name in [&b""[..], b"..", b"a/../b", b"a/..", b"a\0b", &[b'n'; 256], &b"d/".repeat(600)] {
        assert!(EntryPath::parse(name).is_err(), "{}", String::from_utf8_lossy(name));
    }
    let path = EntryPath::parse(b"/a/b/c").unwrap();
    let (folder, name) = path.split_last().unwrap();
    assert_eq!((folder.as_bytes(), name.to_str()), (&b"a/b"[..], Some("c")));
    assert_eq!(EntryPath::parse(b"a").unwrap().split_last().unwrap().0.as_bytes(), b"");
}
