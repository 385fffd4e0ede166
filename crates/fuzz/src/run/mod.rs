//! Running libFuzzer on targets.
//!
//! | module | concern |
//! |---|---|
//! | [`mod@process`] | one run: folders, arguments, the log |
//! | `dictionary` | words for libFuzzer to insert |
//! | [`output`] | what libFuzzer prints |
//! | [`summary`] | the figures of all runs, as a table and as JSON |
//! | [`minimise`] | small corpora for the repository |

mod dictionary;
pub mod minimise;
pub mod output;
pub mod process;
pub mod summary;

/// The environment variable that names the target of `dayfly-fuzz` when it is libFuzzer.
pub const TARGET: &str = "DAYFLY_FUZZ_TARGET";
/// The environment variable that plants faults.
pub const PLANTED: &str = "DAYFLY_FUZZ_PLANTED";
