//! A server's answer: parsed, filtered, and written again for a guest (RFC 1035, 4; RFC 3597).
//!
//! ```text
//! server's bytes ──parse──▶ Answer (names as nodes, records) ──filter──▶ ──write──▶ guest's bytes
//! ```
//!
//! The name that begins at an offset of a message never changes. So each offset is decoded once and
//! remembered as a node of a tree whose root is the DNS root. A name that points to a known offset
//! takes no more work than its own bytes, however many names point there. That bounds the work
//! below [`MAX_VISITS_PER_BYTE`] times the message's length; a counter also enforces the bound.
//!
//! [`chain`] follows aliases to the addresses of the name in question.
//!
//! A guest gets the answer section except addresses that it may not reach, and the records of the
//! authority section that prove a negative answer. The additional section is left out.

use crate::net::names::addresses::{refused_v4, refused_v6};
use crate::net::names::message::{
    self, HEADER_BYTES, Head, IN, MAX_LABEL_BYTES, MAX_NAME_BYTES, Query, Reader, kind, rcode,
};
use ipnet::Ipv4Net;

#[path = "chain.rs"]
mod chain;

/// Maximum number of reads per byte of a message, on average; a message that needs more is refused.
pub const MAX_VISITS_PER_BYTE: usize = 4;
/// Maximum bytes of a message over TCP (RFC 1035, 4.2.2).
pub const MAX_TCP_BYTES: usize = 65_535;
/// Compression pointers only reach offsets below this (RFC 1035, 4.1.4).
const POINTERS_END: usize = 0x4000;

/// Why an answer is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// The answer belongs to another question, or is none. The right answer may still come.
    #[error("not an answer to this question")]
    Other,
    /// The message is truncated, or its lengths or names are inconsistent.
    #[error("a malformed answer")]
    Form,
    /// Parsing exceeds the permitted number of reads.
    #[error("an answer with more than {MAX_VISITS_PER_BYTE} visits a byte")]
    Work,
}

/// An index into the tree of names; 0 is the root.
type Node = usize;

/// A label of a message, with the rest of its name.
#[derive(Debug, Clone, Copy)]
struct Label {
    /// The offset of the label's length byte.
    at: usize,
    /// The node of the name without this label.
    parent: Node,
    /// Bytes of the whole name, uncompressed.
    bytes: usize,
}

/// All decoded names of a message.
#[derive(Debug)]
struct Names {
    labels: Vec<Label>,
    /// For each offset of the message: the node of the name that begins there plus 1, or 0 if not
    /// decoded.
    known: Vec<u32>,
}

impl Names {
    fn new(length: usize) -> Self {
        let root = Label { at: 0, parent: 0, bytes: 1 };
        Self { labels: vec![root], known: vec![0; length] }
    }

    fn node(&self, at: usize) -> Option<Node> {
        (*self.known.get(at)? as usize).checked_sub(1)
    }

    fn know(&mut self, at: usize, node: Node) {
        // A message has fewer than 2^16 offsets, and each adds at most one node.
        self.known[at] = u32::try_from(node + 1).unwrap_or(u32::MAX);
    }

    /// Decodes the name at the reader's offset, and moves the reader behind it.
    fn read(&mut self, reader: &mut Reader<'_>) -> Result<Node, Bad> {
        // Offsets whose names will be known, the outermost first; true for labels, false for
        // pointers.
        let mut open: Vec<(usize, bool)> = Vec::new();
        let mut end = None;
        // A pointer must lead to before the piece that it ends, so there is no loop.
        let mut piece = reader.at;
        let mut node = loop {
            let at = reader.at;
            if let Some(node) = self.node(at) {
                // The first piece is read label by label to find its end. After a pointer, a known
                // name ends the loop.
                if end.is_some() {
                    break node;
                }
            }
            match usize::from(reader.byte().ok_or(Bad::Form)?) {
                0 => {
                    end.get_or_insert(reader.at);
                    break 0;
                }
                length @ 1..=MAX_LABEL_BYTES => {
                    reader.take(length).ok_or(Bad::Form)?;
                    open.push((at, true));
                }
                first @ 0xc0.. => {
                    let target = (first & 0x3f) << 8 | usize::from(reader.byte().ok_or(Bad::Form)?);
                    end.get_or_insert(reader.at);
                    if target >= piece || target < HEADER_BYTES {
                        return Err(Bad::Form);
                    }
                    open.push((at, false));
                    (piece, reader.at) = (target, target);
                }
                _ => return Err(Bad::Form),
            }
            if reader.visits > reader.bytes.len() * MAX_VISITS_PER_BYTE {
                return Err(Bad::Work);
            }
        };
        while let Some((at, is_label)) = open.pop() {
            if is_label {
                let bytes = self.labels[node].bytes + 1 + usize::from(reader.bytes[at]);
                if bytes > MAX_NAME_BYTES {
                    return Err(Bad::Form);
                }
                node = match self.node(at) {
                    Some(node) => node,
                    None => {
                        self.labels.push(Label { at, parent: node, bytes });
                        self.labels.len() - 1
                    }
                };
            }
            self.know(at, node);
        }
        reader.at = end.unwrap_or(reader.at);
        Ok(node)
    }
}

/// A record's data: bytes of the message, names, and bytes again.
#[derive(Debug, Clone, Copy)]
struct Data {
    before: (usize, usize),
    names: [Option<Node>; 2],
    after: (usize, usize),
    /// Whether the names may be compressed (only in types of RFC 1035).
    compress: bool,
}

#[derive(Debug)]
struct Record {
    owner: Node,
    kind: u16,
    ttl_seconds: u32,
    data: Data,
}

/// A server's answer, without the records that a guest does not get.
#[derive(Debug)]
pub struct Answer<'a> {
    bytes: &'a [u8],
    reach: &'a [Ipv4Net],
    names: Names,
    /// The first `answers` records are of the answer section, the others of the authority section.
    records: Vec<Record>,
    answers: u16,
    /// The response code (four bits of RFC 1035).
    pub rcode: u16,
    /// The TC bit: the server's answer did not fit.
    pub truncated: bool,
    /// Number of addresses left out, because a guest may not reach them.
    pub refused: usize,
    question: Node,
}

/// The layout of a type's data: bytes before the names, number of names, bytes after the names, and
/// whether the names may be compressed, which only types of RFC 1035 may (RFC 3597, 4).
const fn layout(kind: u16) -> Option<(usize, usize, usize, bool)> {
    Some(match kind {
        // NS, MD, MF, CNAME, MB, MG, MR, PTR
        2..=5 | 7..=9 | 12 => (0, 1, 0, true),
        kind::SOA => (0, 2, 20, true),
        // MINFO, MX
        14 => (0, 2, 0, true),
        15 => (2, 1, 0, true),
        // RP; AFSDB, RT, KX; PX; SRV; DNAME
        17 => (0, 2, 0, false),
        18 | 21 | 36 => (2, 1, 0, false),
        26 => (2, 2, 0, false),
        33 => (6, 1, 0, false),
        39 => (0, 1, 0, false),
        _ => return None,
    })
}

/// Parses the answer to `query`, which was sent with this `id`, for a guest that reaches public
/// addresses and `reach`. Adds the number of byte reads to `visits`.
///
/// # Errors
/// [`Bad`].
pub fn parse<'a>(
    bytes: &'a [u8],
    query: &Query,
    id: u16,
    reach: &'a [Ipv4Net],
    visits: &mut usize,
) -> Result<Answer<'a>, Bad> {
    let mut reader = Reader::new(bytes);
    let read = read(&mut reader, query, id, reach);
    *visits += reader.visits;
    read
}

fn read<'a>(
    reader: &mut Reader<'a>,
    query: &Query,
    id: u16,
    reach: &'a [Ipv4Net],
) -> Result<Answer<'a>, Bad> {
    let bytes = reader.bytes;
    let mut words = [0; 6];
    for word in &mut words {
        *word = reader.word().ok_or(Bad::Other)?;
    }
    let [got, flags, questions, answers, authorities, additional] = words;
    // The QR bit, and the opcode QUERY.
    if got != id || flags & 0xf800 != 0x8000 || questions > 1 {
        return Err(Bad::Other);
    }
    let mut answer = Answer {
        bytes,
        reach,
        names: Names::new(bytes.len()),
        records: Vec::new(),
        answers: 0,
        rcode: flags & message::RCODE,
        truncated: flags & message::TRUNCATED != 0,
        refused: 0,
        question: 0,
    };
    if questions == 1 {
        let asked = &query.question;
        let name = reader.take(asked.name.wire().len()).ok_or(Bad::Other)?;
        let same = asked.name.is(name)
            && reader.word() == Some(asked.kind)
            && reader.word() == Some(asked.class);
        if !same {
            return Err(Bad::Other);
        }
        let end = std::mem::replace(&mut reader.at, HEADER_BYTES);
        answer.question = answer.names.read(reader)?;
        reader.at = end;
    } else if answer.rcode == rcode::NOERROR || answers > 0 {
        // Some servers omit the question in a failure.
        return Err(Bad::Other);
    }
    // A truncated message may be cut anywhere (RFC 2181, 9).
    if answer.truncated {
        return Ok(answer);
    }
    for _ in 0..answers {
        if answer.record(reader, true)? {
            answer.answers += 1;
        }
    }
    for _ in 0..authorities {
        answer.record(reader, false)?;
    }
    for _ in 0..additional {
        answer.additional(reader)?;
    }
    Ok(answer)
}

impl Answer<'_> {
    /// Reads a record, and keeps it if a guest gets it. Returns whether it was kept.
    fn record(&mut self, reader: &mut Reader<'_>, answers: bool) -> Result<bool, Bad> {
        let owner = self.names.read(reader)?;
        let fixed = (reader.word(), reader.word(), reader.long(), reader.word());
        let (Some(kind), Some(class), Some(ttl_seconds), Some(length)) = fixed else {
            return Err(Bad::Form);
        };
        let start = reader.at;
        let end = start + usize::from(length);
        if end > reader.bytes.len() {
            return Err(Bad::Form);
        }
        let wanted = answers || matches!(kind, kind::SOA | kind::RRSIG | kind::NSEC | kind::NSEC3);
        if class != IN || kind == kind::OPT || !wanted {
            reader.at = end;
            return Ok(false);
        }
        let data = self.data(reader, kind, end)?;
        if self.is_refused(reader, kind, start, end)? {
            self.refused += 1;
            return Ok(false);
        }
        self.records.push(Record { owner, kind, ttl_seconds, data });
        Ok(true)
    }

    fn data(&mut self, reader: &mut Reader<'_>, kind: u16, end: usize) -> Result<Data, Bad> {
        let start = reader.at;
        let Some((before, count, after, compress)) = layout(kind) else {
            reader.at = end;
            let none = (end, end);
            return Ok(Data {
                before: (start, end),
                names: [None; 2],
                after: none,
                compress: false,
            });
        };
        reader.take(before).ok_or(Bad::Form)?;
        let mut names = [None; 2];
        for name in names.iter_mut().take(count) {
            *name = Some(self.names.read(reader)?);
        }
        let names_end = reader.at;
        reader.take(after).ok_or(Bad::Form)?;
        if reader.at != end {
            return Err(Bad::Form);
        }
        Ok(Data { before: (start, start + before), names, after: (names_end, end), compress })
    }

    /// Whether the record is or contains an address that a guest may not reach.
    fn is_refused(
        &self,
        reader: &mut Reader<'_>,
        kind: u16,
        start: usize,
        end: usize,
    ) -> Result<bool, Bad> {
        let data = self.bytes.get(start..end).ok_or(Bad::Form)?;
        if !matches!(kind, kind::A | kind::AAAA | kind::SVCB | kind::HTTPS) {
            return Ok(false);
        }
        reader.visits += data.len();
        let refused = match kind {
            kind::A => data.try_into().ok().map(|ip: [u8; 4]| refused_v4(ip.into(), self.reach)),
            kind::AAAA => data.try_into().ok().map(|ip: [u8; 16]| refused_v6(ip.into())),
            _ => hints_refused(data, self.reach),
        };
        refused.ok_or(Bad::Form)
    }

    /// Only an OPT record matters: it holds the upper bits of the response code.
    fn additional(&mut self, reader: &mut Reader<'_>) -> Result<(), Bad> {
        let owner = self.names.read(reader)?;
        let fixed = (reader.word(), reader.word(), reader.long(), reader.word());
        let (Some(kind), Some(_), Some(ttl), Some(length)) = fixed else { return Err(Bad::Form) };
        reader.at += usize::from(length);
        if reader.at > reader.bytes.len() {
            return Err(Bad::Form);
        }
        if owner == 0 && kind == kind::OPT && ttl >> 24 != 0 {
            // Such a code concerns this service's OPT record, not the guest's question.
            self.rcode = rcode::SERVFAIL;
        }
        Ok(())
    }

    /// Writes the answer for the guest. If it exceeds `limit` bytes, it is truncated, and the guest
    /// asks again over TCP.
    #[must_use]
    pub fn write(&self, query: &Query, limit: usize) -> Vec<u8> {
        if self.truncated {
            return query.truncated(self.rcode);
        }
        let mut writer = Writer::new(self, query);
        for record in &self.records {
            writer.record(record);
            if query.records_at() + writer.bytes.len() > limit {
                return query.truncated(self.rcode);
            }
        }
        let authorities = u16::try_from(self.records.len()).unwrap_or(u16::MAX) - self.answers;
        let blocked = self.refused > 0;
        let head = Head { answers: self.answers, authorities, blocked, ..Head::of(self.rcode) };
        let written = query.answer(head, &writer.bytes);
        if written.len() > limit { query.truncated(self.rcode) } else { written }
    }
}

/// Whether a hint of an SVCB or HTTPS record (RFC 9460, 2.2 and 7.3) is an address that a guest may
/// not reach; `None` if the data is malformed.
fn hints_refused(data: &[u8], reach: &[Ipv4Net]) -> Option<bool> {
    const IPV4HINT: u16 = 4;
    const IPV6HINT: u16 = 6;
    let mut rest = data.get(2..)?;
    // Skips the target, which is not compressed.
    loop {
        let (length, after) = rest.split_first()?;
        // 64 and more is a pointer or another type of label.
        rest = after.get(usize::from(*length)..).filter(|_| *length < 64)?;
        if *length == 0 {
            break;
        }
    }
    while !rest.is_empty() {
        let (head, after) = rest.split_at_checked(4)?;
        let (key, length) =
            (u16::from_be_bytes([head[0], head[1]]), u16::from_be_bytes([head[2], head[3]]));
        let (value, after) = after.split_at_checked(usize::from(length))?;
        rest = after;
        let refused = match key {
            IPV4HINT => value.as_chunks::<4>().0.iter().any(|ip| refused_v4((*ip).into(), reach)),
            IPV6HINT => value.as_chunks::<16>().0.iter().any(|ip| refused_v6((*ip).into())),
            _ => false,
        };
        if refused {
            return Some(true);
        }
    }
    Some(false)
}

/// Writes records for a guest, compressing names as the server did.
struct Writer<'a> {
    answer: &'a Answer<'a>,
    bytes: Vec<u8>,
    /// The offset of the records in the guest's message.
    base: usize,
    /// The offset at which a node's name was written; 0 if not yet.
    placed: Vec<usize>,
}

impl<'a> Writer<'a> {
    fn new(answer: &'a Answer<'a>, query: &Query) -> Self {
        let mut placed = vec![0; answer.names.labels.len()];
        // The question has the same length and offset in both messages.
        let mut node = answer.question;
        while node != 0 {
            let label = answer.names.labels[node];
            (placed[node], node) = (label.at, label.parent);
        }
        Self { answer, bytes: Vec::new(), base: query.records_at(), placed }
    }

    fn record(&mut self, record: &Record) {
        let data = record.data;
        self.name(record.owner, true);
        self.bytes.extend(record.kind.to_be_bytes());
        self.bytes.extend(IN.to_be_bytes());
        self.bytes.extend(record.ttl_seconds.to_be_bytes());
        let length_at = self.bytes.len();
        self.bytes.extend([0, 0]);
        self.copy(data.before);
        for name in data.names.into_iter().flatten() {
            self.name(name, data.compress);
        }
        self.copy(data.after);
        // At most the length of the server's record plus two names.
        let length = u16::try_from(self.bytes.len() - length_at - 2).unwrap_or(u16::MAX);
        self.bytes[length_at..length_at + 2].copy_from_slice(&length.to_be_bytes());
    }

    fn copy(&mut self, (start, end): (usize, usize)) {
        self.bytes.extend_from_slice(self.answer.bytes.get(start..end).unwrap_or_default());
    }

    fn name(&mut self, mut node: Node, compress: bool) {
        while node != 0 {
            let label = self.answer.names.labels[node];
            if compress && self.placed[node] != 0 {
                let pointer = u16::try_from(0xc000 | self.placed[node]).unwrap_or(0xc00c);
                return self.bytes.extend(pointer.to_be_bytes());
            }
            let at = self.base + self.bytes.len();
            if self.placed[node] == 0 && at < POINTERS_END {
                self.placed[node] = at;
            }
            let length = usize::from(self.answer.bytes[label.at]);
            self.copy((label.at, label.at + 1 + length));
            node = label.parent;
        }
        self.bytes.push(0);
    }
}
