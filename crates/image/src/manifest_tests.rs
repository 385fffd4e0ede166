//! Manifests from untrusted writers.

use super::*;

fn image() -> ImageManifest {
    ImageManifest {
        digest: "ab".repeat(32),
        size_bytes: 1 << 30,
        content_bytes: 4096,
        source: "folder /x".to_owned(),
        created_s: 1,
        run: ImageConfig { env: vec!["A=line\nbreak".to_owned()], ..ImageConfig::default() },
    }
}

fn kernel() -> KernelManifest {
    let file = || FileDigest { digest: "0".repeat(64), size_bytes: 7 };
    KernelManifest {
        release: "6.1.0-56-cloud-amd64".to_owned(),
        vmlinux: file(),
        initrd: file(),
        agent_digest: "0".repeat(64),
        modules: vec!["lib/modules/x.ko".to_owned()],
        builtin: vec![],
        source: "/boot/vmlinuz".to_owned(),
        created_s: 1,
    }
}

#[test]
fn what_was_written_reads_back() {
    assert_eq!(ImageManifest::from_bytes(&image().to_bytes().unwrap()).unwrap(), image());
    assert_eq!(KernelManifest::from_bytes(&kernel().to_bytes().unwrap()).unwrap(), kernel());
}

#[test]
fn truncated_flipped_or_of_the_other_kind() {
    let whole = image().to_bytes().unwrap();
    for length in 0..whole.len() {
        assert!(ImageManifest::from_bytes(&whole[..length]).is_err());
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(ImageManifest::from_bytes(&flipped).is_err(), "bit {bit}");
    }
    assert!(matches!(
        KernelManifest::from_bytes(&whole),
        Err(ManifestError::Seal(SealError::Magic { .. }))
    ));
}

#[test]
fn fields_that_make_no_sense_are_named() {
    type Change<T> = fn(&mut T);
    let images: [(&str, Change<ImageManifest>); 9] = [
        ("digest", |m| m.digest = "../../etc/passwd".to_owned()),
        ("digest", |m| m.digest = "AB".repeat(32)),
        ("size_bytes", |m| m.size_bytes = 4097),
        ("size_bytes", |m| m.size_bytes = u64::MAX),
        ("size_bytes", |m| m.size_bytes = 0),
        ("content_bytes", |m| m.content_bytes = (1 << 30) + 4096),
        ("source", |m| m.source = "\x1b[2J".to_owned()),
        ("run.env", |m| m.run.env = vec![String::new(); 5000]),
        ("run.user", |m| m.run.user = "u".repeat(300)),
    ];
    for (name, change) in images {
        let mut bad = image();
        change(&mut bad);
        // A writer that seals without checking.
        let json = serde_json::to_vec(&bad).unwrap();
        let text = ImageManifest::from_bytes(&sealed::seal(&ImageManifest::MAGIC, 1, &json))
            .unwrap_err()
            .to_string();
        assert!(
            text.contains(&format!("field {name}: expected")) && !text.contains('\x1b'),
            "{text}"
        );
        assert!(bad.to_bytes().is_err());
    }
    let kernels: [(&str, Change<KernelManifest>); 4] = [
        ("release", |m| m.release = "../x".to_owned()),
        ("vmlinux.size_bytes", |m| m.vmlinux.size_bytes = u64::MAX),
        ("agent_digest", |m| m.agent_digest = String::new()),
        ("modules", |m| m.modules = vec!["a\nb".to_owned()]),
    ];
    for (name, change) in kernels {
        let mut bad = kernel();
        change(&mut bad);
        let text = bad.to_bytes().unwrap_err().to_string();
        assert!(text.contains(&format!("field {name}: expected")), "{text}");
    }
    let foreign = sealed::seal(&ImageManifest::MAGIC, 2, b"{}");
    assert!(
        ImageManifest::from_bytes(&foreign).unwrap_err().to_string().contains("version at byte 40")
    );
    let unknown = sealed::seal(&ImageManifest::MAGIC, 1, b"{\"digest\": 7}");
    assert!(ImageManifest::from_bytes(&unknown).unwrap_err().to_string().contains("line 1 column"));
}
