use super::*;
use crate::memory::image::RamImage;

const WRITE: u64 = 2;

fn table(ram: &RamImage, frame: u64, index: u64, entry: u64) {
    ram.put(frame * 4096 + index * 8, entry);
}

/// An entry that points to a frame.
fn to(frame: u64) -> u64 {
    (frame * 4096) | PRESENT
}

/// The leaves below one half of a table.
fn leaves(ram: &RamImage, tables: Tables, half: Half) -> Vec<Leaf> {
    let mut leaves = Vec::new();
    Walk::new(ram).half(tables, half, &mut |leaf| leaves.push(leaf));
    leaves
}

#[test]
fn pages_of_all_sizes_with_four_and_five_levels() {
    for levels in [Levels::Four, Levels::Five] {
        let ram = RamImage::new(16);
        let mut root = 1;
        if levels == Levels::Five {
            table(&ram, 9, 0, to(1) | WRITE | USER);
            table(&ram, 9, 511, to(1) | WRITE);
            root = 9;
        }
        table(&ram, 1, 0, to(2) | USER);
        table(&ram, 1, 511, to(2));
        table(&ram, 2, 0, to(3) | USER);
        table(&ram, 2, 1, to(1 << 18) | USER | LARGE | NO_EXECUTE);
        table(&ram, 3, 0, to(4) | USER);
        table(&ram, 3, 1, to(512) | LARGE | LARGE_PAT);
        table(&ram, 4, 5, to(7) | USER | LARGE);
        let tables = Tables { root: Frame(root), levels };
        assert_eq!(tables.translate(&ram, 0x5123), Some(0x7123));
        assert_eq!(tables.translate(&ram, 0x6000), None);
        assert_eq!(tables.translate(&ram, 0x20_0042), Some(0x20_0042));
        assert_eq!(tables.translate(&ram, 0x4000_0042), Some(0x4000_0042));
        let top = (0xffff << 48) | (511 << 39);
        assert_eq!(tables.translate(&ram, top + 0x5123), Some(0x7123));

        let user: Vec<Leaf> = leaves(&ram, tables, Half::User);
        let leaf = |address, pfn, pages, user, executable| Leaf {
            address,
            pfn: Pfn(pfn),
            pages,
            user,
            executable,
        };
        let low = [
            leaf(0x5000, 7, 1, true, true),
            leaf(0x20_0000, 512, 512, false, true),
            leaf(0x4000_0000, 1 << 18, 1 << 18, true, false),
        ];
        assert_eq!(user, low, "{levels:?}");
        let kernel = leaves(&ram, tables, Half::Kernel);
        if levels == Levels::Four {
            let high = low.map(|leaf| Leaf { address: leaf.address + top, user: false, ..leaf });
            assert_eq!(kernel, high);
        } else {
            // Both halves of the five-level table lead through one table, whose entry 0 comes
            // first.
            let high = low.map(|leaf| Leaf {
                address: leaf.address + (0xffff << 48),
                user: false,
                ..leaf
            });
            assert_eq!(kernel, high);
        }
    }
}

#[test]
fn isolation_forbids_execution_at_the_top_and_nowhere_else() {
    let ram = RamImage::new(8);
    table(&ram, 1, 0, to(2) | USER | NO_EXECUTE);
    table(&ram, 2, 0, to(3) | USER);
    table(&ram, 2, 1, to(4) | USER | NO_EXECUTE);
    for (frame, index) in [(3, 5), (4, 6)] {
        table(&ram, frame, 0, to(index << 18) | USER | LARGE);
    }
    let tables = Tables { root: Frame(1), levels: Levels::Four };
    let executable: Vec<bool> =
        leaves(&ram, tables, Half::User).iter().map(|leaf| leaf.executable).collect();
    assert_eq!(executable, [true, false]);
}

#[test]
fn a_table_that_is_its_own_child_is_entered_once() {
    let ram = RamImage::new(4);
    for index in 0..512 {
        table(&ram, 1, index, to(1));
        table(&ram, 2, index, to(1));
    }
    let tables = Tables { root: Frame(2), levels: Levels::Five };
    let mut walk = Walk::new(&ram);
    let mut seen = 0;
    walk.half(tables, Half::User, &mut |_| seen += 1);
    assert_eq!(seen, 0);
    assert_eq!((0..4).filter(|&n| walk.tables().contains(n)).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(tables.translate(&ram, 0x1234_5678), Some(0x1678));
}

#[test]
fn entries_that_point_outside_of_ram_lead_nowhere() {
    let ram = RamImage::new(4);
    table(&ram, 1, 0, ADDRESS | PRESENT);
    table(&ram, 1, 1, to(4));
    table(&ram, 1, 2, to(2));
    table(&ram, 2, 0, ((ADDRESS >> 30) << 30) | PRESENT | LARGE);
    // Reserved bits are set, so an access would fault.
    table(&ram, 2, 1, ADDRESS | PRESENT | LARGE);
    let tables = Tables { root: Frame(1), levels: Levels::Four };
    assert_eq!(tables.translate(&ram, 0), None);
    let leaves = leaves(&ram, tables, Half::User);
    assert_eq!(leaves.len(), 1);
    let mut mapped = Mapped::new(&ram);
    mapped.insert(&ram, leaves[0]);
    mapped.insert(&ram, Leaf { pfn: Pfn(2), pages: 1, ..leaves[0] });
    mapped.insert(&ram, Leaf { pfn: Pfn(4), pages: 1, ..leaves[0] });
    assert_eq!(
        (0..4).map(|n| mapped.contains(Frame(n), Pfn(n as u64))).collect::<Vec<_>>(),
        [false, false, true, false]
    );
    mapped.insert(&ram, Leaf { pfn: Pfn(0), pages: 1 << 18, ..leaves[0] });
    assert!((0..4).all(|n| mapped.contains(Frame(n), Pfn(n as u64))));
}
