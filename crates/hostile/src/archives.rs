//! Archives that a compromised agent may send. They are written byte by byte, because no archiver
//! writes them.

use std::io::Read;

/// An archive that is generated while it is read.
pub struct Archive {
    /// The complete archive.
    pub bytes: Box<dyn Read + Send>,
}

/// The required result of a copy.
#[derive(Debug, Clone, Copy)]
pub enum Verdict {
    /// Nothing is written, and the error contains these words.
    Refused(&'static str),
    /// Exactly these files: name below the destination, and content or kind.
    Written(&'static [(&'static str, &'static str)]),
}

use Verdict::{Refused, Written};

/// An archive of [`all`]: name, required result of the copy, and generator.
pub struct Make(&'static str, Verdict, fn() -> Box<dyn Read + Send>);

impl Make {
    /// Name, and required result of the copy.
    #[must_use]
    pub fn about(&self) -> (&'static str, &Verdict) {
        (self.0, &self.1)
    }

    /// Generates the archive.
    #[must_use]
    pub fn archive(&self) -> Archive {
        Archive { bytes: (self.2)() }
    }
}

/// The archive of that name.
///
/// # Panics
/// No archive has that name.
#[must_use]
pub fn named(name: &str) -> Archive {
    if name == "contents" {
        return Archive {
            bytes: of(&[folder(R), file("result.json/a", b"1"), file("result.json/b", b"2")]),
        };
    }
    all().into_iter().find(|make| make.0 == name).unwrap().archive()
}

const R: &str = "result.json";
/// Words of the error for a name that the copy did not ask for.
const ASKED: &str = "what was asked for, \"result.json\"";

/// A header with a correct checksum; nothing else is checked.
fn header(kind: u8, name: &[u8], link: &[u8], mode: u32, size: u64) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
    block[100..108].copy_from_slice(format!("{mode:07o}\0").as_bytes());
    block[108..116].copy_from_slice(b"0000000\0");
    block[116..124].copy_from_slice(b"0000000\0");
    if size < 1 << 33 {
        block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    } else {
        block[124] = 0x80;
        block[128..136].copy_from_slice(&size.to_be_bytes());
    }
    block[136..148].copy_from_slice(b"00000000000\0");
    block[156] = kind;
    block[157..157 + link.len().min(100)].copy_from_slice(&link[..link.len().min(100)]);
    block[257..265].copy_from_slice(b"ustar\x0000");
    sum(&mut block);
    block
}

fn sum(block: &mut [u8]) {
    block[148..156].copy_from_slice(b"        ");
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn entry(kind: u8, name: &str, link: &str, data: &[u8]) -> Vec<u8> {
    let mut out = header(kind, name.as_bytes(), link.as_bytes(), 0o644, data.len() as u64);
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

fn file(name: &str, data: &[u8]) -> Vec<u8> {
    entry(b'0', name, "", data)
}

fn folder(name: &str) -> Vec<u8> {
    header(b'5', name.as_bytes(), b"", 0o755, 0)
}

fn records(kind: u8, records: &[(&str, &str)]) -> Vec<u8> {
    let mut data = String::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest..).find(|n| rest + n.to_string().len() == *n).unwrap();
        data += &format!("{length} {key}={value}\n");
    }
    entry(kind, "pax", "", data.as_bytes())
}

fn of(entries: &[Vec<u8>]) -> Box<dyn Read + Send> {
    let mut bytes = entries.concat();
    bytes.extend_from_slice(&[0; 1024]);
    Box::new(std::io::Cursor::new(bytes))
}

/// A header with a size of 1 GiB, and 1 GiB of one letter.
fn gib(kind: u8) -> Box<dyn Read + Send> {
    let header = std::io::Cursor::new(header(kind, b"././@LongLink", b"", 0, 1 << 30));
    Box::new(header.chain(std::io::repeat(b'a').take(1 << 30)))
}

/// `count` entries after `first`, each generated from its number.
fn many(count: u64, first: Vec<u8>, make: fn(u64) -> Vec<u8>) -> Box<dyn Read + Send> {
    struct Many(u64, u64, fn(u64) -> Vec<u8>, std::io::Cursor<Vec<u8>>);
    impl Read for Many {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            match self.3.read(into)? {
                0 if self.0 < self.1 => {
                    self.3 = std::io::Cursor::new((self.2)(self.0));
                    self.0 += 1;
                    self.3.read(into)
                }
                n => Ok(n),
            }
        }
    }
    Box::new(Many(0, count, make, std::io::Cursor::new(first)).chain(std::io::repeat(0).take(1024)))
}

/// A sparse file in pax format 1.0 with `map`, and 512 bytes of data.
fn sparse(map: &str, length: &str) -> Box<dyn Read + Send> {
    let mut data = map.as_bytes().to_vec();
    data.resize(data.len().next_multiple_of(512), 0);
    data.extend_from_slice(&[7; 512]);
    let keys = [("GNU.sparse.major", "1"), ("GNU.sparse.name", R), ("GNU.sparse.realsize", length)];
    of(&[records(b'x', &keys), file("GNUSparseFile.0/x", &data)])
}

fn outside() -> String {
    // Relative, because the absolute path of the test's folder is not known here.
    "../outside".to_owned()
}

/// Archives of which a reader has to read more than 100 MB, in the order of [`all`].
pub const LONG: [&str; 2] = ["a million entries", "many folders"];

/// All archives. The copy that reads each asks for `result.json`.
#[must_use]
pub fn all() -> Vec<Make> {
    let parts = [names(), links(), kinds(), extensions(), sparse_maps(), ends(), limits()];
    parts.into_iter().flatten().collect()
}

/// Names beside or outside of the request, and names with control characters.
fn names() -> Vec<Make> {
    vec![
        Make("honest", Written(&[("result.json", "644 result\n")]), || of(&[file(R, b"result\n")])),
        Make("dot", Refused(ASKED), || {
            of(&[folder("./"), file(".bashrc", b"owned"), file(".ssh/authorized_keys", b"owned")])
        }),
        Make("other", Refused(ASKED), || of(&[file("other.json", b"owned")])),
        Make("bashrc", Refused(ASKED), || of(&[file(".bashrc", b"owned")])),
        Make("below", Refused(ASKED), || of(&[file("result.json/x", b"owned")])),
        Make("deeper", Refused(ASKED), || of(&[file("tmp/result.json", b"owned")])),
        Make("empty name", Refused("an empty name"), || of(&[file("", b"owned")])),
        Make("slash", Refused(ASKED), || of(&[folder("/"), file(".bashrc", b"owned")])),
        Make("beside", Refused("nothing beside"), || of(&[folder(R), file(".bashrc", b"owned")])),
        Make("beside a file", Refused("nothing beside"), || {
            of(&[file(R, b"x"), file(".bashrc", b"owned")])
        }),
        Make("two roots", Refused("nothing beside"), || of(&[folder(R), folder("other")])),
        Make("twice", Written(&[("result.json", "644 2")]), || of(&[file(R, b"1"), file(R, b"2")])),
        Make("escapes", Refused(r"\x1b]0;owned\x07other\n"), || {
            of(&[folder(R), file("\x1b]0;owned\x07other\n", b"x")])
        }),
        Make("direction", Refused(r"\u{202e}gpj.exe"), || {
            of(&[folder(R), file("\u{202e}gpj.exe", b"x")])
        }),
        Make("dotdot", Refused("without '..'"), || {
            of(&[folder(R), file("result.json/../../outside/planted", b"owned")])
        }),
        Make("absolute", Refused(ASKED), || of(&[file("/tmp/planted", b"owned")])),
    ]
}

/// Symbolic and hard links that lead out of the folder of the copy.
fn links() -> Vec<Make> {
    vec![
        Make("link", Refused("a folder on its way"), || {
            of(&[entry(b'2', R, &outside(), b""), file("result.json/planted", b"owned")])
        }),
        Make("link alone", Written(&[("result.json", "-> ../outside")]), || {
            of(&[entry(b'2', R, &outside(), b"")])
        }),
        Make("link to here", Refused("a folder on its way"), || {
            of(&[entry(b'2', R, ".", b""), file("result.json/.bashrc", b"owned")])
        }),
        Make("link, then a file through it", Refused("a folder on its way"), || {
            let link = entry(b'2', "result.json/l", "../../outside", b"");
            of(&[folder(R), link, file("result.json/l/planted", b"owned")])
        }),
        Make(
            "link, then a file in its place",
            Written(&[("result.json", "folder"), ("result.json/l", "644 inside")]),
            || {
                let link = entry(b'2', "result.json/l", "../../outside/there", b"");
                of(&[folder(R), link, file("result.json/l", b"inside")])
            },
        ),
        Make("hard link out", Refused("nothing beside"), || {
            of(&[folder(R), entry(b'1', "result.json/h", "/etc/passwd", b"")])
        }),
        Make("hard link up", Refused("without '..'"), || {
            of(&[folder(R), entry(b'1', "result.json/h", "result.json/../../outside/there", b"")])
        }),
        Make("hard link first", Refused(ASKED), || of(&[entry(b'1', R, ".bashrc", b"")])),
        Make("hard link through a link", Refused("a file that came before"), || {
            let link = entry(b'2', "result.json/l", "../../outside", b"");
            of(&[folder(R), link, entry(b'1', "result.json/h", "result.json/l/there", b"")])
        }),
    ]
}

/// Modes, attributes and devices that a copy must not create, and a name with two kinds.
fn kinds() -> Vec<Make> {
    vec![
        Make("setuid", Written(&[("result.json", "755 ")]), || {
            of(&[header(b'0', R.as_bytes(), b"", 0o6755, 0)])
        }),
        Make("capabilities", Written(&[("result.json", "644 x")]), || {
            // struct vfs_cap_data of linux/capability.h: version 2, effective, CAP_SETUID.
            let value = "\x01\0\0\x02\u{7f}\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
            of(&[records(b'x', &[("SCHILY.xattr.security.capability", value)]), file(R, b"x")])
        }),
        Make("device", Refused("device"), || of(&[entry(b'3', R, "", b"")])),
        Make("devices", Written(&[("result.json", "folder")]), || {
            of(&[
                folder(R),
                entry(b'3', "result.json/null", "", b""),
                entry(b'6', "result.json/pipe", "", b""),
            ])
        }),
        Make("file, then folder", Refused("a folder on its way"), || {
            of(&[folder(R), file("result.json/x", b"1"), folder("result.json/x")])
        }),
        Make("folder, then file", Refused("result.json/x"), || {
            of(&[folder(R), folder("result.json/x"), file("result.json/x", b"1")])
        }),
    ]
}

/// Extended headers of pax and GNU tar.
fn extensions() -> Vec<Make> {
    vec![
        Make("size that hides an entry", Refused("nothing beside"), || {
            let hidden = header(b'0', R.as_bytes(), b"", 0o644, 512);
            of(&[records(b'x', &[("size", "0")]), hidden, header(b'0', b".bashrc", b"", 0o644, 0)])
        }),
        Make("pax GiB", Refused("at most 1048576 bytes"), || gib(b'x')),
        Make("global GiB", Refused("at most 1048576 bytes"), || gib(b'g')),
        Make("long name GiB", Refused("at most 1048576 bytes"), || gib(b'L')),
        Make("long link GiB", Refused("at most 1048576 bytes"), || gib(b'K')),
        Make("pax path", Refused(ASKED), || {
            of(&[records(b'x', &[("path", ".bashrc")]), file(R, b"owned")])
        }),
        Make("global path", Written(&[("result.json", "644 x")]), || {
            of(&[records(b'g', &[("path", ".bashrc")]), file(R, b"x")])
        }),
        Make("long name", Refused(ASKED), || {
            of(&[entry(b'L', "l", "", b".bashrc\0"), file(R, b"owned")])
        }),
    ]
}

/// Maps of sparse files.
fn sparse_maps() -> Vec<Make> {
    vec![
        Make("map outside", Refused("inside the file"), || sparse("1\n1048100\n512\n", "1048576")),
        Make("map backwards", Refused("in order"), || sparse("2\n4096\n256\n0\n256\n", "1048576")),
        Make("map of many", Refused("at most 524288 runs"), || sparse("99999999999\n", "1048576")),
        Make("map too short", Refused("512 bytes of data"), || sparse("1\n0\n100\n", "1048576")),
        Make("sparse exabyte", Refused("at most 17592186044416 bytes"), || {
            sparse("1\n0\n512\n", "1152921504606846976")
        }),
    ]
}

/// Archives that end too early, too late or not at all.
fn ends() -> Vec<Make> {
    vec![
        Make("exabyte", Refused("at most 17592186044416 bytes"), || {
            let header = std::io::Cursor::new(header(b'0', R.as_bytes(), b"", 0o644, 1 << 60));
            Box::new(header.chain(std::io::repeat(b'a').take(1 << 20)))
        }),
        Make("terabyte that ends early", Refused("more bytes"), || {
            let header = std::io::Cursor::new(header(b'0', R.as_bytes(), b"", 0o644, 1 << 40));
            Box::new(header.chain(std::io::repeat(b'a').take(48 << 20)))
        }),
        Make("truncated", Refused("more bytes"), || {
            let bytes =
                [folder(R), header(b'0', b"result.json/x", b"", 0o644, 4096), vec![1; 1000]]
                    .concat();
            Box::new(std::io::Cursor::new(bytes))
        }),
        Make("without an end", Refused("at the archive's end"), || {
            Box::new(std::io::Cursor::new(file(R, b"x")))
        }),
        Make("rubbish after the end", Refused("nothing but zeroes"), || {
            let bytes = [file(R, b"x"), vec![0; 1024], file(".bashrc", b"owned")].concat();
            Box::new(std::io::Cursor::new(bytes))
        }),
        Make("zeroes without end", Refused("bytes after the archive's end"), || {
            Box::new(std::io::Cursor::new(file(R, b"x")).chain(std::io::repeat(0).take(1 << 30)))
        }),
        Make("nothing", Refused("got an empty one"), || Box::new(std::io::empty())),
        Make("no archive", Refused("a tar header"), || {
            Box::new(std::io::repeat(b'x').take(1 << 20))
        }),
    ]
}

/// Archives at and beyond the limits of a copy.
fn limits() -> Vec<Make> {
    vec![
        Make("a million entries", Written(&[("result.json", "folder")]), || {
            many(1_000_000, folder(R), |_| entry(b'6', "result.json/pipe", "", b""))
        }),
        Make("name beyond limits", Refused("at most 255 bytes"), || {
            let name = format!("result.json/{}", "n".repeat(300));
            of(&[folder(R), records(b'x', &[("path", &name)]), file("x", b"x")])
        }),
        Make("deep", Refused("256 folders deep"), || {
            let name = format!("result.json{}", "/d".repeat(400));
            of(&[folder(R), records(b'x', &[("path", &name)]), folder("x")])
        }),
        Make("many folders", Refused("at most 262144 folders"), || {
            many(300_000, folder(R), |n| {
                folder(if n % 2 == 0 { "result.json/a" } else { "result.json/b" })
            })
        }),
        Make("many attributes", Refused("at most 1048576 bytes"), || {
            let value = "v".repeat(60_000);
            let keys: Vec<String> = (0..20).map(|n| format!("SCHILY.xattr.user.{n}")).collect();
            let pairs: Vec<_> = keys.iter().map(|key| (key.as_str(), value.as_str())).collect();
            of(&[records(b'x', &pairs), file(R, b"x")])
        }),
        Make("extended headers without end", Refused("at most 64 extended headers"), || {
            many(1 << 30, Vec::new(), |_| records(b'x', &[]))
        }),
    ]
}
