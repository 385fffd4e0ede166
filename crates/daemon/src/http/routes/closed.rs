//! Says in the document that requests have no other fields than those it lists, because the daemon
//! refuses others ([`crate::http::json`]). Schemas of answers alone stay open, because later
//! versions add fields to them.

use serde_json::Value;
use std::collections::BTreeSet;

/// The heads of uploads, which are a part of the body.
const HEADS: [&str; 2] = ["ImageUpload", "KernelUpload"];
const SCHEMAS: &str = "#/components/schemas/";

/// The names of schemas below `value`.
fn named(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            let reference = fields.get("$ref").and_then(Value::as_str);
            into.extend(reference.and_then(|at| at.strip_prefix(SCHEMAS)).map(str::to_owned));
            fields.values().for_each(|value| named(value, into));
        }
        Value::Array(values) => values.iter().for_each(|value| named(value, into)),
        _ => {}
    }
}

/// The names of the schemas of requests, those within them included.
fn requested(document: &Value) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let paths = document["paths"].as_object().into_iter().flat_map(|paths| paths.values());
    let operations = paths.filter_map(Value::as_object).flat_map(|path| path.values());
    operations.for_each(|operation| named(&operation["requestBody"], &mut names));
    names.extend(HEADS.map(str::to_owned));
    let mut open: Vec<String> = names.iter().cloned().collect();
    while let Some(name) = open.pop() {
        let mut below = BTreeSet::new();
        named(&document["components"]["schemas"][name.as_str()], &mut below);
        open.extend(below.into_iter().filter(|name| names.insert(name.clone())));
    }
    names
}

/// Closes every object in `schema` that lists its fields.
fn close(schema: &mut Value) {
    if let Value::Object(fields) = schema {
        if fields.contains_key("properties") {
            fields.insert("additionalProperties".into(), false.into());
        }
        fields.values_mut().for_each(close);
    } else if let Value::Array(values) = schema {
        values.iter_mut().for_each(close);
    }
}

/// Closes the schemas of requests.
pub(super) fn requests(document: &mut Value) {
    for name in requested(document) {
        close(&mut document["components"]["schemas"][name.as_str()]);
    }
}
