//! Errors for people.

/// The texts of an error and its causes in one line, separated by `: `.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some errors include the text of their cause.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Failure {
        text: &'static str,
        #[source]
        source: std::io::Error,
    }

    #[test]
    fn a_cause_that_the_text_includes_is_not_repeated() {
        let failure = |text| Failure { text, source: std::io::Error::other("no route") };
        assert_eq!(chain(&failure("connecting")), "connecting: no route");
        assert_eq!(chain(&failure("connecting: no route")), "connecting: no route");
        assert_eq!(chain(&std::io::Error::other("alone")), "alone");
    }
}
