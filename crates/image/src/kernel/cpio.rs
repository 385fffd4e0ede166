//! Writing a cpio archive in the "newc" format, as the kernel unpacks it
//! (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! The archive is not compressed. Unpacking it is work for the guest's first vCPU, while the host has its 2.4 MiB in the page
//! cache anyway. Measured with 6.12 under QEMU's TCG, kernel start to init, four runs: plain 1.62-1.90 s, zstd -19 (1.0 MiB)
//! 1.82-2.29 s, legacy LZ4 (1.5 MiB) 1.54-2.25 s.

use std::collections::BTreeSet;

/// A cpio archive in the making. The same calls give the same bytes: times and inode numbers are its own.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) {
        self.inode += 1;
        let size = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        let fields = [
            self.inode, mode, 0, // owner
            0, // group
            1, // names
            0, // time
            size, 0, // device the file is on
            0, device.0, device.1, name_size, 0, // checksum: not in this format
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad(4);
        self.bytes.extend_from_slice(&data[..data.len().min(u32::MAX as usize)]);
        self.pad(4);
    }

    fn pad(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }

    fn parents(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.folder(parent);
        }
    }

    /// A folder and those above it, 0755; once each.
    pub fn folder(&mut self, path: &str) {
        if self.folders.contains(path) {
            return;
        }
        self.parents(path);
        self.folders.insert(path.to_owned());
        self.entry(path, 0o040_755, (0, 0), &[]);
    }

    /// A file; shorter than 4 GiB, which the callers' caps see to.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) {
        self.parents(path);
        self.entry(path, 0o100_000 | mode, (0, 0), data);
    }

    /// A character device.
    pub fn char_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) {
        self.parents(path);
        self.entry(path, 0o020_000 | mode, (major, minor), &[]);
    }

    /// The whole archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.pad(512);
        self.bytes
    }
}
