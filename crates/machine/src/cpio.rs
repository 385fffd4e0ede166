//! Writes "newc" archives, the format Linux unpacks as an initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst).

use std::io::{self, Write};

/// An archive that is being written. Entries appear in the order of the calls; a folder must precede what is in it.
pub(crate) struct Writer<W: Write> {
    out: W,
    inode: u32,
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    pub(crate) fn folder(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.entry(path, 0o040_000 | mode, (0, 0), &[])
    }

    pub(crate) fn file(&mut self, path: &str, mode: u32, body: &[u8]) -> io::Result<()> {
        self.entry(path, 0o100_000 | mode, (0, 0), body)
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, 0o120_777, (0, 0), target.as_bytes())
    }

    pub(crate) fn character_device(&mut self, path: &str, mode: u32, number: (u32, u32)) -> io::Result<()> {
        self.entry(path, 0o020_000 | mode, number, &[])
    }

    /// Writes the end mark and gives the sink back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), body: &[u8]) -> io::Result<()> {
        let too_long =
            || io::Error::new(io::ErrorKind::InvalidInput, format!("{path}: too long for a newc archive"));
        let length = u32::try_from(body.len()).map_err(|_| too_long())?;
        let name = u32::try_from(path.len() + 1).map_err(|_| too_long())?;
        self.inode += 1;
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        // magic, inode, mode, uid, gid, links, mtime, length, device (2), node's device (2), name's length, checksum
        write!(
            self.out,
            "070701{:08x}{mode:08x}{:08x}{:08x}{links:08x}{:08x}{length:08x}{:08x}{:08x}{:08x}{:08x}{name:08x}{:08x}",
            self.inode, 0, 0, 0, 0, 0, device.0, device.1, 0
        )?;
        self.out.write_all(path.as_bytes())?;
        // The header has 110 bytes; name and body are each padded to a multiple of four.
        self.out.write_all(&[0; 4][..1 + padding(110 + path.len() + 1)])?;
        self.out.write_all(body)?;
        self.out.write_all(&[0; 4][..padding(body.len())])
    }
}

fn padding(length: usize) -> usize {
    length.wrapping_neg() & 3
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn cpio_reads_what_we_write() {
        let mut writer = Writer::new(Vec::new());
        writer.folder("d", 0o755).unwrap();
        writer.file("d/empty", 0o644, b"").unwrap();
        writer.file("d/five", 0o600, b"12345").unwrap();
        writer.link("d/link", "five").unwrap();
        writer.character_device("d/null", 0o666, (1, 3)).unwrap();
        let bytes = writer.finish().unwrap();
        let mut child = Command::new("busybox")
            .args(["cpio", "-tv"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        let out = child.wait_with_output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines[0].starts_with("drwxr-xr-x"), "{text}");
        assert!(lines[2].starts_with("-rw-------") && lines[2].contains(" 5 "), "{text}");
        assert!(lines[3].ends_with("d/link -> five"), "{text}");
        assert!(lines[4].starts_with("crw-rw-rw-"), "{text}");
    }
}
