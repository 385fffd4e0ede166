//! Says in the document what the types of the handlers cannot say: ranges, forms, and the refusals
//! that every operation shares. `scripts/schemathesis` holds the daemon against it.

use crate::base::config::{MEMORY_BYTES, MEMORY_STEP_BYTES};
use crate::base::group_limits::{
    LEAST_IO_BYTES, LEAST_IO_REQUESTS, LEAST_MEMORY_BYTES, LEAST_PIDS, MILLICPUS, MOST_PIDS,
    WEIGHTS,
};
use crate::http::query;
use crate::model::filter;
use crate::ops::expiry::MAX_TTL_MS;
use dayfly_api::types::{MAX_PICTURE_WIDTH, MAX_VOLUMES};
use serde_json::{Value, json};
use std::ops::RangeInclusive;

const NAME: &str = "^[a-z0-9][a-z0-9._-]{0,62}$";
/// A name without a dot that is neither reserved nor in the form of an id.
const VM_NAME: &str = "^(?!localhost$)(?![0-9a-f]{12}$)[a-z0-9][a-z0-9_-]{0,62}$";
const TOKEN: &str = "^[0-9a-fA-F]{32}$";

/// Limits of schemas (`Name`) and of their properties (`Publish.host_port`).
fn of_schemas() -> Vec<(&'static str, Value)> {
    let u16 = |least: u16| json!({ "minimum": least, "maximum": u16::MAX });
    let memory = json!({
        "minimum": MEMORY_BYTES.start(), "maximum": MEMORY_BYTES.end(),
        "multipleOf": MEMORY_STEP_BYTES,
    });
    let init = json!({ "pattern": r#"^/[^\s\x00-\x1f\x7f"]*$"# });
    let egress = json!({ "minLength": 1 });
    let vcpus = json!({ "minimum": 1, "maximum": 16 });
    let range = |of: RangeInclusive<u32>| json!({ "minimum": of.start(), "maximum": of.end() });
    // One vCPU, at least.
    let pids = range(LEAST_PIDS + 1..=MOST_PIDS);
    let least = |least: u64| json!({ "minimum": least, "maximum": u64::MAX });
    vec![
        ("Name", json!({ "pattern": NAME })),
        ("VmName", json!({ "pattern": VM_NAME })),
        ("VmId", json!({ "pattern": "^[0-9a-f]{12}$" })),
        ("BakeRequest.memory_bytes", memory.clone()),
        ("BakeRequest.vcpus", vcpus.clone()),
        ("BakeRequest.init", init.clone()),
        ("BakeRequest.egress", egress.clone()),
        ("BootSource.memory_bytes", memory),
        ("BootSource.vcpus", vcpus.clone()),
        ("CreateRequest.vcpus", vcpus.clone()),
        ("CreateManyRequest.vcpus", vcpus),
        ("BootSource.init", init),
        ("EgressRequest.egress", egress.clone()),
        ("ForkRequest.egress", egress.clone()),
        ("NetworkRequest.egress", egress),
        ("CreateManyRequest.count", json!({ "minimum": 1, "maximum": 4096 })),
        ("ForkRequest.count", json!({ "maximum": 4096 })),
        ("RemoveManyRequest.vms", json!({ "minItems": 1, "maxItems": 4096 })),
        ("NetworkRequest.publish", json!({ "maxItems": 256 })),
        ("ForkRequest.publish", json!({ "maxItems": 256 })),
        ("Publish.host_port", u16(0)),
        ("Publish.guest_port", u16(1)),
        ("CreateRequest.volumes", json!({ "maxItems": MAX_VOLUMES })),
        ("CreateManyRequest.volumes", json!({ "maxItems": MAX_VOLUMES })),
        ("VolumeRequest.target", json!({ "pattern": "^/", "maxLength": 4095 })),
        ("VolumeOffer.token", json!({ "pattern": TOKEN })),
        ("WindowSize.rows", u16(0)),
        ("WindowSize.cols", u16(0)),
        ("Lifetime.ttl_ms", json!({ "minimum": 1, "maximum": MAX_TTL_MS })),
        ("TtlRequest.ttl_ms", json!({ "minimum": 1, "maximum": MAX_TTL_MS })),
        ("VmLimits.cpu_max_millicpus", range(MILLICPUS)),
        ("VmLimits.cpu_weight", range(WEIGHTS)),
        ("VmLimits.memory_max_bytes", least(LEAST_MEMORY_BYTES)),
        ("VmLimits.pids_max", pids),
        ("VmLimits.cpus_booked", range(1..=8192)),
        ("IoMax", json!({ "minProperties": 1 })),
        ("IoMax.read_bytes_per_s", least(LEAST_IO_BYTES)),
        ("IoMax.write_bytes_per_s", least(LEAST_IO_BYTES)),
        ("IoMax.reads_per_s", least(LEAST_IO_REQUESTS)),
        ("IoMax.writes_per_s", least(LEAST_IO_REQUESTS)),
        ("TtlRequest", json!({ "required": ["ttl_ms"] })),
    ]
}

/// Limits of parameters, by place and name.
fn of_parameters() -> Vec<(&'static str, &'static str, Value)> {
    vec![
        ("path", "name", json!({ "pattern": NAME })),
        ("path", "vm", json!({ "minLength": 1 })),
        ("path", "program", json!({ "minLength": 1 })),
        ("path", "token", json!({ "pattern": TOKEN })),
        ("path", "stream", json!({ "pattern": TOKEN })),
        ("path", "port", json!({ "minimum": 1, "maximum": u32::MAX })),
        ("query", "width", json!({ "minimum": 1, "maximum": MAX_PICTURE_WIDTH })),
        ("query", "max_output_bytes", json!({ "maximum": 4 << 20 })),
        ("query", "path", json!({ "minLength": 1 })),
        ("query", "program", json!({ "minLength": 1 })),
        ("query", "cursor", json!({ "pattern": "^[A-Za-z0-9_-]+$" })),
        ("query", "vm", json!({ "minLength": 1 })),
        ("query", "kind", json!({ "minLength": 1 })),
    ]
}

/// Adds the fields of `more` to an object.
fn merge(schema: &mut Value, more: &Value) {
    if let (Some(schema), Some(more)) = (schema.as_object_mut(), more.as_object()) {
        schema.extend(more.clone());
    }
}

/// Gives integers without a sign the range of their type.
fn ranges(value: &mut Value) {
    if let Value::Object(fields) = value {
        if fields.get("minimum") == Some(&json!(0)) && !fields.contains_key("maximum") {
            let range = match fields.get("format").and_then(Value::as_str) {
                Some("int32") => Some(("uint32", u64::from(u32::MAX))),
                Some("int64") => Some(("uint64", u64::MAX)),
                _ => None,
            };
            if let Some((format, maximum)) = range {
                fields.insert("format".into(), format.into());
                fields.insert("maximum".into(), maximum.into());
            }
        }
        fields.values_mut().for_each(ranges);
    } else if let Value::Array(values) = value {
        values.iter_mut().for_each(ranges);
    }
}

/// Lists of a query have bounded values.
fn bound_list(schema: &mut Value) {
    if schema["type"] == "array" {
        merge(schema, &json!({ "maxItems": query::MOST }));
        if schema["items"]["type"] == "string" {
            merge(&mut schema["items"], &json!({ "minLength": 1, "maxLength": filter::LONGEST }));
        }
    }
}

/// Adds the limits.
pub(super) fn describe(document: &mut Value) {
    for (at, limit) in of_schemas() {
        let (schema, property) = at.split_once('.').unwrap_or((at, ""));
        let schema = &mut document["components"]["schemas"][schema];
        merge(
            if property.is_empty() { schema } else { &mut schema["properties"][property] },
            &limit,
        );
    }
    ranges(document);
    let paths = document["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    let operations = paths.filter_map(Value::as_object_mut).flat_map(|path| path.values_mut());
    for operation in operations {
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
        let parameters = parameters.into_iter().flatten();
        for parameter in parameters {
            let (place, name) = (parameter["in"].clone(), parameter["name"].clone());
            if place == "query" {
                bound_list(&mut parameter["schema"]);
            }
            for (of_place, of_name, limit) in of_parameters() {
                if place == of_place && name == of_name {
                    merge(&mut parameter["schema"], &limit);
                }
            }
        }
        requests(operation);
        operation.pointer_mut("/requestBody/content").into_iter().for_each(binary);
        let answers = operation.get_mut("responses").and_then(Value::as_object_mut);
        for (_, answer) in answers.into_iter().flatten() {
            answer.get_mut("content").into_iter().for_each(binary);
        }
    }
}

/// Gives bodies that are neither JSON nor text the schema of bytes.
fn binary(content: &mut Value) {
    for (kind, body) in content.as_object_mut().into_iter().flatten() {
        if ["application/octet-stream", "application/x-tar", "image/png"].contains(&kind.as_str()) {
            body["schema"] = json!({ "type": "string", "format": "binary" });
        }
    }
}

/// Documents the refusal of a request, and mends what utoipa says of its body.
fn requests(operation: &mut Value) {
    let at = "/requestBody/content/application~1json/schema";
    let optional = operation.pointer(at).and_then(|schema| schema["oneOf"].get(0)).cloned();
    if let (Some(of), Some(schema)) = (optional, operation.pointer_mut(at)) {
        *schema = of;
        operation["requestBody"]["required"] = false.into();
    }
    if operation.get("requestBody").is_none() && operation.get("parameters").is_none() {
        return;
    }
    let error = json!({ "description": "the request is refused", "content": {
        "application/json": { "schema": { "$ref": "#/components/schemas/ApiError" } } } });
    let in_query = |parameter: &Value| parameter["in"] == "query";
    let has_query = operation["parameters"].as_array().is_some_and(|all| all.iter().any(in_query));
    if let Some(answers) = operation["responses"].as_object_mut() {
        answers.entry("400").or_insert(error);
        if has_query {
            // From the HTTP library, which reads at most 64 KiB of a request's first line.
            answers
                .insert("414".into(), json!({ "description": "the path and query are too long" }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_units::{Name, VmName};

    fn document() -> Value {
        serde_json::from_str(&super::super::document().unwrap()).unwrap()
    }

    #[test]
    fn each_limit_is_of_something_in_the_document() {
        let document = document();
        for (at, limit) in of_schemas() {
            let (schema, property) = at.split_once('.').unwrap_or((at, ""));
            let schema = &document["components"]["schemas"][schema];
            let found = if property.is_empty() { schema } else { &schema["properties"][property] };
            assert!(found.get("type").is_some(), "{at}: {found}");
            for (key, value) in limit.as_object().unwrap() {
                assert_eq!(found[key], *value, "{at}: {key}");
            }
        }
        let text = document["paths"].to_string();
        for (_, name, _) in of_parameters() {
            assert!(text.contains(&format!(r#""name":"{name}""#)), "{name}");
        }
        let gc = &document["paths"]["/v1/store/gc"]["post"]["requestBody"];
        assert_eq!(
            gc["content"]["application/json"]["schema"]["$ref"],
            "#/components/schemas/CollectRequest"
        );
        assert_eq!(gc["required"], false);
    }

    #[test]
    fn the_documented_names_are_the_accepted_ones() {
        let (name, vm) = (regex::Regex::new(NAME).unwrap(), "[a-z0-9][a-z0-9_-]{0,62}");
        let vm = regex::Regex::new(&format!("^{vm}$")).unwrap();
        let long = "a".repeat(64);
        for text in ["a", "0", "a.b", "-a", "a_b-c", "A", "", "ä", "a b", &long, &long[1..]] {
            assert_eq!(name.is_match(text), text.parse::<Name>().is_ok(), "{text}");
            assert_eq!(vm.is_match(text), text.parse::<VmName>().is_ok(), "{text}");
        }
        assert!("localhost".parse::<VmName>().is_err() && VM_NAME.contains("localhost"));
    }
}
