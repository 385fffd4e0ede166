//! Queries of clients. A parameter that the daemon does not know is refused, as in
//! [`crate::http::json`], and so is one without a value.

use crate::base::error::{ApiError, Outcome};
use dayfly_units::suggest::hint;
use dayfly_units::text::{SHORT, escaped};
use serde::de::value::Error;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};

/// The most parameters of a query.
pub const MOST: usize = 256;

/// Decodes a query. A field of type `Vec` may be given several times, every other at most once.
///
/// # Errors
/// An unknown name, with the known ones; a name without a value; a value that is not of its type.
pub fn decoded<T: DeserializeOwned>(query: &str) -> Outcome<T> {
    let known = names::<T>();
    let mut pairs = 0;
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        pairs += 1;
        if !known.contains(&&*name) {
            return Err(ApiError::invalid(unknown(&name, known)));
        }
        if value.is_empty() {
            return Err(ApiError::invalid(format_args!("{name}: expected a value, got none")));
        }
    }
    if pairs > MOST {
        return Err(ApiError::invalid(format_args!(
            "query: expected at most {MOST} parameters, got {pairs}"
        )));
    }
    let pairs = serde_html_form::Deserializer::new(form_urlencoded::parse(query.as_bytes()));
    serde_path_to_error::deserialize(pairs).map_err(|e| {
        let (name, e) = (e.path().to_string(), e.into_inner());
        ApiError::invalid(match e.to_string().as_str() {
            "unsupported value" => format!("{name}: expected one value, got several"),
            e if name == "." => e.to_owned(),
            e => format!("{name}: {e}"),
        })
    })
}

fn unknown(name: &str, known: &[&str]) -> String {
    let got = escaped(name, SHORT);
    if known.is_empty() {
        return format!("{got}: no such parameter; expected none");
    }
    let hint = hint(name, known.iter().copied());
    format!("{got}: no such parameter; expected some of {}{hint}", known.join(", "))
}

/// The names of the fields of `T`.
fn names<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // The error only ends the decoding.
    let _ = T::deserialize(Names(&mut names));
    names
}

/// Takes the names of the fields from a struct that decodes itself.
struct Names<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Names<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("only a struct has names"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        *self.0 = fields;
        Err(Error::custom("only the names are wanted"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Query {
        #[serde(default)]
        all: bool,
        #[serde(default)]
        label: Vec<String>,
        limit: Option<u32>,
    }

    fn refused(query: &str) -> String {
        decoded::<Query>(query).unwrap_err().to_string()
    }

    #[test]
    fn a_list_is_given_by_its_repeated_name() {
        let query: Query = decoded("all=true&label=a%3Db&label=c&limit=3").unwrap();
        let label = vec!["a=b".to_owned(), "c".to_owned()];
        assert_eq!(query, Query { all: true, label, limit: Some(3) });
        assert_eq!(decoded::<Query>("").unwrap().label, Vec::<String>::new());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let known = "expected some of all, label, limit";
        assert_eq!(
            refused("lable=x"),
            format!("lable: no such parameter; {known}; did you mean label?")
        );
        assert_eq!(refused("%1b[2J=x"), format!("\\x1b[2J: no such parameter; {known}"));
        assert_eq!(refused("label="), "label: expected a value, got none");
        assert_eq!(refused("all"), "all: expected a value, got none");
        assert_eq!(refused("all=true&all=true"), "all: expected one value, got several");
        assert!(refused("limit=-1").starts_with("limit: invalid digit"), "{}", refused("limit=-1"));
        assert!(refused("all=1").starts_with("all: "), "{}", refused("all=1"));
        assert!(refused(&"label=x&".repeat(MOST + 1)).contains("at most 256"));
    }
}
