//! The packer: its messages, which its guest may have made up, and those of the daemon.

use crate::target::{Heap, Outcome, Target, planted};
use dayfly_packer::wire::{FromPacker, pack, pack_of, read_sheet, sheet};
use dayfly_store::{BlockHint, Classified, FoundFrame};
use dayfly_units::Digest;

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "packer-messages",
    what: "messages of the packer, packs and sheets",
    stateful: false,
    most_bytes: 4096,
    heap: Heap { fixed: 4096, per_byte: 16 },
    run: messages,
    seeds,
}];

fn seeds() -> Vec<Vec<u8>> {
    let at = BlockHint { disk: 1, layer: 2, block: 3 };
    let hash = Digest::of(b"a page");
    let frames = vec![(7, FoundFrame::Page(hash)), (8, FoundFrame::Disk(at, hash))];
    vec![
        FromPacker::Frames(frames).encode(),
        FromPacker::Classified(Classified { digest: hash, data_bytes: 4096, hints: (1, 2) })
            .encode(),
        FromPacker::Written(3).encode(),
        FromPacker::Failed { text: "RAM: it ends".to_owned(), is_no_space: true }.encode(),
        pack(3, &[1, 2, 9]),
        [&[2, 1][..], &sheet(&[3..9, 11..12], &[(5, at)])].concat(),
    ]
}

fn messages(input: &[u8]) -> Outcome {
    let message = FromPacker::decode(input);
    if let Some(message) = &message {
        assert_eq!(message.encode(), input, "encoded again");
        planted(|| matches!(message, FromPacker::Frames(frames) if frames.len() == 3));
    }
    let asked = pack_of(input);
    if let Some((number, frames)) = &asked {
        assert_eq!(pack(*number, frames), input, "a pack, encoded again");
    }
    let read = input.split_first_chunk().and_then(|([free, hints], bytes)| {
        let (free, hints) = read_sheet(bytes, u64::from(*free), u64::from(*hints))?;
        assert_eq!(sheet(&free, &hints).len(), bytes.len());
        Some(())
    });
    Outcome::of(message.is_some() || asked.is_some() || read.is_some())
}
