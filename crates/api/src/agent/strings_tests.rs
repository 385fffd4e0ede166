use super::*;
use crate::agent::{HEADER_BYTES, decode_header};
use proptest::prelude::*;

/// The frames in `bytes`.
fn frames(mut bytes: &[u8]) -> Vec<(FrameKind, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let (kind, length) = decode_header(*header).expect("a header");
        all.push((kind, rest[..length].to_vec()));
        bytes = &rest[length..];
    }
    all
}

/// What a peer makes of the frames.
fn received(bytes: &[u8]) -> Result<ExecSpec, StringsError> {
    let all = frames(bytes);
    let (first, rest) = all.split_first().expect("a frame");
    assert_eq!(first.0, FrameKind::Request);
    let mut spec: ExecSpec = serde_json::from_slice(&first.1).expect("a program");
    if let Some(mut collector) = Collector::of(&mut spec)? {
        for (kind, body) in rest {
            assert_eq!(*kind, FrameKind::Strings);
            collector.add(body)?;
        }
        assert!(collector.is_complete());
        collector.finish(&mut spec)?;
    }
    Ok(spec)
}

fn spec(argv: &[String], env: &[(&str, String)]) -> ExecSpec {
    ExecSpec {
        argv: argv.to_vec(),
        env: env.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        ..ExecSpec::default()
    }
}

#[test]
fn what_fits_has_the_form_of_the_version_before() {
    let small = spec(&["true".into()], &[("A", "1".into())]);
    let got = request_frames(&mut small.clone(), 0).unwrap();
    assert_eq!(got, encode(FrameKind::Request, &serde_json::to_vec(&small).unwrap()));
    assert!(!String::from_utf8_lossy(&got).contains("strings"));
}

#[test]
fn long_arguments_follow_in_frames_up_to_what_linux_takes() {
    // 16 strings of 120,000 bytes: 1.9 MB.
    let long: Vec<String> = (0..16).map(|n| format!("{n}{}", "x".repeat(120_000))).collect();
    let asked = spec(&long, &[("A", "=x=".into()), ("B", String::new())]);
    let bytes = request_frames(&mut asked.clone(), STRINGS_PROTOCOL).unwrap();
    assert!(bytes.len() < 1_930_000, "{}", bytes.len());
    assert_eq!(received(&bytes).unwrap(), asked);
    let early = request_frames(&mut asked.clone(), STRINGS_PROTOCOL - 1).unwrap_err();
    assert!(
        early.is_too_long() && early.to_string().contains("bake the image's snapshot again"),
        "{early}"
    );
    let more = vec!["x".repeat(MAX_STRINGS_BYTES / 2); 2];
    let error = request_frames(&mut spec(&more, &[]), STRINGS_PROTOCOL).unwrap_err();
    assert!(error.is_too_long() && error.to_string().starts_with("E2BIG"), "{error}");
    // Many empty strings have addresses too.
    let many = vec![String::new(); MAX_STRINGS_BYTES / 9 + 1];
    let error = request_frames(&mut spec(&many, &[]), STRINGS_PROTOCOL).unwrap_err();
    assert!(error.is_too_long(), "{error}");
    // Text that JSON makes six times as long is sent as it is.
    let control = vec!["\u{1}".repeat(100_000); 2];
    let bytes = request_frames(&mut spec(&control, &[]), STRINGS_PROTOCOL).unwrap();
    assert_eq!(received(&bytes).unwrap().argv, control);
}

/// The kernel counts more for a short string than JSON has for it.
#[test]
fn many_short_arguments_that_fit_into_a_frame_go_to_every_agent() {
    let asked = spec(&vec!["a".to_owned(); 60_000], &[]);
    assert!(kernel_bytes(&asked) > 2 * MAX_FRAME_BYTES);
    let bytes = request_frames(&mut asked.clone(), 0).unwrap();
    assert_eq!(received(&bytes).unwrap(), asked);
}

#[test]
fn what_the_form_cannot_have_is_refused() {
    let long = || "x".repeat(MAX_FRAME_BYTES);
    for bad in [
        spec(&[long(), "a\0b".into()], &[]),
        spec(&[long()], &[("A=B", "C".into())]),
        spec(&[long()], &[("", "C".into())]),
        spec(&[long()], &[("A", "\0".into())]),
    ] {
        let error = request_frames(&mut bad.clone(), STRINGS_PROTOCOL).unwrap_err();
        assert!(matches!(error, StringsError::Invalid { .. }), "{error}");
    }
}

#[test]
fn what_was_not_announced_is_refused() {
    let collect = |arguments, bytes, pieces: &[&[u8]]| {
        let strings = Some(Strings { arguments, bytes });
        let mut spec = ExecSpec { strings, ..ExecSpec::default() };
        let mut collector = Collector::of(&mut spec)?.expect("strings");
        pieces.iter().try_for_each(|piece| collector.add(piece))?;
        assert!(collector.is_complete());
        collector.finish(&mut spec).map(|()| spec)
    };
    let good = collect(1, 6, &[b"a", b"\0A=1\0"]).unwrap();
    assert_eq!(good, spec(&["a".into()], &[("A", "1".into())]));
    assert_eq!(collect(2, 2, &[b"\0\0"]).unwrap().argv, ["", ""]);
    let most = u32::try_from(MAX_STRINGS_BYTES).unwrap();
    assert_eq!(
        collect(0, most + 1, &[]).unwrap_err(),
        StringsError::TooLong(MAX_STRINGS_BYTES + 1)
    );
    let zeroes = vec![0; MAX_STRINGS_BYTES / 4];
    assert!(collect(0, most / 4, &[&zeroes]).unwrap_err().is_too_long());
    for (arguments, bytes, pieces) in [
        (1, 2, &[&b"abc"[..]][..]),
        (1, 2, &[b""]),
        (2, 2, &[b"a\0"]),
        (1, 1, &[b"a"]),
        (0, 2, &[b"a\0"]),
        (0, 3, &[b"=a\0"]),
        (1, 2, &[b"\xff\0"]),
        (u32::MAX, 2, &[b"a\0"]),
    ] {
        let error = collect(arguments, bytes, pieces).unwrap_err();
        assert!(matches!(error, StringsError::Announced { .. }), "{error}");
    }
}

proptest! {
    #[test]
    fn every_program_arrives(
        argv in proptest::collection::vec("[^\0]{0,40}", 0..8),
        env in proptest::collection::btree_map("[^\0=]{1,8}", "[^\0]{0,20}", 0..5),
    ) {
        let asked = ExecSpec { argv, env, cwd: "/x".into(), ..ExecSpec::default() };
        let mut sent = asked.clone();
        let bytes = take(&mut sent).unwrap();
        prop_assert!(sent.argv.is_empty() && sent.env.is_empty());
        let collector = Collector::of(&mut sent).unwrap();
        let mut collector = collector.expect("strings");
        for piece in bytes.chunks(7) {
            collector.add(piece).unwrap();
        }
        collector.finish(&mut sent).unwrap();
        prop_assert_eq!(sent, asked);
    }
}
