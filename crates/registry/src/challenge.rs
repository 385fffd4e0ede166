//! The header `WWW-Authenticate` (RFC 9110, 11.6.1): what a registry asks for.

use std::collections::BTreeMap;

/// Upper limit for the challenges of an answer, and for the parameters of one.
const MAX_PARTS: usize = 32;

/// A challenge, with its scheme and its parameter names in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// Such as `bearer` or `basic`.
    pub scheme: String,
    /// The parameters, without quotes. Of two with one name the first counts.
    pub parameters: BTreeMap<String, String>,
}

/// Reads one header. What follows a syntax error is ignored.
#[must_use]
pub fn parse(header: &str) -> Vec<Challenge> {
    let mut all: Vec<Challenge> = Vec::new();
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let Some((word, after)) = token(rest) else { return all };
        let spaced = after.trim_start_matches([' ', '\t']);
        // A token and `=` is a parameter of the last challenge; a token alone is a new scheme.
        match (spaced.strip_prefix('='), all.last_mut()) {
            (Some(value), Some(challenge)) => {
                let Some((value, after)) = value_of(value.trim_start_matches([' ', '\t'])) else {
                    return all;
                };
                if challenge.parameters.len() >= MAX_PARTS {
                    return all;
                }
                challenge.parameters.entry(word.to_ascii_lowercase()).or_insert(value);
                rest = after;
            }
            (Some(_), None) => return all,
            (None, _) => {
                if all.len() >= MAX_PARTS {
                    return all;
                }
                let scheme = word.to_ascii_lowercase();
                all.push(Challenge { scheme, parameters: BTreeMap::new() });
                rest = spaced;
            }
        }
    }
}

fn token(text: &str) -> Option<(&str, &str)> {
    let word = |b: &u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(b);
    let end = text.bytes().position(|b| !word(&b)).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// A token or a quoted string.
fn value_of(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        return token(text).map(|(word, rest)| (word.to_owned(), rest));
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shown(header: &str) -> String {
        let one = |c: &Challenge| {
            let pairs: Vec<String> = c.parameters.iter().map(|(k, v)| format!("{k}={v}")).collect();
            format!("{}({})", c.scheme, pairs.join(" "))
        };
        parse(header).iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn challenges_of_registries_are_read() {
        for (header, expected) in [
            (
                r#"Bearer realm="https://a/t",service="s",scope="repository:x:pull,push""#,
                "bearer(realm=https://a/t scope=repository:x:pull,push service=s)",
            ),
            (r#"Basic realm="a b""#, "basic(realm=a b)"),
            (r#"BASIC realm="q\"q" , Bearer Realm = x"#, "basic(realm=q\"q) bearer(realm=x)"),
            (r#"Negotiate, Basic realm="x""#, "negotiate() basic(realm=x)"),
            (r#"Bearer realm="a",realm="b""#, "bearer(realm=a)"),
            (r#"Bearer realm="open"#, "bearer()"),
            ("realm=x", ""),
            ("", ""),
            ("\u{e9}", ""),
        ] {
            assert_eq!(shown(header), expected, "{header}");
        }
    }

    proptest! {
        #[test]
        fn any_header_gives_bounded_challenges(header in "[A-Za-z=\", \\\\]{0,200}|.{0,200}") {
            let all = parse(&header);
            prop_assert!(all.len() <= MAX_PARTS);
            let parameters = all.iter().flat_map(|c| &c.parameters);
            let bytes: usize = parameters.map(|(k, v)| k.len() + v.len()).sum();
            prop_assert!(bytes <= header.len());
        }
    }
}
