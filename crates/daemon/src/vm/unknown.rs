//! Fields of a record that this version of the daemon does not know. A daemon of a later version
//! wrote them, and gets them back.

use serde_json::{Map, Value};

/// What a record has that this version of the daemon does not understand, kept for later versions.
#[derive(Debug, Clone, Default)]
pub struct Carried {
    /// The lowest format that a reader of the unknown fields must know.
    pub version: u32,
    /// The unknown fields.
    pub unknown: Unknown,
}

/// The unknown fields of a JSON object, of objects in it, and so on. Fields of objects in arrays
/// are lost, because an element of an array has no lasting identity.
///
/// A field that is serialised only sometimes must not be in a record: [`Self::of`] would take it
/// for unknown.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Unknown(Map<String, Value>);

// A record's numbers are integers, so no value in it is unequal to itself.
impl Eq for Unknown {}

impl Unknown {
    /// The fields of `read` that `known`, the same record as this version writes it, lacks.
    #[must_use]
    pub fn of(read: &Value, known: &Value) -> Self {
        match rest(read, known) {
            Some(Value::Object(fields)) => Self(fields),
            _ => Self::default(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the fields to `record`. Fields of an object that is gone are lost with it.
    pub fn add_to(&self, record: &mut Value) {
        if let Value::Object(into) = record {
            add(&self.0, into);
        }
    }
}

fn rest(read: &Value, known: &Value) -> Option<Value> {
    let (Value::Object(read), Value::Object(known)) = (read, known) else { return None };
    let fields = read.iter().filter_map(|(key, value)| {
        let unknown = match known.get(key) {
            None => Some(value.clone()),
            Some(known) => rest(value, known),
        };
        Some((key.clone(), unknown?))
    });
    let fields: Map<_, _> = fields.collect();
    (!fields.is_empty()).then_some(Value::Object(fields))
}

fn add(fields: &Map<String, Value>, into: &mut Map<String, Value>) {
    for (key, value) in fields {
        match (value, into.get_mut(key)) {
            (_, None) => {
                into.insert(key.clone(), value.clone());
            }
            (Value::Object(fields), Some(Value::Object(into))) => add(fields, into),
            // The object is gone.
            _ => {}
        }
    }
}
