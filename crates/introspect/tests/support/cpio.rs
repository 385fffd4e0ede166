//! An initramfs with one program and a script (the "newc" format, Documentation/driver-api/early-userspace/buffer-format.rst).

/// A directory's mode.
const DIRECTORY: u32 = 0o040_755;
/// An executable file's mode.
const PROGRAM: u32 = 0o100_755;

fn entry(archive: &mut Vec<u8>, inode: usize, name: &str, mode: u32, body: &[u8]) {
    let fields = [inode, mode as usize, 0, 0, 1, 0, body.len(), 0, 0, 0, 0, name.len() + 1, 0];
    archive.extend(b"070701");
    archive.extend(fields.iter().flat_map(|field| format!("{field:08x}").into_bytes()));
    archive.extend(name.bytes().chain([0]));
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(body);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

/// An archive with `busybox` in /bin, `init`, and folders to mount things on.
pub fn initramfs(busybox: &[u8], init: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (inode, folder) in ["bin", "proc", "sys", "dev", "tmp", "mnt"].iter().enumerate() {
        entry(&mut archive, inode + 1, folder, DIRECTORY, &[]);
    }
    entry(&mut archive, 10, "bin/busybox", PROGRAM, busybox);
    entry(&mut archive, 11, "init", PROGRAM, init);
    entry(&mut archive, 0, "TRAILER!!!", 0, &[]);
    archive
}
