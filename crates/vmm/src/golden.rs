//! Golden files: the bytes of each version of each format that is still read.

use std::path::Path;

/// The bytes of the file `file` in `fixtures/`, which must exist. With `DAYFLY_GOLDEN=write` it is
/// first written from `now`: only for a new format.
pub fn golden(file: &str, now: &[u8]) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(file);
    if std::env::var_os("DAYFLY_GOLDEN").is_some_and(|v| v == "write") {
        std::fs::write(&path, now).unwrap();
    }
    std::fs::read(&path)
        .unwrap_or_else(|e| panic!("{}: {e}: a golden file is part of the format", path.display()))
}
