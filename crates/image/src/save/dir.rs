//! Folders (ext4: "Directory Entries"). A folder with a hash tree is read like any other: its index
//! is hidden in entries without an inode.

use super::error::{SaveError, format};
use super::ext4::{Ext4, u16_at, u32_at};
use super::extents;
use super::inode::Inode;
use dayfly_archive::show;
use std::collections::BTreeMap;

/// Length of the fields before an entry's name.
const HEAD: usize = 8;

/// The names in a folder, without `.` and `..`, each with its inode. At most `most` of them.
pub(super) fn read(
    ext4: &Ext4<'_>,
    folder: &Inode,
    most: usize,
) -> Result<BTreeMap<Vec<u8>, u32>, SaveError> {
    let place = format!("folder, inode {}", folder.number);
    let mut names = BTreeMap::new();
    for extent in extents::of(ext4, folder)? {
        let mut at = extent.at;
        let end = extent.at + extent.bytes.next_multiple_of(ext4.block_bytes);
        while at < end {
            entries(&place, &ext4.block(at)?, |name, inode| {
                if names.len() >= most {
                    return format(&place, "fewer names", "more than this image may have");
                }
                if names.insert(name.to_vec(), inode).is_some() {
                    return format(&place, "different names", format!("{:?} twice", show(name)));
                }
                Ok(())
            })?;
            at += ext4.block_bytes;
        }
    }
    Ok(names)
}

/// Calls `each` with the name and the inode of each entry of a block.
fn entries(
    place: &str,
    block: &[u8],
    mut each: impl FnMut(&[u8], u32) -> Result<(), SaveError>,
) -> Result<(), SaveError> {
    let mut rest = block;
    while !rest.is_empty() {
        let (inode, length) = (u32_at(rest, 0), usize::from(u16_at(rest, 4)));
        let name_length = usize::from(rest.get(6).copied().unwrap_or(0));
        let sound = length >= HEAD && length.is_multiple_of(4) && length <= rest.len();
        if !sound || (inode != 0 && HEAD + name_length > length) {
            let got = format!("length {length}, name of {name_length} bytes");
            return format(place, format!("an entry of at most {} bytes", rest.len()), got);
        }
        let name = rest.get(HEAD..HEAD + name_length).unwrap_or_default();
        if inode != 0 && !matches!(name, b"." | b"..") {
            if name.is_empty() || name.iter().any(|byte| matches!(byte, b'/' | 0)) {
                return format(place, "a name without a slash", format!("{:?}", show(name)));
            }
            each(name, inode)?;
        }
        rest = &rest[length..];
    }
    Ok(())
}
