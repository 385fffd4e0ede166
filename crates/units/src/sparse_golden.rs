//! Golden digests of sparse files: clients compute them and stores verify them, so they never
//! change. The digests are BLAKE3 over the definition in `sparse`, computed once.

use std::fs::File;
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A file of this length with these bytes at these offsets; the rest are holes.
fn file(length: u64, pieces: &[(u64, &[u8])]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(length).unwrap();
    for (at, bytes) in pieces {
        file.write_all_at(bytes, *at).unwrap();
    }
    file
}

/// Bytes without a period of 4096, none of them zero.
fn noise(length: usize) -> Vec<u8> {
    (0..length as u64).map(|n| (n * 7 % 251) as u8 + 1).collect()
}

/// A name, a file, and its digest.
fn cases() -> Vec<(&'static str, File, &'static str)> {
    let zeroes = vec![0; 3 << 20];
    let run = noise((2 << 20) + 3 * 4096);
    vec![
        ("empty", file(0, &[]), "71e0a99173564931c0b8acc52d2685a8e39c64dc52e3d02390fdac2a12b155cb"),
        (
            "one byte",
            file(1, &[(0, b"x")]),
            "32eec647a0c3a67a23266fd39266319e991e1f3a6327bc5fd97b0b993fc642bd",
        ),
        (
            "a hole",
            file(4 * MIB + 3, &[]),
            "943ae72b4f5ca76b8acadb8dee96ee0fd091ed2b09c947d215de660280ef219d",
        ),
        (
            "written zeroes",
            file(4 * MIB + 3, &[(PAGE, &zeroes)]),
            "943ae72b4f5ca76b8acadb8dee96ee0fd091ed2b09c947d215de660280ef219d",
        ),
        (
            "a partial page",
            file(3 * PAGE + 5, &[(PAGE, &[1]), (3 * PAGE + 1, &[2])]),
            "0b85eeab3a928aead23df40e1d711d86cce8babb7e39ed9d9872867cfbe54636",
        ),
        (
            "a run across reads",
            file(8 * MIB, &[(MIB - PAGE, &run)]),
            "b5dff7269bb1a53e38ffe96f083009467898e2cf795902b1963ef2436b022eaa",
        ),
        (
            "data far apart",
            file(64 * MIB + 100, &[(5, b"a"), (63 * MIB, b"b")]),
            "ecfac541704e6ad7d730baf4b4d4bd4a8eb4c6e7718770e9b9180c668278a7b6",
        ),
        (
            "zeroes within data",
            file(5 * MIB, &[(0, &run), (MIB, &zeroes[..1 << 20])]),
            "d85882bf21ce4fc8d47b12bbf32c65011e904cd20cbcff91338738671f2160f7",
        ),
    ]
}

#[test]
fn digests_are_frozen() {
    for (name, file, expected) in cases() {
        assert_eq!(super::digest(&file).unwrap().digest.to_string(), expected, "{name}");
    }
}
