use super::*;
use crate::fixture::name;
use crate::fixture_pages::{file, golden, page, ram};
use crate::inner::Store;
use std::fs;

/// The bytes of a pack of 20 pages in groups of 16, for tenant `one`.
fn sample() -> Vec<u8> {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    store.tenant(&name("one")).unwrap().put(&file(&ram(numbers())), &[]).unwrap();
    let pack = fs::read_dir(root.path().join("pages/one")).unwrap().next().unwrap().unwrap();
    fs::read(pack.path()).unwrap()
}

fn numbers() -> impl Iterator<Item = u64> {
    (1..24).filter(|n| n % 7 != 0)
}

/// Opens the bytes as a pack and reads every page; an error must be damage and name the file.
fn read_all(bytes: &[u8]) -> Result<Vec<Vec<u8>>, Damage> {
    let file = file_of(bytes);
    let path = Path::new("/pages/one/pack");
    let damage = |e| match e {
        PackError::Damage(d) => d,
        PackError::Io(e) => panic!("{e}: {}", e.source),
    };
    let pack = Pack::open(path, &file, &name("one")).map_err(damage)?;
    let mut pages = Vec::new();
    for group in 0..pack.groups() {
        let span = pack.span(group, group);
        let mut stored = vec![0; usize::try_from(span.end - span.start).unwrap()];
        file.read_exact_at(&mut stored, span.start).unwrap();
        let mut raw = Vec::new();
        pack.decode(group, pack.pages_of(group).start, &stored, &mut raw)?;
        let hashes = pack.hashes(&file, pack.pages_of(group)).unwrap();
        for ((page, hash), bytes) in pack.pages_of(group).zip(&hashes).zip(raw.chunks(PAGE)) {
            pack.check(page, hash, bytes)?;
            pages.push(bytes.to_vec());
        }
    }
    Ok(pages)
}

fn file_of(bytes: &[u8]) -> File {
    let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

#[test]
fn a_pack_of_version_1_still_reads() {
    // The sample is not compared byte by byte, because another zstd may compress better.
    let bytes = golden("pack-1", &sample());
    assert_eq!(read_all(&bytes).unwrap(), numbers().map(page).collect::<Vec<_>>());
    let pack = Pack::open(Path::new("x"), &file_of(&bytes), &name("one")).unwrap();
    assert_eq!(
        (pack.pages, pack.group_pages, pack.groups(), pack.bytes),
        (20, 16, 2, bytes.len() as u64)
    );
}

#[test]
fn every_truncation_and_every_flipped_bit_is_refused_with_its_place() {
    let whole = sample();
    for length in 0..whole.len() {
        let text = read_all(&whole[..length]).unwrap_err().to_string();
        assert!(
            text.starts_with("/pages/one/pack: ") && text.contains("expected"),
            "{length}: {text}"
        );
    }
    let mut named = 0;
    // Every bit of the footer and the end, and every 7th bit of the bodies, which are most of a
    // pack.
    let body = whole.len() - (HEADER_BYTES + FIXED_BYTES + 2 * 20 + 20 * 32 + END_BYTES);
    for bit in (0..body * 8).step_by(7).chain(body * 8..whole.len() * 8) {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let text = read_all(&flipped).unwrap_err().to_string();
        named +=
            usize::from(text.contains("group 0, page 0: ") || text.contains("group 1, page 16: "));
    }
    assert!(named >= body * 8 / 7, "{named} named");
}

#[test]
fn a_damaged_page_is_named_with_what_it_should_be() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let tenant = store.tenant(&name("one")).unwrap();
    tenant.put(&file(&ram(numbers())), &[]).unwrap();
    let hash = Digest::of(&page(20));
    let found = tenant.space.find(&hash).unwrap().unwrap();
    let wrong = found.pack.check(found.page, &hash, &page(19)).unwrap_err().to_string();
    let place = format!(
        "group 1, page 17: digest of the page: expected {hash}, got {}",
        Digest::of(&page(19))
    );
    assert_eq!(wrong, format!("{}: {place}", found.pack.path.display()));
    // Damage on disk in the first group; pages of the second group are still returned.
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&found.pack.path, fs::Permissions::from_mode(0o600)).unwrap();
    let on_disk = File::options().read(true).write(true).open(&found.pack.path).unwrap();
    let mut byte = [0];
    on_disk.read_exact_at(&mut byte, 100).unwrap();
    on_disk.write_all_at(&[byte[0] ^ 4], 100).unwrap();
    assert_eq!(tenant.fetch(&hash).unwrap(), page(20));
    let first = Digest::of(&page(1));
    for error in [
        tenant.fetch(&first).unwrap_err(),
        tenant.group(&first).unwrap_err(),
        tenant.fetch_many(&[first], &|_, _| panic!("given")).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(
            text.contains("group 0, page 0: digest of the group as stored: expected "),
            "{text}"
        );
    }
    // A verification reports each of the 16 pages, and nothing else.
    let report = store.verify(&crate::Scope::All, &crate::Meter::default()).unwrap();
    assert_eq!((report.damage.len(), report.pages, report.packs), (16, 20, 1));
    for (n, damage) in report.damage.iter().enumerate() {
        assert!(damage.to_string().contains(&format!("group 0, page {n}: ")), "{damage}");
    }
}

/// Wrong counts behind valid seals: each is refused before anything is allocated or read for it.
#[test]
fn lying_counts_are_refused() {
    let whole = sample();
    let end_at = whole.len() - END_BYTES;
    let at = usize::try_from(u64::from_le_bytes(std::array::from_fn(|n| whole[end_at + 8 + n])))
        .unwrap();
    let payload = &whole[at + HEADER_BYTES..end_at];
    let forged = |change: &dyn Fn(&mut Vec<u8>), offset: Option<u64>| {
        let mut payload = payload.to_vec();
        change(&mut payload);
        let mut bytes = whole[..at].to_vec();
        bytes.extend_from_slice(&sealed::seal(&MAGIC, VERSION, &payload));
        let mut end = END_MAGIC.to_vec();
        end.extend_from_slice(&offset.unwrap_or(at as u64).to_le_bytes());
        end.extend_from_slice(&Digest::of(&end).0);
        bytes.extend_from_slice(&end);
        read_all(&bytes).unwrap_err().to_string()
    };
    let put = |at: usize, value: u32| {
        move |p: &mut Vec<u8>| p[at..at + 4].copy_from_slice(&value.to_le_bytes())
    };
    for (change, offset, expected) in [
        (
            &put(0, u32::MAX) as &dyn Fn(&mut Vec<u8>),
            None,
            "pages: expected 1 to 16384, got 4294967295",
        ),
        (&put(0, 0), None, "pages: expected 1 to 16384, got 0"),
        (&put(0, 16384), None, "bytes of groups and hashes: expected 544768, got 680"),
        (&put(4, 65), None, "pages of a group: expected 1 to 64, got 65"),
        (&put(4, 0), None, "pages of a group: expected 1 to 64, got 0"),
        (&put(72, u32::MAX), None, "bytes of a group: expected 1 to "),
        (&put(72, 0), None, "bytes of a group: expected 1 to "),
        (&put(72, 1), None, "bytes of all groups: expected "),
        (&|p| p[8] = 64, None, "tenant: expected one, got @one"),
        (&|p| p[20] = 1, None, "tenant: expected one, got "),
        (&|p| p.truncate(50), None, "footer: expected at least 72 bytes, got 50"),
        (&|_| (), Some(u64::MAX), "offset of the footer: expected within "),
        (&|_| (), Some(at as u64 + 1), "magic at byte 0"),
        (&|p| p.resize(2 << 20, 0), None, "offset of the footer: expected within "),
    ] {
        let text = forged(change, offset);
        assert!(text.contains(expected), "{text}");
    }
}
