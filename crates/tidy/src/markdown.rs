//! What rules ask of a Markdown document: headings, links, tables, and which lines are what.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::rust::lex::Lines;

/// A link or an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Where it leads, as written.
    pub target: String,
    /// Its line.
    pub line: usize,
}

/// A row of a table, without the head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// Heading that the table stands under.
    pub heading: String,
    /// Its line.
    pub line: usize,
    /// Text of each cell.
    pub cells: Vec<String>,
    /// Code spans of each cell.
    pub codes: Vec<Vec<String>>,
}

/// A document, read once.
#[derive(Debug, Default)]
pub struct Document {
    /// Anchors of all headings, as GitHub derives them.
    pub anchors: BTreeSet<String>,
    /// Links in the order of the text.
    pub links: Vec<Link>,
    /// Rows of all tables.
    pub rows: Vec<Row>,
    /// Lines of tables.
    pub tables: Vec<Range<usize>>,
    /// Lines of code blocks.
    pub blocks: Vec<Range<usize>>,
}

impl Document {
    /// Reads `text`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH;
        let mut reader = Reader { lines: Lines::of(text), ..Reader::default() };
        for (event, bytes) in Parser::new_ext(text, options).into_offset_iter() {
            reader.event(event, &bytes);
        }
        reader.document
    }

    /// Rows of the tables under the heading with exactly this text.
    pub fn rows_under(&self, heading: &str) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.heading == heading)
    }
}

#[derive(Debug)]
struct Reader {
    lines: Lines,
    document: Document,
    heading: Option<String>,
    last_heading: String,
    seen: BTreeMap<String, usize>,
    row: Option<Row>,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            lines: Lines::of(""),
            document: Document::default(),
            heading: None,
            last_heading: String::new(),
            seen: BTreeMap::new(),
            row: None,
        }
    }
}

impl Reader {
    fn event(&mut self, event: Event, bytes: &Range<usize>) {
        match event {
            Event::Start(tag) => self.start(&tag, bytes),
            Event::End(TagEnd::Heading(_)) => self.end_heading(),
            Event::End(TagEnd::TableRow) => self.document.rows.extend(self.row.take()),
            Event::Text(text) => self.text(&text, false),
            Event::Code(text) => self.text(&text, true),
            _ => {}
        }
    }

    fn start(&mut self, tag: &Tag, bytes: &Range<usize>) {
        let line = self.lines.line(bytes.start);
        let end = self.lines.line(bytes.end.saturating_sub(1)) + 1;
        match tag {
            Tag::Heading { .. } => self.heading = Some(String::new()),
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } => {
                self.document.links.push(Link { target: dest_url.to_string(), line });
            }
            Tag::Table(_) => self.document.tables.push(line..end),
            Tag::CodeBlock(_) => self.document.blocks.push(line..end),
            Tag::TableRow => {
                let heading = self.last_heading.clone();
                self.row = Some(Row { heading, line, ..Row::default() });
            }
            Tag::TableCell => {
                if let Some(row) = &mut self.row {
                    row.cells.push(String::new());
                    row.codes.push(Vec::new());
                }
            }
            _ => {}
        }
    }

    fn text(&mut self, text: &str, is_code: bool) {
        if let Some(heading) = &mut self.heading {
            heading.push_str(text);
        }
        if let Some(row) = &mut self.row {
            if let Some(cell) = row.cells.last_mut() {
                cell.push_str(text);
            }
            if let Some(codes) = row.codes.last_mut().filter(|_| is_code) {
                codes.push(text.to_owned());
            }
        }
    }

    fn end_heading(&mut self) {
        let Some(heading) = self.heading.take() else { return };
        let slug = slug(&heading);
        let count = self.seen.entry(slug.clone()).or_default();
        let anchor = if *count == 0 { slug } else { format!("{slug}-{count}") };
        *count += 1;
        self.document.anchors.insert(anchor);
        self.last_heading = heading;
    }
}

/// Lower case, blanks as dashes, no other punctuation than dashes and underscores.
fn slug(heading: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
    heading.to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::Document;

    #[test]
    fn headings_links_and_tables_are_read() {
        let text = "# A `b`: c\n\n[x](y.md#z) ![i](i.png)\n\n## T\n\n| h | i |\n|---|---|\n\
                    | `k` | l `m` |\n\n```\nwide\n```\n\n## T\n";
        let document = Document::parse(text);
        assert_eq!(document.anchors.iter().collect::<Vec<_>>(), ["a-b-c", "t", "t-1"]);
        let targets: Vec<&str> = document.links.iter().map(|link| link.target.as_str()).collect();
        assert_eq!(targets, ["y.md#z", "i.png"]);
        let row = document.rows_under("T").next().unwrap();
        assert_eq!(
            (row.line, row.cells.as_slice()),
            (9, ["k".to_owned(), "l m".to_owned()].as_slice())
        );
        assert_eq!(row.codes, [vec!["k".to_owned()], vec!["m".to_owned()]]);
        assert_eq!((document.tables[0].clone(), document.blocks[0].clone()), (7..10, 11..14));
    }
}
