//! `dayfly ps --format`: a table, JSON, or a line of chosen fields, as docker's templates.

use super::ps_cells::{from, ports, state};
use crate::output::{self, ago, rfc3339};
use anyhow::Result;
use dayfly_api::types::Vm;
use dayfly_units::Bytes;
use dayfly_units::text::{LONG, escaped};
use std::str::FromStr;

/// The format of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PsFormat {
    /// A table with the usual columns.
    Table,
    /// JSON, one object per line.
    Json,
    /// Chosen fields.
    Template(Template),
}

/// A line for each VM, with fields between text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// Whether columns, which tabs separate, are aligned below their names.
    table: bool,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    /// An index into [`FIELDS`].
    Field(usize),
    Label(String),
    Json,
}

type Show = fn(&Vm, &[Vm]) -> String;

/// Names of fields, the headers of their columns, and what they show.
const FIELDS: [(&str, &str, Show); 17] = [
    ("ID", "VM ID", |vm, _| vm.id.to_string()),
    ("Name", "NAME", |vm, _| vm.name.to_string()),
    ("Names", "NAMES", |vm, _| vm.name.to_string()),
    ("State", "STATE", |vm, _| state(vm)),
    ("Status", "STATUS", |vm, _| state(vm)),
    ("From", "FROM", from),
    ("Image", "IMAGE", |vm, _| vm.image.to_string()),
    ("Kernel", "KERNEL", |vm, _| vm.kernel.to_string()),
    ("CPUs", "CPUS", |vm, _| vm.vcpus.to_string()),
    ("Memory", "MEMORY", |vm, _| Bytes(vm.memory_bytes).to_string()),
    ("Address", "ADDRESS", |vm, _| {
        vm.network.as_ref().map_or_else(String::new, |network| network.address.to_string())
    }),
    ("Ports", "PORTS", |vm, _| ports(vm)),
    ("Labels", "LABELS", |vm, _| labels(vm)),
    ("CreatedAt", "CREATED AT", |vm, _| rfc3339(vm.created_unix_ms)),
    ("RunningFor", "CREATED", |vm, _| ago(vm.created_unix_ms)),
    ("EndsAt", "ENDS AT", |vm, _| vm.ends_unix_ms.map_or_else(String::new, rfc3339)),
    ("Problem", "PROBLEM", |vm, _| vm.problem.clone().unwrap_or_default()),
];

/// The labels of a VM: `a=1,b=2`.
fn labels(vm: &Vm) -> String {
    let labels = vm.labels.iter().map(|(key, value)| format!("{key}={value}"));
    labels.collect::<Vec<_>>().join(",")
}

impl FromStr for PsFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "table" => return Ok(Self::Table),
            "json" => return Ok(Self::Json),
            _ => {}
        }
        let (table, line) = match text.strip_prefix("table ") {
            Some(line) => (true, line),
            None => (false, text),
        };
        let pieces = pieces(line)?;
        if pieces.iter().all(|piece| matches!(piece, Piece::Text(_))) {
            let names = FIELDS.map(|(name, ..)| name).join(", ");
            return Err(format!(
                "expected table, json, or a line with fields such as '{{{{.ID}}}} {{{{.Name}}}}'; \
                 fields: {names}, Label \"KEY\"; {{{{json .}}}} is all of them"
            ));
        }
        Ok(Self::Template(Template { table, pieces }))
    }
}

/// The pieces of a line.
fn pieces(line: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("{{") {
        pieces.push(Piece::Text(unescaped(before)));
        let (inner, behind) = after
            .split_once("}}")
            .ok_or_else(|| format!("expected }}}} after {{{{{after}, got the end"))?;
        pieces.push(piece(inner.trim())?);
        rest = behind;
    }
    pieces.push(Piece::Text(unescaped(rest)));
    pieces.retain(|piece| *piece != Piece::Text(String::new()));
    Ok(pieces)
}

/// What is between the braces.
fn piece(inner: &str) -> Result<Piece, String> {
    if inner == "json ." {
        return Ok(Piece::Json);
    }
    let label = inner.strip_prefix(".Label ").map(str::trim);
    let quoted = label.and_then(|key| key.strip_prefix('"')?.strip_suffix('"'));
    if let Some(key) = quoted.filter(|key| !key.is_empty()) {
        return Ok(Piece::Label(key.to_owned()));
    }
    let name = inner.strip_prefix('.').unwrap_or_default();
    let field = FIELDS.iter().position(|(known, ..)| *known == name);
    field.map(Piece::Field).ok_or_else(|| {
        let names = FIELDS.map(|(name, ..)| name).join(", ");
        format!("{inner:?}: expected . and one of {names}; or .Label \"KEY\", or json .")
    })
}

/// Text with docker's escapes of tab and line break.
fn unescaped(text: &str) -> String {
    text.replace("\\t", "\t").replace("\\n", "\n")
}

impl Template {
    fn line(&self, vm: &Vm, known: &[Vm]) -> Result<String> {
        let mut line = String::new();
        for piece in &self.pieces {
            let shown = match piece {
                Piece::Text(text) => {
                    line += text;
                    continue;
                }
                Piece::Field(field) => {
                    FIELDS.get(*field).map_or_else(String::new, |f| f.2(vm, known))
                }
                Piece::Label(key) => vm.labels.get(key).cloned().unwrap_or_default(),
                Piece::Json => {
                    line += output::json_line(vm)?.trim_end();
                    continue;
                }
            };
            // No line break or tab of a value makes another row or column.
            line += &escaped(&shown, LONG).to_string();
        }
        Ok(line)
    }

    fn header(&self) -> String {
        let name = |piece: &Piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Field(field) => FIELDS.get(*field).map_or("", |(_, name, _)| *name).to_owned(),
            Piece::Label(key) => key.clone(),
            Piece::Json => "VM".to_owned(),
        };
        self.pieces.iter().map(name).collect()
    }

    /// The text for these VMs; `known` has the names of VMs that were forked.
    ///
    /// # Errors
    /// A VM cannot be encoded as JSON.
    pub fn text(&self, vms: &[Vm], known: &[Vm]) -> Result<String> {
        let lines = vms.iter().map(|vm| self.line(vm, known)).collect::<Result<Vec<_>>>()?;
        if !self.table {
            return Ok(lines.iter().map(|line| format!("{line}\n")).collect());
        }
        let header = self.header();
        let rows: Vec<Vec<&str>> =
            [&header].into_iter().chain(&lines).map(|line| line.split('\t').collect()).collect();
        let width = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let mut text = String::new();
        for row in &rows {
            let cells = row.iter().enumerate().map(|(n, cell)| format!("{cell:<0$}   ", width(n)));
            text += cells.collect::<String>().trim_end();
            text.push('\n');
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str) -> Vm {
        serde_json::from_value(serde_json::json!({
            "id": "0123456789ab", "name": name, "state": "running", "exit": null,
            "snapshot": "web", "image": "debian", "kernel": "6.12", "vcpus": 2,
            "memory_bytes": 1 << 28, "created_unix_ms": 1_700_000_000_123_u64, "ready_us": null,
            "ephemeral": false, "labels": {"tier": "front\n\t\u{1b}[2J", "team": "a"},
        }))
        .expect("a VM")
    }

    fn shown(format: &str) -> String {
        let PsFormat::Template(template) = format.parse().expect("a format") else {
            panic!("{format}: no template")
        };
        let vms = [vm("a"), vm("longer")];
        template.text(&vms, &vms).expect("a text")
    }

    #[test]
    fn fields_are_shown_between_text() {
        assert_eq!(shown("{{.Name}}={{ .State }}"), "a=running\nlonger=running\n");
        assert_eq!(shown("{{.ID}}").lines().next(), Some("0123456789ab"));
        assert_eq!(shown("{{.CreatedAt}}").lines().next(), Some("2023-11-14T22:13:20.123Z"));
        assert_eq!(
            shown(r#"table {{.Name}}\t{{.CPUs}}\t{{.Label "team"}}"#),
            "NAME     CPUS   team\na        2      a\nlonger   2      a\n"
        );
        let labels = shown("{{.Labels}}|{{.Label \"none\"}}");
        assert_eq!(labels.lines().next(), Some(r"team=a,tier=front\n\t\x1b[2J|"));
        let json = shown("{{json .}}");
        let first: Vm = serde_json::from_str(json.lines().next().unwrap()).unwrap();
        assert_eq!(first, vm("a"));
    }

    #[test]
    fn what_is_no_format_is_refused_with_the_fields() {
        assert_eq!("table".parse(), Ok(PsFormat::Table));
        assert_eq!("json".parse(), Ok(PsFormat::Json));
        for (text, says) in [
            ("yaml", "expected table, json, or a line with fields"),
            ("", "RunningFor"),
            ("{{.Nmae}}", "\".Nmae\": expected . and one of ID, Name"),
            ("{{.ID", "expected }} after {{.ID, got the end"),
            ("{{.Label}}", "or .Label \"KEY\""),
        ] {
            let error = text.parse::<PsFormat>().expect_err("an error");
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
