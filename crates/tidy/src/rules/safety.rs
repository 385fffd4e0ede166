//! Every `unsafe` block and `impl` has a SAFETY note. Clippy checks the notes themselves
//! (`undocumented_unsafe_blocks`); this rule checks that clippy is asked to, in every crate.

use toml::{Table, Value};

use crate::finding::{Finding, Rule};
use crate::tree::Tree;

const LINT: &str = "undocumented_unsafe_blocks";

/// Checks the workspace's lints, and that each crate takes them.
#[must_use]
pub fn check(tree: &Tree) -> Vec<Finding> {
    let get = |path: &str, keys: &[&str]| -> Option<Value> {
        let mut value = Value::Table(tree.text(path)?.parse::<Table>().ok()?);
        for key in keys {
            value = value.get(*key)?.clone();
        }
        Some(value)
    };
    let finding = |path: String, text: String| Finding { rule: Rule::Safety, path, line: 1, text };
    let mut findings = Vec::new();
    let level = get("Cargo.toml", &["workspace", "lints", "clippy", LINT]);
    if level.as_ref().and_then(Value::as_str) != Some("deny") {
        let text = format!("clippy's {LINT} is {level:?}, expected \"deny\"; set it");
        findings.push(finding("Cargo.toml".to_owned(), text));
    }
    for name in tree.crates() {
        let path = format!("crates/{name}/Cargo.toml");
        if get(&path, &["lints", "workspace"]) != Some(Value::Boolean(true)) {
            let text = "does not take the workspace's lints; write [lints] workspace = true";
            findings.push(finding(path, text.to_owned()));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tree::Tree;

    #[test]
    fn the_lint_is_denied_in_every_crate() {
        let workspace = "[workspace.lints.clippy]\nundocumented_unsafe_blocks = \"deny\"\n";
        let member = "[lints]\nworkspace = true\n";
        let count = |workspace: &str, member: &str| {
            check(&Tree::of(&[("Cargo.toml", workspace), ("crates/a/Cargo.toml", member)])).len()
        };
        assert_eq!(count(workspace, member), 0);
        assert_eq!(count(workspace, ""), 1);
        assert_eq!(count(&workspace.replace("deny", "warn"), member), 1);
        assert_eq!(count("", ""), 2);
    }
}
