use super::*;

fn finding(object: Object, snapshots: &[&str]) -> Finding {
    let snapshots = snapshots.iter().map(|&s| s.to_owned()).collect();
    Finding { object, name: "x".into(), text: "t".into(), snapshots }
}

#[test]
fn whatever_is_damaged_there_is_something_to_do() {
    for (object, snapshots, word) in [
        (Object::Image, &[][..], "dayfly image rm x"),
        (Object::Image, &["a", "b"], "dayfly snapshots rm a b"),
        (Object::Kernel, &[], "dayfly kernel rm x"),
        (Object::Snapshot, &[], "dayfly snapshots rm x"),
        (Object::Layer, &[], "dayfly store gc"),
        (Object::Layer, &["a"], "dayfly snapshots rm a,"),
        (Object::Pack, &["a"], "dayfly snapshots rm a,"),
        (Object::BlockIndex, &[], "nothing is lost"),
    ] {
        let shown = damaged(finding(object, snapshots));
        assert!(shown.next.contains(word), "{shown:?}");
        assert_eq!((shown.name.as_str(), shown.message.as_str()), ("x", "t"));
    }
}

/// The API's names of the kinds are unique.
#[test]
fn every_kind_has_its_own_name() {
    let all = [
        Object::Image,
        Object::Kernel,
        Object::Layer,
        Object::Snapshot,
        Object::Pack,
        Object::BlockIndex,
    ];
    let names: std::collections::BTreeSet<&str> = all.map(kind).into();
    assert_eq!(names.len(), all.len());
}

#[test]
fn however_much_is_damaged_it_is_one_line_that_a_client_reads() {
    let many: Vec<String> = (0..5000).map(|n| format!("snapshot-with-a-long-name-{n}")).collect();
    let finding = Finding { snapshots: many, text: "x".repeat(500), ..finding(Object::Pack, &[]) };
    let one = damaged(finding.clone());
    assert_eq!((one.snapshots.len(), one.snapshots[64].as_str()), (65, "and 4936 more"));
    let report =
        VerifyReport { damage: vec![finding; 1000], more_damage: 7, ..VerifyReport::default() };
    let verified = shown(report);
    assert!(verified.damaged.len() > 50, "{}", verified.damaged.len());
    assert_eq!(verified.damaged.len() as u64 + verified.more_damaged, 1007);
    assert!(serde_json::to_vec(&verified).unwrap().len() < MAX_PROGRESS_BYTES);
}
