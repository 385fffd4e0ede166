//! What a rule finds, and how it is printed.

use std::fmt;

/// Every rule whose findings are counted by file. Circles of files have another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// A crate imports a crate of its floor or of one above.
    CrateImport,
    /// The same of its dev-dependencies.
    DevImport,
    /// A file imports a file of a floor above it in the same crate.
    FolderImport,
    /// A file of a crate whose folders have floors is on none of them.
    NoFloor,
    /// A function is too long.
    Function,
    /// A file is long, and no reason is written.
    File,
    /// A file is longer than any reason allows.
    HugeFile,
    /// A line is too wide.
    Columns,
    /// A private word, or a phrase without a subject.
    Words,
    /// A page that no other page links.
    Page,
    /// A link that leads nowhere.
    Link,
    /// A crate for which clippy does not demand SAFETY notes.
    Safety,
}

impl Rule {
    /// All of them, in the order of the report.
    pub const ALL: [Self; 12] = [
        Self::CrateImport,
        Self::DevImport,
        Self::FolderImport,
        Self::NoFloor,
        Self::Function,
        Self::File,
        Self::HugeFile,
        Self::Columns,
        Self::Words,
        Self::Page,
        Self::Link,
        Self::Safety,
    ];

    /// Name in messages and in the baseline.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CrateImport => "crate-import",
            Self::DevImport => "dev-import",
            Self::FolderImport => "folder-import",
            Self::NoFloor => "no-floor",
            Self::Function => "function",
            Self::File => "file",
            Self::HugeFile => "huge-file",
            Self::Columns => "columns",
            Self::Words => "words",
            Self::Page => "page",
            Self::Link => "link",
            Self::Safety => "safety",
        }
    }
}

/// One place that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The rule that is broken.
    pub rule: Rule,
    /// File, relative to the root of the workspace.
    pub path: String,
    /// Line in it, from 1.
    pub line: usize,
    /// What there is, what the rule expects, and the next step.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: {}: {}", self.path, self.line, self.rule.name(), self.text)
    }
}
