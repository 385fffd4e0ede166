//! JSON of clients. A field that the daemon does not know is refused: the client expects something
//! of it, and would not get that.

use dayfly_units::text::escaped;
use serde::de::DeserializeOwned;

/// Characters of a field's path that an error shows.
const PATH: usize = 200;

/// Why a client's JSON was refused.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// It is not valid JSON of its type.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// It has a field that its type does not have.
    #[error("{0}: no such field; GET /openapi.json lists the fields of each request")]
    Unknown(String),
}

/// Decodes JSON of a client.
///
/// # Errors
/// [`JsonError`].
pub fn decoded<T: DeserializeOwned>(json: &[u8]) -> Result<T, JsonError> {
    let mut decoder = serde_json::Deserializer::from_slice(json);
    let mut unknown = None;
    let value = serde_ignored::deserialize(&mut decoder, |path| {
        unknown.get_or_insert_with(|| escaped(&path.to_string(), PATH).to_string());
    })?;
    decoder.end()?;
    unknown.map_or(Ok(value), |path| Err(JsonError::Unknown(path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::{CreateRequest, RemoveManyRequest};

    fn refused(json: &str) -> String {
        decoded::<CreateRequest>(json.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn unknown_fields_are_named_at_any_depth() {
        let known = r#"{"source":{"snapshot":"s"},"network":{"closed":true}}"#;
        assert!(decoded::<CreateRequest>(known.as_bytes()).is_ok());
        let top = refused(r#"{"source":{"snapshot":"s"},"memroy":1}"#);
        assert!(top.starts_with("memroy: no such field; GET /openapi.json"), "{top}");
        let deep = refused(
            r#"{"source":{"snapshot":"s"},"network":{"publish":[{"host_port":1,
            "guest_port":2,"protocol\u001b[2J":"x"}]}}"#,
        );
        assert!(deep.starts_with("network.publish.0.protocol\\x1b[2J: no such"), "{deep}");
        let long = "x".repeat(5000);
        assert!(refused(&format!(r#"{{"source":{{"snapshot":"s"}},"{long}":1}}"#)).len() < 400);
    }

    #[test]
    fn what_follows_the_value_and_what_is_no_json_is_refused() {
        assert!(refused(r#"{"source":{"snapshot":"s"}} {}"#).contains("trailing"));
        assert!(refused("[").contains("EOF"));
        assert!(matches!(decoded::<RemoveManyRequest>(b""), Err(JsonError::Json(_))));
    }
}
