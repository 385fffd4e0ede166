//! Extended attributes (ext4: "Extended Attributes"), as the system calls return them.

use super::error::{SaveError, format};
use super::ext4::{Ext4, u16_at, u32_at};
use super::inode::Inode;
use std::collections::BTreeMap;

const MAGIC: u32 = 0xea02_0000;
/// Length of a block's header, from which offsets count.
const BLOCK_HEAD: usize = 32;
/// Length of an entry without its name.
const ENTRY: usize = 16;
/// Prefixes of names, by their number.
const PREFIXES: [(u8, &[u8]); 6] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
    (7, b"system."),
];

/// All attributes of an inode.
pub(super) fn of(ext4: &Ext4<'_>, inode: &Inode) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, SaveError> {
    let place = format!("attributes of inode {}", inode.number);
    let mut all = BTreeMap::new();
    let own = inode.attributes();
    if u32_at(own, 0) == MAGIC {
        // Values are placed from the first entry on.
        let entries = own.get(4..).unwrap_or_default();
        read(&place, entries, entries, &mut all)?;
    }
    let block = inode.attributes_block();
    if block != 0 {
        // Not taken from the budget, because inodes share a block. `layer` bounds the bytes of all
        // attributes.
        let bytes = ext4.block(ext4.check(&place, block, 1)?)?;
        if u32_at(&bytes, 0) != MAGIC {
            let got = format!("{:#x}", u32_at(&bytes, 0));
            return format(place, format!("a block with the magic {MAGIC:#x}"), got);
        }
        read(&place, bytes.get(BLOCK_HEAD..).unwrap_or_default(), &bytes, &mut all)?;
    }
    Ok(all)
}

/// Reads entries until the one of zeroes. `values` is what offsets of values count from.
fn read(
    place: &str,
    mut entries: &[u8],
    values: &[u8],
    all: &mut BTreeMap<Vec<u8>, Vec<u8>>,
) -> Result<(), SaveError> {
    while entries.len() >= 4 && u32_at(entries, 0) != 0 {
        let [name_length, index] = [entries[0], entries[1]];
        let (offset, in_inode) = (usize::from(u16_at(entries, 2)), u32_at(entries, 4));
        let length = usize::try_from(u32_at(entries, 8)).unwrap_or(usize::MAX);
        let prefix = PREFIXES.iter().find(|(number, _)| *number == index);
        let name = entries.get(ENTRY..ENTRY + usize::from(name_length));
        let value = values.get(offset..).and_then(|rest| rest.get(..length));
        let (Some((_, prefix)), Some(name), Some(value), 0) = (prefix, name, value, in_inode)
        else {
            let got = format!("kind {index}, name of {name_length}, value of {length} bytes");
            return format(place, "an attribute with a known name and its value", got);
        };
        if name.contains(&0) || name.contains(&b'=') {
            return format(place, "a name without NUL and `=`", "another one");
        }
        let value = if matches!(index, 2 | 3) { list(place, value)? } else { value.to_vec() };
        // Without this, equal names would hide how much is read.
        if all.insert([prefix, name].concat(), value).is_some() {
            return format(place, "different names of attributes", "one twice");
        }
        let used = (ENTRY + usize::from(name_length)).next_multiple_of(4);
        entries = entries.get(used..).unwrap_or_default();
    }
    Ok(())
}

/// An access control list, whose form on the disk leaves ids out that have no meaning
/// (`ext4_acl_from_disk` of the kernel).
fn list(place: &str, disk: &[u8]) -> Result<Vec<u8>, SaveError> {
    const NO_ID: u32 = u32::MAX;
    if u32_at(disk, 0) != 1 || disk.len() < 4 {
        return format(place, "an access control list of version 1", u32_at(disk, 0));
    }
    let mut out = 2_u32.to_le_bytes().to_vec();
    let mut rest = &disk[4..];
    while !rest.is_empty() {
        let tag = u16_at(rest, 0);
        // ACL_USER and ACL_GROUP.
        let length = if matches!(tag, 2 | 8) { 8 } else { 4 };
        let Some(entry) = rest.get(..length) else {
            return format(place, "an entry of an access control list", rest.len());
        };
        out.extend_from_slice(&entry[..4]);
        let id = if length == 8 { u32_at(entry, 4) } else { NO_ID };
        out.extend_from_slice(&id.to_le_bytes());
        rest = &rest[length..];
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry of `user.N`, whose value is the four bytes at 0.
    fn entry(name: u8) -> Vec<u8> {
        let mut entry = vec![1, 1, 0, 0];
        entry.extend([0_u32, 4, 0].map(u32::to_le_bytes).concat());
        entry.extend([name, 0, 0, 0]);
        entry
    }

    #[test]
    fn two_attributes_have_two_names() {
        let both = |one, other| {
            let block = [entry(one), entry(other), vec![0; 4]].concat();
            let mut all = BTreeMap::new();
            read("a block", &block, &block, &mut all).map(|()| all.len())
        };
        assert_eq!(both(b'a', b'b').unwrap(), 2);
        assert!(both(b'a', b'a').unwrap_err().to_string().contains("one twice"));
    }
}
