//! GNU tar and python's tarfile read archives of this crate, and this crate reads theirs.

use super::property::write;
use super::*;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

fn run(program: &str, args: &[&str], folder: &Path) -> String {
    let output = Command::new(program).args(args).current_dir(folder).env("LC_ALL", "C").output();
    let output = output.unwrap_or_else(|e| panic!("{program} is needed for this test: {e}"));
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, error) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {out}{error}");
    out
}

/// A folder with one file of each kind that a user can create.
fn tree() -> tempfile::TempDir {
    let all = tempfile::tempdir().unwrap();
    let top = all.path().join("tree");
    let long = top.join("d".repeat(120)).join("e".repeat(120));
    std::fs::create_dir_all(&long).unwrap();
    std::fs::write(long.join("file"), vec![3; 70_000]).unwrap();
    std::fs::write(top.join("Icon\r"), "odd\n").unwrap();
    std::fs::hard_link(top.join("Icon\r"), top.join("z-link")).unwrap();
    symlink("t".repeat(150), top.join("symlink")).unwrap();
    let sparse = std::fs::File::create(top.join("sparse")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    for at in (0..12_u64).map(|n| n * 80_000 + 5) {
        std::os::unix::fs::FileExt::write_all_at(&sparse, b"data", at).unwrap();
    }
    all
}

/// Name, link and content of each entry, in order.
fn summary(all: &[Whole]) -> Vec<(String, String, Vec<u8>)> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut out: Vec<_> =
        all.iter().map(|w| (text(&w.head.path), text(&w.head.link), w.content.clone())).collect();
    out.sort();
    out
}

fn pack(all: &Path) -> Vec<u8> {
    let options = crate::pack::Options {
        owner: None,
        special: true,
        one_file_system: true,
        xattrs: crate::xattr::portable,
    };
    let folder = std::fs::File::open(all).unwrap();
    let mut writer = crate::Writer::new(Vec::new());
    let fd = std::os::fd::AsFd::as_fd(&folder);
    crate::pack::pack(&mut writer, fd, "tree".as_ref(), b"tree", options).unwrap();
    writer.finish().unwrap()
}

#[test]
fn every_format_of_gnu_tar_gives_the_same_tree() {
    let all = tree();
    let expected = summary(&read(pack(all.path()).as_slice()).unwrap());
    assert!(
        expected.iter().any(|(name, _, content)| name == "tree/sparse" && content.len() == 1 << 20)
    );
    let formats: [&[&str]; 6] = [
        &["--format=gnu"],
        &["--format=gnu", "-S"],
        &["--format=posix"],
        &["--format=posix", "-S", "--sparse-version=0.0"],
        &["--format=posix", "-S", "--sparse-version=0.1"],
        &["--format=posix", "-S", "--sparse-version=1.0"],
    ];
    for format in formats {
        run("tar", &[format, &["--sort=name", "-cf", "x.tar", "tree"]].concat(), all.path());
        let archive = std::fs::read(all.path().join("x.tar")).unwrap();
        assert_eq!(
            archive.len() < 800_000,
            format.contains(&"-S"),
            "{format:?}: {}",
            archive.len()
        );
        let got = summary(&read(archive.as_slice()).unwrap());
        assert_eq!(got.len(), expected.len(), "{format:?}");
        for (got, expected) in got.iter().zip(&expected) {
            assert!(got == expected, "{format:?}: {:?} {:?}", got.0, expected.0);
        }
    }
}

#[test]
fn gnu_tar_unpacks_what_is_packed() {
    let all = tree();
    std::fs::write(all.path().join("y.tar"), pack(all.path())).unwrap();
    std::fs::create_dir(all.path().join("out")).unwrap();
    run("tar", &["-xf", "../y.tar"], &all.path().join("out"));
    run("diff", &["-r", "--no-dereference", "tree", "out/tree"], all.path());
    let stat = |name: &str| std::fs::symlink_metadata(all.path().join(name)).unwrap();
    assert_eq!(stat("out/tree/Icon\r").ino(), stat("out/tree/z-link").ino());
    assert!(stat("out/tree/sparse").blocks() < 256, "{}", stat("out/tree/sparse").blocks());
    let time = |name: &str| (stat(name).mtime(), stat(name).mtime_nsec());
    for name in ["Icon\r", "sparse", "symlink", ""] {
        assert_eq!(time(&format!("out/tree/{name}")), time(&format!("tree/{name}")), "{name:?}");
    }
}

const PYTHON: &str = r#"
import tarfile, sys, json
with tarfile.open(sys.argv[1]) as t:
    print(json.dumps([[m.name, m.linkname, m.type.decode(), m.mode, m.uid, m.gid, m.size,
        str(m.mtime),
        m.pax_headers.get("SCHILY.xattr.user.x", "")] for m in t]))
"#;

#[test]
fn python_reads_what_is_written() {
    let all = tempfile::tempdir().unwrap();
    let mut big = Head::new("big ids and times", Kind::File, 0o4755);
    (big.uid, big.gid, big.mtime_s, big.mtime_ns) = (3_000_000, 4_000_000_000, -2, 750_000_000);
    big.xattrs.insert(b"user.x".to_vec(), b"a\nb=c".to_vec());
    let mut device = Head::new("null", Kind::Char, 0o666);
    device.device = (1, 3);
    let whole = |head, content: &[u8]| (Whole { head, content: content.to_vec() }, None);
    let archive = write(&[whole(big, b"hello"), whole(device, b"")]);
    std::fs::write(all.path().join("p.tar"), archive).unwrap();
    let text = run("python3", &["-c", PYTHON, "p.tar"], all.path());
    assert_eq!(
        text.trim(),
        r#"[["big ids and times", "", "0", 2541, 3000000, 4000000000, 5, "-1.25", "a\nb=c"], "#
            .to_owned()
            + r#"["null", "", "3", 438, 0, 0, 0, "0", ""]]"#
    );
}

#[test]
fn what_python_writes_is_read() {
    let all = tempfile::tempdir().unwrap();
    let script = r#"
import tarfile, io
for name, form in (("g", tarfile.GNU_FORMAT), ("p", tarfile.PAX_FORMAT)):
    with tarfile.open(name + ".tar", "w", format=form) as t:
        i = tarfile.TarInfo("n" * 150 + "/" + "m" * 90); i.size = 3; i.uid = 3000000; i.mtime = 7
        t.addfile(i, io.BytesIO(b"abc"))
        l = tarfile.TarInfo("l"); l.type = tarfile.SYMTYPE; l.linkname = "t" * 140
        t.addfile(l)
"#;
    run("python3", &["-c", script], all.path());
    for name in ["g.tar", "p.tar"] {
        let got = read(std::fs::File::open(all.path().join(name)).unwrap()).unwrap();
        assert_eq!(got[0].head.path, format!("{}/{}", "n".repeat(150), "m".repeat(90)).as_bytes());
        assert_eq!(
            (got[0].head.uid, got[0].head.mtime_s, &got[0].content[..]),
            (3_000_000, 7, &b"abc"[..])
        );
        assert_eq!(got[1].head.link, b"t".repeat(140));
    }
}
