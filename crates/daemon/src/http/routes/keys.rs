//! Says in the document which operations take an `Idempotency-Key` ([`crate::http::once`]).

use crate::http::once::OPERATIONS;
use crate::model::request_key::LONGEST;
use serde_json::{Value, json};

/// Adds the header, and the statuses that it may cause.
pub(super) fn describe(document: &mut Value) {
    let header = json!({
        "name": "Idempotency-Key",
        "in": "header",
        "description": "The same key with the same request gets the first answer, and the request \
            is carried out once. Kept for 24 hours; see docs/http-api.md.",
        "required": false,
        "schema": { "type": "string", "minLength": 1, "maxLength": LONGEST + 2,
            "pattern": "^(\"[!#-\\[\\]-~]{1,128}\"|[!#-\\[\\]-~]{1,128})$" },
    });
    let error = |why: &str| {
        json!({ "description": why, "content": { "application/json": {
            "schema": { "$ref": "#/components/schemas/ApiError" } } } })
    };
    for (path, _) in OPERATIONS {
        let operation = &mut document["paths"][path]["post"];
        if let Some(parameters) =
            operation.as_object_mut().map(|of| of.entry("parameters").or_insert(json!([])))
            && let Some(parameters) = parameters.as_array_mut()
        {
            parameters.push(header.clone());
        }
        let answers = operation["responses"].as_object_mut().into_iter();
        for answers in answers {
            answers.entry("400").or_insert_with(|| error(""));
            answers.entry("409").or_insert_with(|| error(""));
            answers.entry("422").or_insert_with(|| error(""));
        }
    }
}
