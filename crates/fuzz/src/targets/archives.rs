//! Archives of others: in the guest, on the user's side, and as layers of an image.

use crate::events::Events;
use crate::scratch;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_archive::{CopyOptions, EntryPath, Head, Kind, Limits, Reader, Writer};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Reads have buffers of 64 KiB and pieces of 128 KiB; a sparse map may take 8 MiB.
const ARCHIVE: Heap = Heap { fixed: 12 << 20, per_byte: 256 };

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "tar",
        what: "entries and data of an archive",
        stateful: false,
        most_bytes: 16 << 10,
        heap: ARCHIVE,
        run: tar,
        seeds: tar_seeds,
    },
    Target {
        name: "guest-unpack",
        what: "an archive that the agent unpacks as root",
        stateful: false,
        most_bytes: 16 << 10,
        heap: ARCHIVE,
        run: |input| {
            unpacked(input, |archive, target| {
                dayfly_agent::archive::unpack(target, &mut &archive[..]).is_ok()
            })
        },
        seeds: tar_seeds,
    },
    Target {
        name: "cp-unpack",
        what: "a VM's archive that `dayfly cp` unpacks",
        stateful: false,
        most_bytes: 16 << 10,
        heap: ARCHIVE,
        run: |input| {
            unpacked(input, |archive, target| {
                dayfly_cli::fuzzing::unpack(archive, "d", target).is_ok()
            })
        },
        seeds: tar_seeds,
    },
    Target {
        name: "image-layers",
        what: "layers of an image, with whiteouts",
        stateful: false,
        most_bytes: 16 << 10,
        heap: ARCHIVE,
        run: layers,
        seeds: tar_seeds,
    },
    Target {
        name: "image-oci",
        what: "OCI layouts and archives of `docker save`",
        stateful: false,
        most_bytes: 64 << 10,
        heap: Heap { fixed: 16 << 20, per_byte: 1024 },
        run: image,
        seeds: image_seeds,
    },
    Target {
        name: "saved-disk",
        what: "a root disk (ext4) that is saved as a layer",
        stateful: false,
        most_bytes: 16 << 10,
        heap: ARCHIVE,
        run: saved_disk,
        seeds: || vec![dayfly_image::fuzzing::small_disk()],
    },
    Target {
        name: "debugfs-script",
        what: "names in commands for debugfs",
        stateful: false,
        most_bytes: 1024,
        heap: Heap { fixed: 64 << 10, per_byte: 64 },
        run: script,
        seeds: || vec![b"mkdir\0a\"b\0c d".to_vec(), b"write\0/x\0a\nb".to_vec()],
    },
];

/// Writes checksums: a right one into each block whose field for it is not zero, which is where a
/// header may be. No fuzzer finds them.
fn summed(input: &[u8]) -> Vec<u8> {
    let mut archive = input.to_vec();
    for block in archive.as_chunks_mut::<512>().0 {
        if block[148..156] == [0; 8] {
            continue;
        }
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    archive
}

fn tar_seeds() -> Vec<Vec<u8>> {
    let file = |path: &str| Head::new(path, Kind::File, 0o644);
    let link = |path: &str, target: &str, kind| Head {
        link: target.into(),
        ..Head::new(path, kind, 0o777)
    };
    let make = |act: &dyn Fn(&mut Writer<Vec<u8>>)| {
        let mut writer = Writer::new(Vec::new());
        act(&mut writer);
        writer.finish().unwrap()
    };
    let plain = make(&|w| {
        w.entry(&Head::new("d/", Kind::Folder, 0o755)).unwrap();
        w.file(&file("d/a"), 5, &mut &b"hello"[..]).unwrap();
        w.entry(&link("d/s", "a", Kind::Symlink)).unwrap();
        w.entry(&link("d/h", "d/a", Kind::HardLink)).unwrap();
        w.entry(&Head { device: (1, 3), ..Head::new("d/null", Kind::Char, 0o666) }).unwrap();
    });
    let escapes = make(&|w| {
        w.entry(&Head::new("d/", Kind::Folder, 0o755)).unwrap();
        w.entry(&link("d/up", "../..", Kind::Symlink)).unwrap();
        w.file(&file("d/up/outside"), 1, &mut &b"x"[..]).unwrap();
        w.file(&file("../outside"), 1, &mut &b"x"[..]).unwrap();
        w.entry(&link("d/k", "/keep", Kind::HardLink)).unwrap();
    });
    let sparse = make(&|w| {
        let head = Head { mtime_ns: 5, ..file("d") };
        w.sparse_file(&head, 100_000, &[(4096, 3), (90_000, 2)], &mut &b"abcde"[..]).unwrap();
    });
    let long = make(&|w| {
        let mut head = file(&format!("d/{}", "n".repeat(150)));
        head.xattrs = BTreeMap::from([(b"user.x".to_vec(), b"v".to_vec())]);
        (head.uid, head.mtime_s) = (3_000_000, -7);
        w.file(&head, 0, &mut &b""[..]).unwrap();
    });
    let whiteouts = [
        make(&|w| w.file(&file("d/.wh.a"), 0, &mut &b""[..]).unwrap()),
        make(&|w| w.file(&file("d/.wh..wh..opq"), 0, &mut &b""[..]).unwrap()),
    ];
    let gnu = {
        let mut block = [0; 512];
        block[..1].copy_from_slice(b"d");
        block[100..107].copy_from_slice(b"0000644");
        block[108..115].copy_from_slice(b"0000000");
        block[116..123].copy_from_slice(b"0000000");
        block[124..135].copy_from_slice(b"00000000005");
        block[136..147].copy_from_slice(b"00000000000");
        block[148] = 1;
        block[156] = b'S';
        block[257..265].copy_from_slice(b"ustar  \0");
        block[386..397].copy_from_slice(b"00000001000");
        block[398..409].copy_from_slice(b"00000000005");
        block[483..494].copy_from_slice(b"00000002000");
        [&block[..], b"hello", &[0; 507], &[0; 1024]].concat()
    };
    let two = [&plain[..plain.len() - 1024], &whiteouts[0]].concat();
    vec![plain, escapes, sparse, long, two, whiteouts[1].clone(), gnu]
}

/// An entry with its content.
type Whole = (Head, Vec<u8>);

/// All entries of an archive, and whether it ended without an error.
fn read(archive: impl Read) -> (Vec<Whole>, bool) {
    const ROOM: u64 = 1 << 20;
    let limits = Limits { max_entries: 200, max_bytes: 1 << 20 };
    let mut reader = Reader::new(archive, limits);
    let file = dayfly_pager::guest::memory(0).unwrap();
    let mut all = Vec::new();
    loop {
        let entry = match reader.next_entry() {
            Ok(Some(entry)) => entry,
            end => return (all, end.is_ok()),
        };
        let _path = EntryPath::parse(&entry.head.path);
        let mut content = Vec::new();
        if entry.head.kind == Kind::File {
            file.set_len(0).unwrap();
            let how = CopyOptions { zeroes_are_holes: true, room: ROOM };
            match reader.copy_data(&entry, &file, how) {
                Ok(written) => assert!(written <= ROOM, "{written} bytes written"),
                Err(_) => return (all, false),
            }
            let length = file.metadata().unwrap().len();
            assert_eq!(length, entry.size_bytes, "the length of {:?}", entry.head.path);
            content = vec![0; usize::try_from(length.min(64 << 10)).unwrap()];
            file.read_exact_at(&mut content, 0).unwrap();
        }
        all.push((entry.head, content));
    }
}

fn tar(input: &[u8]) -> Outcome {
    let (all, whole) = read(&summed(input)[..]);
    let mut writer = Writer::new(Vec::new());
    let mut expected = Vec::new();
    for (head, content) in &all {
        let written = match head.kind {
            // A reader takes a plain file with such a name for a folder.
            Kind::File if head.path.ends_with(b"/") => continue,
            Kind::File => writer.file(head, content.len() as u64, &mut &content[..]),
            Kind::Other(_) => continue,
            _ => writer.entry(head),
        };
        match written {
            Ok(()) => {
                let mut head = head.clone();
                if head.kind == Kind::Folder && !head.path.ends_with(b"/") {
                    head.path.push(b'/');
                }
                expected.push((head, content.clone()));
            }
            // What cannot be written leaves a part of an entry.
            Err(_) => return Outcome::of(whole),
        }
    }
    let (again, fine) = read(&writer.finish().unwrap()[..]);
    assert!(fine, "an archive of this crate was refused");
    assert_eq!(again, expected, "written and read again");
    planted(|| all.iter().any(|(head, _)| head.kind == Kind::Fifo && head.mode == 0o700));
    Outcome::of(whole && !all.is_empty())
}

/// Every name below `folder` but those of `target`, with what can be seen of it.
fn outside(folder: &Path, target: &Path) -> BTreeMap<PathBuf, (u32, u64, u64, i64)> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let seen = std::fs::symlink_metadata(&path).unwrap();
        if path == target {
            continue;
        }
        all.insert(path, (seen.mode(), seen.size(), seen.nlink(), seen.mtime_nsec()));
    }
    all
}

/// Unpacks into a folder whose surroundings must not change.
fn unpacked(input: &[u8], unpack: impl FnOnce(&[u8], &Path) -> bool) -> Outcome {
    let archive = summed(input);
    let scratch = tempfile::tempdir_in(scratch::folder()).unwrap();
    let (target, keep) = (scratch.path().join("t/u"), scratch.path().join("t/keep"));
    std::fs::create_dir_all(&target).unwrap();
    std::fs::write(&keep, "keep").unwrap();
    let around = scratch.path().join("t");
    let before = outside(&around, &target);
    let fine = unpack(&archive, &target);
    assert_eq!(outside(&around, &target), before, "the surroundings changed");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 1, "a name above");
    let names = std::fs::read_dir(&target).unwrap().count();
    planted(|| fine && names == 3);
    Outcome::of(fine && names > 0)
}

fn layers(input: &[u8]) -> Outcome {
    let archive = summed(input);
    let scratch = tempfile::tempdir_in(scratch::folder()).unwrap();
    // The same archive twice: as its own lower layer it has whiteouts that hide something.
    let Ok(tree) = dayfly_image::fuzzing::layer(&[&archive, &archive], scratch.path()) else {
        return Outcome::Refused;
    };
    assert!(tree.nodes <= tree.names.len() + 1, "{} nodes", tree.nodes);
    for (name, _) in &tree.names {
        let bad = name
            .split(|b| *b == b'/')
            .skip(1)
            .any(|part| part.is_empty() || part == b"." || part == b".." || part.contains(&0));
        assert!(!bad, "the name {:?}", name.escape_ascii().to_string());
    }
    planted(|| tree.names.len() >= 3 && tree.names.iter().all(|(_, kind)| *kind == "a folder"));
    Outcome::of(!tree.names.is_empty())
}

/// Blobs of an image: each with two bytes of length before it. In a document (`{` or `[` first)
/// `@n` stands for the digest of blob n, `#n` for its length. The last blob is the entrance.
fn blobs(input: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut events = Events::new(input);
    let mut all: Vec<(String, Vec<u8>)> = Vec::new();
    while let (Some(length), true) = (events.word(), all.len() < 16) {
        let rest = events.rest();
        let (raw, rest) = rest.split_at(usize::from(length).min(rest.len()));
        events = Events::new(rest);
        let blob = if matches!(raw.first(), Some(b'{' | b'[')) {
            expanded(raw, &all)
        } else {
            summed(raw)
        };
        all.push((dayfly_image::fuzzing::digest(&blob), blob));
    }
    all
}

fn expanded(raw: &[u8], before: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = raw;
    while let Some((byte, after)) = rest.split_first() {
        let number = after.first().map(|b| usize::from(b.wrapping_sub(b'0')));
        match (byte, number.and_then(|n| before.get(n))) {
            (b'@', Some((digest, _))) => out.extend_from_slice(digest.as_bytes()),
            (b'#', Some((_, blob))) => out.extend_from_slice(blob.len().to_string().as_bytes()),
            _ => {
                out.push(*byte);
                rest = after;
                continue;
            }
        }
        rest = &after[1..];
    }
    out
}

fn image(input: &[u8]) -> Outcome {
    let Some((kind, input)) = input.split_first() else { return Outcome::Refused };
    let all = blobs(input);
    let Some((_, entrance)) = all.last() else { return Outcome::Refused };
    let folder = tempfile::tempdir_in(scratch::folder()).unwrap();
    let scratch = tempfile::tempdir_in(scratch::folder()).unwrap();
    let reference = (kind & 2 != 0).then_some("name");
    let unpacked = if kind & 1 == 0 {
        let blobs = folder.path().join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        for (digest, blob) in &all {
            std::fs::write(blobs.join(digest.trim_start_matches("sha256:")), blob).unwrap();
        }
        std::fs::write(folder.path().join("index.json"), entrance).unwrap();
        dayfly_image::fuzzing::layout(folder.path(), reference, scratch.path())
    } else {
        let path = folder.path().join("image.tar");
        let mut writer = Writer::new(File::create(&path).unwrap());
        for (n, (_, blob)) in all.iter().enumerate() {
            let name = if n + 1 == all.len() { "manifest.json".to_owned() } else { n.to_string() };
            let head = Head::new(name, Kind::File, 0o644);
            writer.file(&head, blob.len() as u64, &mut &blob[..]).unwrap();
        }
        writer.finish().unwrap();
        dayfly_image::fuzzing::docker(&path, reference, scratch.path())
    };
    let Ok((tree, run)) = unpacked else { return Outcome::Refused };
    assert!(tree.nodes <= tree.names.len() + 1, "{} nodes", tree.nodes);
    planted(|| run.workdir.len() == 1 && tree.names.is_empty());
    Outcome::Accepted
}

fn image_seeds() -> Vec<Vec<u8>> {
    let layer = tar_seeds().swap_remove(0);
    let blob = |bytes: &[u8]| [&u16::try_from(bytes.len()).unwrap().to_le_bytes(), bytes].concat();
    let config = br#"{"os":"linux","architecture":"amd64","config":{"Cmd":["/bin/sh"],
        "Env":["A=b"],"WorkingDir":"/w","User":"u"},"rootfs":{"diff_ids":["@0"]}}"#;
    let manifest = br#"{"config":{"digest":"@1","size":#1},
        "layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"@0",
        "size":#0}]}"#;
    let one = r#"{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"@2",
        "size":#2,"platform":{"os":"linux","architecture":"amd64"},
        "annotations":{"org.opencontainers.image.ref.name":"name"}}"#;
    let index = format!(r#"{{"manifests":[{one}]}}"#);
    let v3 = one.replace("\"amd64\"}", "\"amd64\",\"variant\":\"v3\"}");
    let several = format!(r#"{{"manifests":[{one},{v3},{}]}}"#, one.replace("linux", "other"));
    let nested = r#"{"manifests":[{"mediaType":"application/vnd.oci.image.index.v1+json",
        "digest":"@3","size":#3,"annotations":{"a":"b"}}]}"#;
    let saved = br#"[{"Config":"1","RepoTags":["name:latest"],"Layers":["0"]}]"#;
    // What an index says about itself goes to each manifest in it.
    let manifests = vec![r#"{"digest":"","size":1}"#; 1300].join(",");
    let many = format!(r#"{{"manifests":[{manifests}]}}"#);
    let long = format!(
        r#"{{"manifests":[{{"mediaType":"application/vnd.oci.image.index.v1+json",
            "digest":"@0","size":#0,"annotations":{{"a":"{}"}}}}]}}"#,
        "n".repeat(30_000)
    );
    let layout = [blob(&layer), blob(config), blob(manifest), blob(index.as_bytes())].concat();
    vec![
        [&[0], &layout[..]].concat(),
        [&[0], &layout[..], &blob(nested.as_bytes())].concat(),
        [&[0], &layout[..], &blob(several.as_bytes())].concat(),
        [&[3], &blob(&layer)[..], &blob(config), &blob(saved)].concat(),
        [&[0], &blob(many.as_bytes())[..], &blob(long.as_bytes())].concat(),
    ]
}

/// What libss reads: words at spaces, quotes around a word, a quote in it doubled.
fn words_of(line: &[u8]) -> Vec<Vec<u8>> {
    let (mut words, mut word, mut quoted, mut any) = (Vec::new(), Vec::new(), false, false);
    let mut bytes = line.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' if quoted && bytes.peek() == Some(&b'"') => {
                word.push(b'"');
                bytes.next();
            }
            b'"' => (quoted, any) = (!quoted, true),
            b' ' | b'\t' if !quoted => {
                if any || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                any = false;
            }
            byte => word.push(byte),
        }
    }
    if any || !word.is_empty() {
        words.push(word);
    }
    words
}

fn script(input: &[u8]) -> Outcome {
    let names: Vec<&[u8]> = input.split(|byte| *byte == 0).collect();
    let words = [&[&b"write"[..]], &names[..]].concat();
    let Ok(line) = dayfly_image::fuzzing::script_line(&words) else { return Outcome::Refused };
    let (last, line) = line.split_last().unwrap();
    assert!(*last == b'\n' && !line.contains(&b'\n'), "more than one line");
    assert_eq!(words_of(line), words, "what debugfs reads");
    planted(|| names.len() == 4 && names[2] == b"\"");
    Outcome::Accepted
}

/// A layer that is written can be read, and has no more data than the disk.
fn saved_disk(input: &[u8]) -> Outcome {
    let disk =
        File::from(rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    disk.write_all_at(input, 0).unwrap();
    let mut layer = Vec::new();
    if dayfly_image::save::write_layer(&disk, &mut layer).is_err() {
        return Outcome::Refused;
    }
    let mut reader = Reader::new(layer.as_slice(), Limits::NONE);
    let (mut data, mut attributes) = (0, 0);
    while let Some(entry) = reader.next_entry().expect("a layer that can be read") {
        attributes += entry.head.xattrs.len();
        EntryPath::parse(&entry.head.path).expect("a path");
        data += entry.plain_bytes().unwrap_or(0);
    }
    assert!(data <= input.len() as u64, "{data} bytes of a disk of {}", input.len());
    planted(|| attributes == 4);
    Outcome::Accepted
}
