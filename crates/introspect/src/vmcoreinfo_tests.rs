use super::*;
use crate::memory::image::RamImage;
use proptest::prelude::*;

const TEXT: &[u8] = b"OSRELEASE=6.1.0 x\nSYMBOL(a)=ffffffff81000000\nNUMBER(b)=-129\n\
      nonsense\nSIZE(c)=64\n\0SIZE(d)=1\n";

#[test]
fn the_text_alone_and_in_its_note() {
    let ram = RamImage::new(4);
    ram.put_bytes(0, TEXT);
    ram.put_bytes(4096, b"\x0b\0\0\0\x50\0\0\0\0\0\0\0VMCOREINFO\0\0");
    ram.put_bytes(4096 + 24, TEXT);
    // Not at the start of a page, as in a file or in a process's memory.
    ram.put_bytes(2 * 4096 + 8, TEXT);
    let found: Vec<_> = (0..4).filter_map(|n| VmcoreInfo::in_frame(&ram, Frame(n))).collect();
    assert_eq!(found.len(), 2);
    for info in found {
        assert_eq!((info.release().as_str(), info.version()), ("6.1.0x", Some((6, 1))));
        assert_eq!(info.symbol("a"), Ok(0xffff_ffff_8100_0000));
        assert_eq!(info.number("b"), Ok((-129_i64).cast_unsigned()));
        assert_eq!(info.size("c"), Ok(64));
        assert_eq!(info.size("d"), Err(NoteError::Missing("SIZE(d)".to_owned())));
    }
}

#[test]
fn a_text_without_an_end_is_a_page() {
    let ram = RamImage::new(1);
    ram.put_bytes(0, &[TEXT[..10].to_vec(), vec![b'x'; 4086]].concat());
    assert_eq!(VmcoreInfo::in_frame(&ram, Frame(0)).unwrap().release(), "x".repeat(64));
}

proptest! {
    #[test]
    fn any_text_is_borne(text in prop::collection::vec(any::<u8>(), 0..200)) {
        let ram = RamImage::new(1);
        ram.put_bytes(0, &[b"OSRELEASE=".to_vec(), text].concat());
        let info = VmcoreInfo::in_frame(&ram, Frame(0)).unwrap();
        prop_assert!(info.release().len() <= 64);
        let _ = (info.symbol("x"), info.page_size());
    }
}
