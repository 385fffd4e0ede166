//! Writes a [`Tree`] as an ext4 file system into a sparse file, without mounting and without
//! privilege.
//!
//! `mke2fs` makes an empty file system, and `debugfs -w` fills it from a script. `mke2fs -d` of a
//! folder is no alternative: it needs root for owners, devices and capabilities. It also lays files
//! out in the order of the folder's hash. Its tar input needs e2fsprogs 1.47.1, and Debian 12 has
//! 1.47.0.
//!
//! The same tree gives the same bytes. UUID and hash seed come from the tree's digest, times from
//! the tree, and everything else from this file.
//!
//! The options suit a disk that is the read-only base of copy-on-write clones:
//!
//! - Nothing is initialised lazily, because a guest would write the initialisation into each
//!   clone's layer.
//! - No blocks are reserved for root.
//! - The journal is 16 MiB. A guest rewrites it in a circle, and each journal block that the guest
//!   touches is a block of its layer.
//! - Metadata is checksummed.

use super::error::{BuildError, on};
use super::tree::{Kind, Node, NodeId, Tree};
use super::types::{Progress, Size};
use crate::tool;
use dayfly_archive::show;
use dayfly_units::sparse;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

const PACKAGE: &str = "e2fsprogs";
const BLOCK: u64 = 4096;
const INODE_BYTES: u64 = 256;
const JOURNAL_MIB: u64 = 16;
/// Longest script line in bytes. debugfs reads its script in lines of `BUFSIZ` (8192).
const MAX_LINE: usize = 8000;
/// Smallest disk of [`Size::Auto`], in bytes.
const AUTO_MIN_BYTES: u64 = 2 << 30;
const MIB: u64 = 1 << 20;
/// ext4 features, listed explicitly because the defaults of mke2fs.conf differ between hosts.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,\
    flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

/// Replaces the host's mke2fs.conf. It holds the type names that mke2fs looks for, with empty
/// sections.
const CONFIG: &str = "[fs_types]\next4 = {\n}\nfloppy = {\n}\nsmall = {\n}\ndefault = {\n}\n\
    big = {\n}\nhuge = {\n}\n";

/// Length and number of inodes of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    bytes: u64,
    inodes: u64,
}

/// Computes the disk's length and number of inodes from `tree` and `size`.
pub fn geometry(tree: &Tree, size: Size) -> Result<Geometry, BuildError> {
    let round = |bytes: u64| bytes.next_multiple_of(BLOCK);
    let mut content = 0;
    for node in tree.nodes() {
        content += match &node.kind {
            // An inode holds four extents; further extents take blocks, one for each 340 runs. That
            // is rarely more than 1%.
            Kind::File(c) => {
                c.data_bytes + c.data_bytes / 64 + if c.data_bytes > 0 { BLOCK } else { 0 }
            }
            Kind::Dir(children) => {
                let names: u64 =
                    children.keys().map(|n| (n.len() as u64 + 8).next_multiple_of(4)).sum();
                // Records do not cross blocks, so each block may waste the space of one record.
                round(names + names / 8 + 24).max(BLOCK)
            }
            Kind::Symlink(target) if target.len() >= 60 => BLOCK,
            _ => 0,
        };
        content += if node.meta.xattrs.is_empty() { 0 } else { BLOCK };
    }
    let nodes = tree.node_count() as u64 + 16;
    let auto = (2 * content).max(AUTO_MIN_BYTES);
    // Superblock copies, group descriptors, reserved descriptors and bitmaps take less than 2% plus
    // 8 MiB.
    let fixed =
        |bytes: u64, inodes: u64| inodes * INODE_BYTES + JOURNAL_MIB * MIB + bytes / 64 + 8 * MIB;
    let inodes_for = |bytes: u64| (bytes / 16384).max(nodes + nodes / 4 + 1024);
    let needed = |bytes: u64| content + fixed(bytes, inodes_for(bytes));
    let mut bytes = match size {
        Size::Auto => auto.max(needed(auto)),
        Size::Free(free) => {
            let guess = content.saturating_add(free.0);
            needed(guess.saturating_add(guess / 16)).saturating_add(free.0)
        }
        Size::Total(total) => total.0,
    };
    bytes = bytes.next_multiple_of(if matches!(size, Size::Total(_)) { BLOCK } else { MIB });
    if bytes < needed(bytes) {
        return Err(BuildError::TooSmall {
            needed_bytes: needed(needed(bytes)).next_multiple_of(MIB),
            asked_bytes: bytes,
        });
    }
    // debugfs and mke2fs count blocks and inodes in 32 bits here.
    if bytes > 16 << 40 {
        let expected = "a disk of at most 16 TiB".to_owned();
        return Err(BuildError::Verify { expected, got: format!("{bytes} bytes") });
    }
    Ok(Geometry { bytes, inodes: inodes_for(bytes).min(u64::from(u32::MAX) / 2) })
}

/// Writes `tree` into the new file `disk`. `scratch` is an empty folder for scripts.
pub fn write(
    tree: &Tree,
    geometry: Geometry,
    disk: &Path,
    scratch: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(), BuildError> {
    progress(Progress { step: "writing the file system", done_bytes: 0 });
    let seed = tree_digest(tree);
    let epoch =
        tree.nodes().map(|n| n.meta.mtime_s).max().unwrap_or(0).clamp(1, i64::from(i32::MAX));
    let file = File::create_new(disk).map_err(on("create", disk))?;
    file.set_len(geometry.bytes).map_err(on("resize", disk))?;

    let mut mkfs = tool::tool("mke2fs");
    let extended = format!(
        "lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0,hash_seed={}",
        uuid(&seed.as_bytes()[16..32])
    );
    let config = scratch.join("mke2fs.conf");
    std::fs::write(&config, CONFIG).map_err(on("write", &config))?;
    // Older libext2fs takes its time from the first variable if that is not zero, newer libext2fs
    // from the second.
    let clock =
        [("E2FSPROGS_FAKE_TIME", epoch.to_string()), ("SOURCE_DATE_EPOCH", epoch.to_string())];
    mkfs.env("MKE2FS_CONFIG", &config).envs(clock.clone());
    mkfs.args([
        "-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-e", "continue", "-L",
        "dayfly",
    ]);
    mkfs.args([
        "-O",
        FEATURES,
        "-N",
        &geometry.inodes.to_string(),
        "-J",
        &format!("size={JOURNAL_MIB}"),
    ]);
    mkfs.args(["-U", &uuid(&seed.as_bytes()[..16]), "-E", &extended]);
    mkfs.arg(disk).arg((geometry.bytes / BLOCK).to_string());
    tool::run(mkfs, PACKAGE, |_| ())?;
    let before = free_inodes(disk)?;

    let script = scratch.join("script");
    let expected = Script::write(tree, &script, scratch, epoch)?;
    let mut debugfs = tool::tool("debugfs");
    debugfs.env("TZ", "UTC0").envs(clock).arg("-w").arg("-f").arg(&script).arg(disk);
    let command = tool::describe(&debugfs);
    let (allocated, tail) = tool::run_reading(debugfs, PACKAGE, |_| (), allocated)?;
    // debugfs exits with success even if its commands fail, so any line on standard error except
    // the version counts as a failure.
    let tail: Vec<String> = tail.into_iter().filter(|l| !l.starts_with("debugfs 1.")).collect();
    if !tail.is_empty() {
        return Err(tool::ToolError::Complained { command, tail: tail.join("\n") }.into());
    }
    if allocated != expected {
        let place = allocated.iter().zip(&expected).position(|(a, b)| a != b);
        let place = place.unwrap_or(allocated.len().min(expected.len()));
        let at =
            |list: &[u32]| format!("file {place} of {} in inode {:?}", list.len(), list.get(place));
        return Err(BuildError::Verify { expected: at(&expected), got: at(&allocated) });
    }

    progress(Progress { step: "checking the file system", done_bytes: 0 });
    let lost_found = u64::from(is_dir(tree, b"lost+found"));
    // mke2fs makes the root folder and lost+found.
    let expected = before - (tree.node_count() as u64 - 1 - lost_found);
    let now = free_inodes(disk)?;
    if now != expected {
        let got = format!("{now}");
        return Err(BuildError::Verify { expected: format!("{expected} free inodes"), got });
    }
    let mut fsck = tool::tool("e2fsck");
    fsck.args(["-f", "-n"]).arg(disk);
    tool::run(fsck, PACKAGE, |_| ())?;
    sparse::punch_zeroes(&file).map_err(on("make holes in", disk))?;
    Ok(())
}

/// The inodes that debugfs reports as allocated, in order.
fn allocated(out: &mut dyn Read) -> std::io::Result<Vec<u32>> {
    let mut inodes = Vec::new();
    let mut reader = BufReader::new(out);
    let mut line = Vec::new();
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line)? == 0 {
            return Ok(inodes);
        }
        // debugfs echoes each command after "debugfs: ", so a name in a command cannot look like
        // this line.
        let number = line.strip_prefix(b"Allocated inode: ").map(<[u8]>::trim_ascii);
        inodes.extend(
            number.and_then(|n| std::str::from_utf8(n).ok()).and_then(|n| n.parse::<u32>().ok()),
        );
    }
}

fn is_dir(tree: &Tree, path: &[u8]) -> bool {
    tree.find(path).is_some_and(|id| tree.children(id).is_some())
}

/// Reads `s_free_inodes_count`: byte 16 of the superblock, which begins at byte 1024.
fn free_inodes(disk: &Path) -> Result<u64, BuildError> {
    let mut field = [0; 4];
    let mut file = File::open(disk).map_err(on("open", disk))?;
    file.seek(SeekFrom::Start(1024 + 16)).map_err(on("read", disk))?;
    file.read_exact(&mut field).map_err(on("read", disk))?;
    Ok(u64::from(u32::from_le_bytes(field)))
}

/// A digest of the tree without the bytes of its files. It suffices to give each file system a
/// distinct UUID.
fn tree_digest(tree: &Tree) -> blake3::Hash {
    fn add(tree: &Tree, id: NodeId, hasher: &mut blake3::Hasher) {
        let node = tree.node(id);
        let kind = match &node.kind {
            Kind::File(c) => format!("f{} {}", c.size_bytes, c.data_bytes),
            Kind::Symlink(target) => format!("l{target:?}"),
            Kind::Char(a, b) => format!("c{a} {b}"),
            Kind::Block(a, b) => format!("b{a} {b}"),
            Kind::Dir(children) => format!("d{}", children.len()),
            Kind::Fifo => "p".to_owned(),
        };
        hasher.update(format!("{kind} {:?}\n", node.meta).as_bytes());
        for (name, child) in tree.children(id).into_iter().flatten() {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name);
            add(tree, child.id, hasher);
        }
    }
    let mut hasher = blake3::Hasher::new();
    add(tree, Tree::ROOT, &mut hasher);
    hasher.finalize()
}

/// Formats 16 bytes as a UUID of the custom kind (RFC 9562, version 8).
fn uuid(bytes: &[u8]) -> String {
    let mut b = [0; 16];
    b.copy_from_slice(&bytes[..16]);
    b[6] = (b[6] & 0x0f) | 0x80;
    b[8] = (b[8] & 0x3f) | 0x80;
    let h = hex::encode(b);
    format!("{}-{}-{}-{}-{}", &h[..8], &h[8..12], &h[12..16], &h[16..20], &h[20..])
}

/// The first free inode after mke2fs; inode 11 is lost+found.
const FIRST_FREE_INODE: u32 = 12;
const ROOT_INODE: u32 = 2;
const LOST_FOUND_INODE: u32 = 11;

/// The script for debugfs.
///
/// The script names each new file by inode (`<12>`), because debugfs finds a name by reading its
/// folder from the start. The numbers are predictable: libext2fs takes the first free inode from
/// the parent's group on. The script never removes a file, so the allocated inodes are always a
/// contiguous range. After the run the predicted inodes are compared with those that debugfs
/// reports.
struct Script<'a> {
    tree: &'a Tree,
    out: BufWriter<File>,
    path: &'a Path,
    scratch: &'a Path,
    next_inode: u32,
    /// For each node with several names, the inode made for the first name.
    first: HashMap<NodeId, u32>,
    /// The inodes that debugfs will report: for files and devices, not for folders and links.
    said: Vec<u32>,
    xattrs: u64,
}

fn number(inode: u32) -> Vec<u8> {
    format!("<{inode}>").into_bytes()
}

/// The line of one command. Words are quoted as libss reads them: a quote within quotes is doubled.
pub(super) fn quoted(words: &[&[u8]]) -> Result<Vec<u8>, BuildError> {
    let mut line = Vec::new();
    for (i, word) in words.iter().enumerate() {
        if word.iter().any(|b| matches!(b, b'\n' | b'\r' | 0)) {
            return Err(BuildError::Verify {
                expected: "names and link targets without line breaks, which debugfs cannot write"
                    .to_owned(),
                got: format!("{:?}", show(word)),
            });
        }
        if i == 0 {
            line.extend_from_slice(word);
            continue;
        }
        line.extend_from_slice(b" \"");
        for byte in *word {
            line.extend(std::iter::repeat_n(*byte, if *byte == b'"' { 2 } else { 1 }));
        }
        line.push(b'"');
    }
    line.push(b'\n');
    if line.len() > MAX_LINE {
        return Err(BuildError::Verify {
            expected: format!(
                "paths and link targets of less than {MAX_LINE} bytes with quotes doubled"
            ),
            got: format!("{} bytes in {:?}…", line.len(), show(&line)),
        });
    }
    Ok(line)
}

impl<'a> Script<'a> {
    /// Writes the script. Returns the inodes that debugfs will report as allocated.
    fn write(
        tree: &'a Tree,
        path: &'a Path,
        scratch: &'a Path,
        epoch: i64,
    ) -> Result<Vec<u32>, BuildError> {
        let out = BufWriter::new(File::create_new(path).map_err(on("create", path))?);
        let mut script = Self {
            tree,
            out,
            path,
            scratch,
            next_inode: FIRST_FREE_INODE,
            first: HashMap::new(),
            said: Vec::new(),
            xattrs: 0,
        };
        script.line(&[b"set_current_time", format!("@{epoch}").as_bytes()])?;
        if !is_dir(tree, b"lost+found") {
            script.times(LOST_FOUND_INODE, epoch, 0)?;
        }
        script.folder(Tree::ROOT, ROOT_INODE)?;
        script.attributes(ROOT_INODE, tree.node(Tree::ROOT))?;
        for field in ["mkfs_time", "wtime", "lastcheck"] {
            script.line(&[b"set_super_value", field.as_bytes(), format!("@{epoch}").as_bytes()])?;
        }
        script.line(&[b"set_super_value", b"kbytes_written", b"0"])?;
        script.out.flush().map_err(on("write", path))?;
        Ok(script.said)
    }

    /// Writes one command.
    fn line(&mut self, words: &[&[u8]]) -> Result<(), BuildError> {
        self.out.write_all(&quoted(words)?).map_err(on("write", self.path))
    }

    fn set(&mut self, inode: u32, field: &str, value: &str) -> Result<(), BuildError> {
        self.line(&[b"set_inode_field", &number(inode), field.as_bytes(), value.as_bytes()])
    }

    /// Writes the content of the folder `id`, which has the inode `inode`.
    fn folder(&mut self, id: NodeId, inode: u32) -> Result<(), BuildError> {
        let tree = self.tree;
        let Some(children) = tree.children(id).filter(|c| !c.is_empty()) else { return Ok(()) };
        self.line(&[b"cd", &number(inode)])?;
        let mut folders = Vec::new();
        for (name, child) in children {
            let node = tree.node(child.id);
            if let Some(first) = self.first.get(&child.id) {
                self.line(&[b"ln", &number(*first), name])?;
                continue;
            }
            let made = self.make(inode, name, node)?;
            if matches!(node.kind, Kind::Dir(_)) {
                folders.push((child.id, made));
                continue;
            }
            self.attributes(made, node)?;
            if node.names > 1 {
                self.first.insert(child.id, made);
                self.set(made, "links_count", &node.names.to_string())?;
            }
        }
        // Folders come last, because adding content changes a folder's times, and because one `cd`
        // per folder suffices.
        for (id, made) in folders {
            self.folder(id, made)?;
            self.attributes(made, tree.node(id))?;
        }
        Ok(())
    }

    /// Makes `name` in the current folder, which has the inode `dir`. Returns the inode of `name`.
    fn make(&mut self, dir: u32, name: &[u8], node: &Node) -> Result<u32, BuildError> {
        let device = |major: u32, minor: u32| (major.to_string(), minor.to_string());
        match &node.kind {
            Kind::Dir(_) if dir == ROOT_INODE && name == b"lost+found" => {
                return Ok(LOST_FOUND_INODE);
            }
            Kind::Dir(_) => self.line(&[b"mkdir", name])?,
            Kind::File(content) => {
                let from = content.path.as_deref().unwrap_or(Path::new("/dev/null"));
                self.line(&[b"write", from.as_os_str().as_bytes(), name])?;
            }
            Kind::Symlink(target) => self.line(&[b"symlink", name, target])?,
            Kind::Char(major, minor) => {
                let (major, minor) = device(*major, *minor);
                self.line(&[b"mknod", name, b"c", major.as_bytes(), minor.as_bytes()])?;
            }
            Kind::Block(major, minor) => {
                let (major, minor) = device(*major, *minor);
                self.line(&[b"mknod", name, b"b", major.as_bytes(), minor.as_bytes()])?;
            }
            Kind::Fifo => self.line(&[b"mknod", name, b"p"])?,
        }
        let inode = self.next_inode;
        self.next_inode += 1;
        if !matches!(node.kind, Kind::Dir(_) | Kind::Symlink(_)) {
            self.said.push(inode);
        }
        Ok(inode)
    }

    fn attributes(&mut self, inode: u32, node: &Node) -> Result<(), BuildError> {
        let (meta, kind) = (&node.meta, &node.kind);
        let format = match kind {
            Kind::Dir(_) => 0o040_000,
            Kind::File(_) => 0o100_000,
            Kind::Symlink(_) => 0o120_000,
            Kind::Char(..) => 0o020_000,
            Kind::Block(..) => 0o060_000,
            Kind::Fifo => 0o010_000,
        };
        // On Linux every symbolic link has the mode 0777.
        let mode = if matches!(kind, Kind::Symlink(_)) { 0o777 } else { meta.mode & 0o7777 };
        self.set(inode, "mode", &format!("0{:o}", format | mode))?;
        if meta.uid != 0 {
            self.set(inode, "uid", &meta.uid.to_string())?;
        }
        if meta.gid != 0 {
            self.set(inode, "gid", &meta.gid.to_string())?;
        }
        for (name, value) in &meta.xattrs {
            let file = self.scratch.join(format!("x{}", self.xattrs));
            self.xattrs += 1;
            std::fs::write(&file, value).map_err(on("write", &file))?;
            self.line(&[b"ea_set", b"-f", file.as_os_str().as_bytes(), &number(inode), name])?;
        }
        self.times(inode, meta.mtime_s, meta.mtime_ns)
    }

    /// Sets the time of the last change. ext4 stores 34 bits of seconds and 30 bits of nanoseconds
    /// in two fields (inode timestamps).
    fn times(&mut self, inode: u32, seconds: i64, nanoseconds: u32) -> Result<(), BuildError> {
        let clamped = seconds.clamp(i64::from(i32::MIN), (3 << 32) + i64::from(i32::MAX));
        let low = clamped.rem_euclid(1 << 32);
        let signed = if low > i64::from(i32::MAX) { low - (1 << 32) } else { low };
        let epoch = (clamped - signed) >> 32;
        self.set(inode, "mtime", &format!("@{low}"))?;
        let extra = (u64::from(nanoseconds % 1_000_000_000) << 2) | epoch.unsigned_abs();
        if extra != 0 {
            self.set(inode, "mtime_extra", &extra.to_string())?;
        }
        Ok(())
    }
}
