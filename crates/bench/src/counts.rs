//! Counts on the command line: a median of nothing would be a figure that was not measured.

use clap::builder::RangedU64ValueParser;

/// A count of samples.
pub fn at_least(least: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..)
}

#[cfg(test)]
mod tests {
    use crate::Options;
    use clap::Parser;

    #[test]
    fn nothing_is_no_sample_and_one_has_no_spread() {
        let births = |count| Options::try_parse_from(["dayfly-bench", "birth", "--births", count]);
        assert!(births("1").is_ok());
        for bad in ["0", "-1", "", "x"] {
            assert!(births(bad).is_err(), "{bad}");
        }
        let rounds = ["dayfly-bench", "scale", "--rounds", "1"];
        let error = Options::try_parse_from(rounds).unwrap_err().to_string();
        assert!(error.contains("2.."), "{error}");
    }
}
