//! Hostile archives: each is refused by an error that names layer, entry, byte, expected and got.

use super::*;

fn refused(layers: &[Vec<u8>], layer: &str, entry: &str, expected: &str, got: &str) {
    match unpack(layers) {
        Err(error @ BuildError::Refused { .. }) => {
            let text = error.to_string();
            let BuildError::Refused { layer: l, entry: e, expected: x, got: g, .. } = error else {
                unreachable!()
            };
            assert!(
                l == layer && e.starts_with(entry) && x.contains(expected) && g.contains(got),
                "{text}"
            );
            assert!(text.contains(": expected ") && text.contains(", got "), "{text}");
        }
        other => panic!("{entry:?}: expected a refusal, got {other:?}"),
    }
}

fn one(entries: &[Vec<u8>], entry: &str, expected: &str, got: &str) {
    refused(&[archive(entries)], "layer 0", entry, expected, got);
}

#[test]
fn names_that_leave_the_root() {
    for name in ["../x", "a/../../x", "a/..", "..", "./../x"] {
        one(&[file(name, b"x")], name, "without '..'", "leave");
        one(&[dir(name)], name, "without '..'", "leave");
        one(&[symlink(name, "x")], name, "without '..'", "leave");
    }
    one(&[file("../.wh.x", b"")], "../.wh.x", "without '..'", "leave");
    one(
        &[pax(&[("path", b"../../etc/shadow")]), file("ok", b"x")],
        "../../etc",
        "without '..'",
        "leave",
    );
    one(&[pax(&[("path", b"a\0b")]), file("ok", b"x")], "a", "a path", "NUL");
}

/// Every name and link is resolved inside the image's root.
#[test]
fn names_and_links_are_resolved_inside_the_root() {
    let holds = |layers: &[Vec<u8>], lines: &[&str]| {
        let text = unpack(layers).unwrap();
        assert!(lines.iter().all(|line| text.iter().any(|t| t == line)), "{lines:?} in {text:?}");
    };
    let passwd = "/etc/passwd 644 \"x\"";
    holds(&[archive(&[file("/etc/passwd", b"x")])], &["/etc/ 755", passwd]);
    holds(
        &[archive(&[raw(b'5', b"/", b"", 0o750, b""), file("//./etc//passwd", b"x")])],
        &["/ 750", passwd],
    );
    for target in ["/etc", "etc", "../../etc", "./../etc/."] {
        // The link is in the same layer or in a lower one; the folder is created.
        let (link, below) = (symlink("e", target), file("e/passwd", b"x"));
        holds(&[archive(&[link.clone(), below.clone()])], &["/etc/ 755", passwd]);
        holds(&[archive(&[link]), archive(&[below])], &["/etc/ 755", passwd]);
    }
    let real = [dir("srv/real"), symlink("srv/l", "/srv/real"), file("srv/l/x", b"x")];
    holds(&[archive(&real)], &["/srv/l -> /srv/real", "/srv/real/x 644 \"x\""]);
    let missing = [symlink("srv/l", "real"), file("srv/l/x", b"x")];
    holds(&[archive(&missing)], &["/srv/l -> real", "/srv/real/ 755", "/srv/real/x 644 \"x\""]);
    holds(&[archive(&[file("f", b"x"), hard_link("/g", "/f")])], &["/f 644 \"x\"", "/g 644 \"x\""]);
    let pair =
        [pax(&[("SCHILY.acl.access", b"user::rw-\ngroup::r--\nother::r--\n")]), file("acl", b"x")];
    holds(&[archive(&pair)], &["/acl 644 \"x\""]);
}

#[test]
fn parents_that_are_no_folders() {
    one(
        &[symlink("a", "b"), symlink("b", "a"), file("a/x", b"x")],
        "a/x",
        "symbolic links in a path",
        "loop",
    );
    one(&[file("f", b""), file("f/x", b"x")], "f/x", "a folder as parent", "a file");
    // Links that lead to ever deeper folders.
    let deep = vec!["d"; 500].join("/");
    let entries = [dir(&deep), symlink("l", &deep), file(&format!("l/{deep}/x"), b"")];
    one(&entries, "l/d", "512 folders deep", "deeper");
}

#[test]
fn an_honest_link_among_the_parents_is_followed_inside_the_root() {
    let lower = archive(&[
        dir("usr/lib"),
        symlink("lib", "usr/lib"),
        dir("run"),
        symlink("var/run", "/run"),
    ]);
    let upper = archive(&[file("lib/x", b"1"), file("var/run/y", b"2"), file("lib/.wh.gone", b"")]);
    let text = unpack(&[lower, upper]).unwrap();
    assert!(
        text.contains(&"/usr/lib/x 644 \"1\"".to_owned())
            && text.contains(&"/run/y 644 \"2\"".to_owned()),
        "{text:?}"
    );
}

#[test]
fn hard_links_out_and_to_nothing() {
    one(
        &[hard_link("x", "../../etc/shadow")],
        "x",
        "a hard link to a path without '..'",
        "etc/shadow",
    );
    one(&[hard_link("x", "/etc/shadow")], "x", "existing file", "not there");
    one(&[hard_link("x", "etc/shadow")], "x", "existing file", "not there");
    one(&[dir("d"), hard_link("x", "d")], "x", "to a file", "folder");
    one(&[symlink("e", "/etc"), hard_link("x", "e/shadow")], "x", "existing file", "not there");
    one(&[hard_link("x", "x")], "x", "existing file", "not there");
    // The link takes the place of a folder, which is removed with its content.
    let inside = [dir("d"), file("d/f", b"x"), hard_link("d", "d/f")];
    one(&inside, "d", "existing file", "which it replaces");
    let deep = [file("d/e/f", b"x"), hard_link("d/e/g", "d/e/f"), hard_link("d", "d/e/g")];
    one(&deep, "d", "existing file", "which it replaces");
    let outside = [file("d/f", b"x"), hard_link("g", "d/f"), hard_link("d", "d/f")];
    let text = unpack(&[archive(&outside)]).unwrap();
    let both = ["/d 644 \"x\"", "/g 644 \"x\""];
    assert!(both.iter().all(|line| text.iter().any(|t| t == line)), "{text:?}");
}

#[test]
fn a_root_that_is_no_folder() {
    one(&[symlink(".", "/")], ".", "a folder", "a symbolic link");
    one(
        &[file("./", b"")].map(|mut f| {
            f[156] = b'2';
            f
        }),
        "./",
        "",
        "",
    );
}

#[test]
fn too_long_too_deep_too_many() {
    let long = "n".repeat(256);
    one(&[file(&long, b"")], "nnn", "at most 255 bytes", "256");
    let deep = vec!["d"; 600].join("/");
    one(&[file(&deep, b"")], "d/d", "512 folders deep", "600");
    let path = vec!["d".repeat(200); 30].join("/");
    one(&[file(&path, b"")], "ddd", "4095 bytes", "");
    one(&[symlink("l", &"t".repeat(5000))], "l", "target", "5000");
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits { max_entries: 100, ..Limits::default() };
    let many: Vec<Vec<u8>> = (0..200).map(|i| file(&format!("f{i}"), b"")).collect();
    let text = unpack_in(folder.path(), limits, &[archive(&many)]).unwrap_err().to_string();
    assert!(text.contains("at most 100"), "{text}");
    let mut names = vec![file("f", b"x")];
    names.extend((0..65_000).map(|i| hard_link(&format!("l{i}"), "f")));
    one(&names, "l64999", "at most 65000 names", "more");
    // Parents that are created implicitly count too.
    let deep: Vec<Vec<u8>> =
        (0..10).map(|i| file(&format!("{i}{}", "/d".repeat(50)), b"")).collect();
    let text = unpack_in(tempfile::tempdir().unwrap().path(), limits, &[archive(&deep)])
        .unwrap_err()
        .to_string();
    assert!(text.contains("at most 100"), "{text}");
}

#[test]
fn absurd_sizes() {
    let exabyte = 1u64 << 60;
    one(
        &[pax(&[("size", exabyte.to_string().as_bytes())]), file("big", b"")],
        "big",
        "bytes",
        "1152921504606846976",
    );
    one(&[pax(&[("size", b"-1")]), file("big", b"")], "pax", "a number", "-1");
    one(
        &[raw_sized(b'x', b"pax", b"", 0, 4 << 30, b"")],
        "pax",
        "1048576 bytes of extended header",
        "4294967296",
    );
    one(
        &[raw_sized(b'L', b"long", b"", 0, 4 << 30, b"")],
        "long",
        "1048576 bytes of extended header",
        "4294967296",
    );
    let folder = tempfile::tempdir().unwrap();
    let limits = Limits { max_content_bytes: 1 << 20, ..Limits::default() };
    let text = unpack_in(folder.path(), limits, &[archive(&[file("big", &vec![1; 2 << 20])])])
        .unwrap_err()
        .to_string();
    assert!(text.contains("content within the limit"), "{text}");
    // The header claims more bytes than the archive holds.
    let cut = raw_sized(b'0', b"cut", b"", 0o644, 5 << 30, b"x");
    assert!(matches!(unpack(&[cut]), Err(BuildError::Stream { .. })));
}

#[test]
fn sparse_maps_that_lie() {
    let map = |text: &str| {
        let mut data = text.as_bytes().to_vec();
        data.resize(512, 0);
        data.extend_from_slice(&[7; 512]);
        let records: [(&str, &[u8]); 4] = [
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"s"),
            ("GNU.sparse.realsize", b"1048576"),
        ];
        [pax(&records), file("GNUSparseFile.0/s", &data)].concat()
    };
    one(&[map("1\n1048000\n512000\n")], "s", "inside the file", "1048000");
    one(&[map("2\n4096\n256\n0\n256\n")], "s", "in order", "256");
    one(&[map("1\n0\n100\n")], "s", "512 bytes of data", "100");
    one(&[map("99999999999\n")], "s", "decimal lines", "runs");
    one(&[map("1\nx\n1\n")], "s", "decimal lines", "x");
    one(&[map("1\n18446744073709551615\n512\n")], "s", "inside the file", "18446744073709551615");
    let text = unpack(&[archive(&[map("1\n4096\n512\n")])]).unwrap();
    assert_eq!(text[1], format!("/s 644 {:?}", "\0".repeat(40)));
}

#[test]
fn whiteouts_of_nothing_sensible() {
    for name in ["a/.wh.", "a/.wh..", ".wh..."] {
        one(&[file(name, b"")], name, "a whiteout that names", "folder itself");
    }
    one(&[file(".wh.a/b", b"")], ".wh.a/b", "without a whiteout", "with it");
}

#[test]
fn devices_owners_and_attributes_out_of_range() {
    let mut device = raw(b'3', b"dev/x", b"", 0o600, b"");
    let header = tar::Header::from_byte_slice(&device[..512]).clone();
    let mut header = header;
    header.set_device_major(1).unwrap();
    header.set_device_minor(0o1_777_777).unwrap();
    header.set_cksum();
    device[..512].copy_from_slice(header.as_bytes());
    one(&[device], "dev/x", "device number", "1:524287");
    one(&[pax(&[("uid", b"4294967295")]), file("f", b"")], "f", "user id", "4294967295");
    one(&[pax(&[("gid", b"99999999999")]), file("f", b"")], "f", "group id", "99999999999");
    one(&[pax(&[("SCHILY.xattr.user.big", &[b'x'; 5000])]), file("f", b"")], "f", "3800 bytes", "");
    one(&[raw(b'Z', b"odd", b"", 0, b"")], "odd", "a file, folder", "type 'Z'");
}

#[test]
fn damage_is_named_with_its_place() {
    let good = archive(&[file("a", &[1; 600]), file("b", b"2")]);
    let mut bad = good.clone();
    bad[1536 + 512 + 3] ^= 1;
    let _ = bad;
    let mut flipped = good.clone();
    flipped[1536] ^= 1;
    match unpack(&[flipped]) {
        Err(BuildError::Refused { at: 1536, expected, .. }) => {
            assert!(expected.contains("checksum"), "{expected}")
        }
        other => panic!("{other:?}"),
    }
    // A stream that is cut inside an entry is an error. Only a digest detects a cut between entries
    // or in their padding.
    for length in 0..good.len() - 1024 {
        let result = unpack(&[good[..length].to_vec()]);
        let whole = matches!(length, 0 | 1112..=1536 | 2049..=2560);
        assert_eq!(result.is_ok(), whole, "cut at {length}: {result:?}");
    }
}

#[test]
fn a_later_entry_of_the_same_name_wins_and_breaks_the_link() {
    let text = unpack(&[archive(&[
        file("a", b"1"),
        hard_link("b", "a"),
        file("a", b"2"),
        dir("d"),
        file("d", b"3"),
    ])])
    .unwrap();
    assert_eq!(text, ["/ 755", "/a 644 \"2\"", "/b 644 \"1\"", "/d 644 \"3\""]);
}
