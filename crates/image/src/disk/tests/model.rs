//! Compares layers with a model of the specification: hide what the layer's whiteouts name, then
//! add its entries in order.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Debug, Clone)]
enum Op {
    Dir(Vec<u8>, u32),
    File(Vec<u8>, u8),
    Whiteout(Vec<u8>),
    Opaque(Vec<u8>),
}

#[derive(Debug, Clone, PartialEq)]
enum Thing {
    Dir(u32),
    File(u8),
}

/// A path is a list of small numbers; the components are called a, b, c.
type Model = BTreeMap<Vec<u8>, Thing>;

fn op() -> impl Strategy<Value = Op> {
    let path = || proptest::collection::vec(0u8..3, 1..4);
    prop_oneof![
        2 => (path(), prop_oneof![Just(0o700), Just(0o711)]).prop_map(|(p, m)| Op::Dir(p, m)),
        3 => (path(), any::<u8>()).prop_map(|(p, c)| Op::File(p, c)),
        2 => path().prop_map(Op::Whiteout),
        1 => proptest::collection::vec(0u8..3, 0..3).prop_map(Op::Opaque),
    ]
}

fn name(path: &[u8]) -> String {
    path.iter().map(|c| char::from(b'a' + c).to_string()).collect::<Vec<_>>().join("/")
}

/// Applies `ops` to the model and returns the layer's entries. Entries below a path that is a file
/// at that moment are left out, because no archiver writes them.
fn apply(model: &mut Model, ops: &[Op]) -> Vec<Vec<u8>> {
    let mut entries = Vec::new();
    let mut next = model.clone();
    for op in ops {
        match op {
            Op::Whiteout(path) => next.retain(|p, _| !p.starts_with(path)),
            Op::Opaque(path) if next.get(path).is_none_or(|t| matches!(t, Thing::Dir(_))) => {
                next.retain(|p, _| !(p.starts_with(path) && p.len() > path.len()));
            }
            _ => {}
        }
    }
    // The state that an unpacker sees if it applies each whiteout only when it reads it.
    let mut seen = model.clone();
    for op in ops {
        match op {
            Op::Dir(path, _) | Op::File(path, _) => {
                let below_file = |m: &Model| {
                    (1..path.len()).any(|n| matches!(m.get(&path[..n]), Some(Thing::File(_))))
                };
                if below_file(&seen) || below_file(&next) {
                    continue;
                }
                let thing = match op {
                    Op::Dir(_, mode) => Thing::Dir(*mode),
                    _ => Thing::File(match op {
                        Op::File(_, c) => *c,
                        _ => 0,
                    }),
                };
                for m in [&mut next, &mut seen] {
                    for n in 1..path.len() {
                        m.entry(path[..n].to_vec()).or_insert(Thing::Dir(0o755));
                    }
                    let keeps =
                        matches!((m.get(path), &thing), (Some(Thing::Dir(_)), Thing::Dir(_)));
                    if !keeps {
                        m.retain(|p, _| !p.starts_with(path));
                    }
                    m.insert(path.clone(), thing.clone());
                }
                entries.push(match &thing {
                    Thing::Dir(mode) => raw(b'5', name(path).as_bytes(), b"", *mode, b""),
                    Thing::File(c) => file(&name(path), c.to_string().as_bytes()),
                });
            }
            Op::Whiteout(path) => {
                let (last, parents) = path.split_last().unwrap();
                let marker = format!("{}/.wh.{}", name(parents), name(&[*last]));
                entries.push(file(marker.trim_start_matches('/'), b""));
            }
            Op::Opaque(path) => {
                let marker = format!("{}/.wh..wh..opq", name(path));
                entries.push(file(marker.trim_start_matches('/'), b""));
            }
        }
    }
    *model = next;
    entries
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn layers_do_what_the_specification_says(
        layers in proptest::collection::vec(proptest::collection::vec(op(), 0..10), 1..5),
    ) {
        let mut model = Model::new();
        let archives: Vec<Vec<u8>> =
            layers.iter().map(|ops| archive(&apply(&mut model, ops))).collect();
        let mut expected: Vec<String> = model
            .iter()
            .map(|(path, thing)| match thing {
                Thing::Dir(mode) => format!("/{}/ {mode:o}", name(path)),
                Thing::File(c) => format!("/{} 644 {:?}", name(path), c.to_string()),
            })
            .collect();
        expected.insert(0, "/ 755".to_owned());
        prop_assert_eq!(unpack(&archives).unwrap(), expected);
    }

    #[test]
    fn any_bytes_are_a_layer_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
        let _ = unpack(&[bytes]);
    }

    #[test]
    fn a_changed_byte_is_no_panic(at in 0usize..4096, byte in any::<u8>()) {
        let mut bytes = archive(&[
            pax(&[("SCHILY.xattr.user.a", b"1"), ("mtime", b"-1.5")]),
            file("a", &[1; 700]),
            symlink("b", "a"),
            hard_link("c", "a"),
            dir("d"),
        ]);
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = unpack(&[bytes]);
    }
}
