//! Functions for the crate `fuzz`: lists of modules.

use crate::modules::needs;

/// The paths of `modules.dep`, each with the paths that it needs.
#[must_use]
pub fn modules_dep(text: &str) -> Vec<(String, Vec<String>)> {
    needs::parse(text).into_iter().collect()
}

/// The names of modules that a module says it needs.
#[must_use]
pub fn stated_needs(module: &[u8]) -> Vec<String> {
    needs::stated(module)
}
