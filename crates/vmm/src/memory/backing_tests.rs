use super::*;

const fn row(first: u32, pages: u32, file: u32, from: u32) -> Row {
    Row { first, pages, file, from }
}

/// A file in which every page begins with `salt` and the page's number.
fn file(pages: u32, salt: u8) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(u64::from(pages) * PAGE_SIZE).unwrap();
    for page in 0..pages {
        file.write_all_at(&[salt, u8::try_from(page).unwrap()], u64::from(page) * PAGE_SIZE)
            .unwrap();
    }
    file
}

fn list(rows: &[Row]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&encode(rows), 0).unwrap();
    file
}

fn sharing(rows: &[Row]) -> Result<Backing, BackingError> {
    Backing::sharing(file(64, 0), &list(rows), vec![file(32, 1), file(8, 2)])
}

#[test]
fn every_page_is_read_where_it_lies() {
    let rows = [row(0, 2, 1, 6), row(10, 5, 0, 27), row(15, 1, 1, 0), row(60, 4, 0, 0)];
    let backing = sharing(&rows).unwrap().try_clone().unwrap();
    for page in 0..64 {
        let shared = rows.iter().find(|row| (row.first..row.first + row.pages).contains(&page));
        let expected = shared.map_or((0, page), |row| {
            (u8::try_from(row.file).unwrap() + 1, row.from + page - row.first)
        });
        let mut got = vec![0; 4096];
        backing.read_page(page, &mut got).unwrap();
        assert_eq!((got[0], u32::from(got[1])), expected, "page {page}");
    }
    assert!(backing.read_page(64, &mut [0; 4096]).is_err());
}

#[test]
fn pieces_cover_what_was_asked_for_and_nothing_twice() {
    let backing = sharing(&[row(4, 4, 0, 0), row(8, 4, 1, 2), row(20, 1, 0, 9)]).unwrap();
    let pieces = |from: u64, to: u64| {
        let pieces = backing.pieces(from * PAGE_SIZE..to * PAGE_SIZE);
        let in_pages =
            pieces.map(|p| (p.offset / PAGE_SIZE, p.len / PAGE_SIZE, p.at / PAGE_SIZE, p.own));
        in_pages.collect::<Vec<_>>()
    };
    let all = [
        (0, 4, 0, true),
        (4, 4, 0, false),
        (8, 4, 2, false),
        (12, 8, 12, true),
        (20, 1, 9, false),
        (21, 43, 21, true),
    ];
    assert_eq!(pieces(0, 64), all);
    assert_eq!(pieces(6, 10), [(6, 2, 2, false), (8, 2, 2, false)]);
    assert_eq!(pieces(12, 20), [(12, 8, 12, true)]);
    assert_eq!(pieces(5, 5), []);
    assert_eq!(Backing::of(file(64, 0)).pieces(0..64 * PAGE_SIZE).count(), 1);
}

#[test]
fn the_shortest_rows_are_copied_and_not_too_many() {
    let parted = |rows: &[Row]| {
        let (mapped, copied) = sharing(rows).unwrap().parted();
        let pages =
            |rows: Vec<Row>| rows.iter().map(|row| (row.first, row.pages)).collect::<Vec<_>>();
        (pages(mapped), pages(copied))
    };
    let rows = [row(0, 4, 0, 0), row(5, 5, 0, 4), row(12, 1, 1, 0), row(20, 2, 1, 3)];
    assert_eq!(parted(&rows), (vec![(5, 5)], vec![(0, 4), (12, 1), (20, 2)]));
    assert_eq!(parted(&[]), (vec![], vec![]));
    // One page and 9 times 2, which come first, and 12 times 4: 67.
    let of = |n: u32, pages| row(n * 5, pages, 0, 0);
    let long: Vec<Row> =
        (0..21).map(|n| of(n, if n < 12 { 4 } else { 2 })).chain([of(21, 1)]).collect();
    let file = || file(128, 0);
    let backing = Backing::sharing(file(), &list(&long), vec![file()]).unwrap();
    let (mapped, copied) = backing.parted();
    assert_eq!((mapped.len(), copied.iter().map(|row| row.pages).sum::<u32>()), (1, 63));
    assert_eq!(mapped, [of(11, 4)]);
}

#[test]
fn rows_that_cannot_be_are_refused() {
    let bad: [(&[Row], &str); 7] = [
        (&[row(0, 0, 0, 0)], "row 0 at byte"),
        (&[row(63, 2, 0, 0)], "some of 0 to 64"),
        (&[row(8, 4, 0, 0), row(11, 1, 0, 0)], "row 1"),
        (&[row(u32::MAX, u32::MAX, 0, 0)], "pages of RAM"),
        (&[row(0, 1, 2, 0)], "file: expected below 2"),
        (&[row(0, 2, 1, 7)], "pages of the file: expected below 8"),
        (&[row(0, 2, 1, u32::MAX)], "pages of the file"),
    ];
    for (rows, expected) in bad {
        let error = sharing(rows).unwrap_err().to_string();
        assert!(error.contains(expected), "{rows:?}: {error}");
    }
    let files = |n: usize| (0..n).map(|_| file(8, 3)).collect();
    let error = Backing::sharing(file(64, 0), &list(&[]), files(MAX_FILES + 1)).unwrap_err();
    assert!(matches!(error, BackingError::Files(17)));
    let long = list(&vec![row(0, 1, 0, 0); MAX_ROWS + 1]);
    assert!(matches!(Backing::sharing(file(64, 0), &long, files(1)), Err(BackingError::Length(_))));
}

#[test]
fn a_list_of_version_1_is_read() {
    let rows = [row(0, 2, 1, 6), row(10, 5, 0, 27)];
    let bytes = crate::golden::golden("shared-1", &encode(&rows));
    assert!(bytes == encode(&rows));
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    assert_eq!(decode(&file).unwrap(), rows);
}

#[test]
fn a_list_that_is_cut_or_changed_is_refused() {
    let bytes = encode(&[row(0, 1, 0, 0), row(4, 2, 0, 1)]);
    let opened = |bytes: &[u8]| {
        let list = tempfile::tempfile().unwrap();
        list.write_all_at(bytes, 0).unwrap();
        Backing::sharing(file(64, 0), &list, vec![file(8, 1)])
    };
    assert!(opened(&bytes).is_ok());
    for end in 0..bytes.len() {
        assert!(opened(&bytes[..end]).is_err(), "cut at {end}");
    }
    for bit in 0..bytes.len() * 8 {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(opened(&bytes).is_err(), "bit {bit}");
    }
    let mut part = vec![0; 15];
    part.fill(0);
    assert!(matches!(opened(&sealed::seal(&MAGIC, VERSION, &part)), Err(BackingError::Rows(15))));
}

proptest::proptest! {
    #[test]
    fn what_is_laid_over_rows_leaves_the_rest_of_them(
        below in proptest::collection::vec((0_u32..6, 1_u32..9, 0_u32..3, 0_u32..50), 0..12),
        above in proptest::collection::vec((0_u32..6, 1_u32..9, 3_u32..5, 0_u32..50), 0..12),
    ) {
        // A gap of 0 to 5 pages precedes each row.
        let rows = |of: Vec<(u32, u32, u32, u32)>| {
            let mut at = 0;
            let placed = of.into_iter().map(|(gap, pages, file, from)| {
                at += gap + pages;
                row(at - pages, pages, file, from)
            });
            placed.collect::<Vec<_>>()
        };
        let of = |rows: &[Row], page: u32| {
            let row = rows.iter().find(|row| (row.first..row.first + row.pages).contains(&page))?;
            Some((row.file, row.from + page - row.first))
        };
        let (below, above) = (rows(below), rows(above));
        let both = overlay(&below, &above);
        check(&both, 200, &[1000; 5]).unwrap();
        for page in 0..200 {
            let expected = of(&above, page).or_else(|| of(&below, page));
            proptest::prop_assert_eq!(of(&both, page), expected, "page {}", page);
        }
    }
}
