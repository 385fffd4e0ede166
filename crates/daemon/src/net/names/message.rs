//! DNS messages of guests: parsing a question, writing an answer (RFC 1035, 4; RFC 6891; RFC 9619).
//!
//! A question has a header, one name without compression pointers, a type, a class, and at most one
//! OPT record. Any other message is refused without further parsing, so each byte is read at most
//! once. This module does no I/O and allocates at most a message's length.
//!
//! Not `simple-dns`, because the work of such a general parser for a message of 64 KiB is not
//! bounded by the message's length. The tests compare with `simple-dns`.

/// Bytes of the header (RFC 1035, 4.1.1).
pub const HEADER_BYTES: usize = 12;
/// Maximum bytes of a question: header, name (255), type and class, and an OPT record with options.
pub const MAX_QUESTION_BYTES: usize = 512;
/// Maximum bytes of an answer over UDP, also announced to guests and servers. Such a packet fits
/// every path unfragmented (DNS flag day 2020).
pub const MAX_UDP_BYTES: u16 = 1232;
/// Bytes that every UDP answer may have (RFC 1035, 4.2.1).
const MIN_UDP_BYTES: u16 = 512;
/// Maximum bytes of a name, with its length bytes and the root (RFC 1035, 2.3.4).
pub const MAX_NAME_BYTES: usize = 255;
/// Maximum bytes of a label.
pub const MAX_LABEL_BYTES: usize = 63;

/// The class IN.
pub const IN: u16 = 1;

/// Types of records and questions (IANA, DNS parameters).
pub mod kind {
    #![allow(missing_docs, reason = "IANA's names, RFC 6895")]
    pub const A: u16 = 1;
    pub const CNAME: u16 = 5;
    pub const SOA: u16 = 6;
    pub const PTR: u16 = 12;
    pub const AAAA: u16 = 28;
    pub const OPT: u16 = 41;
    pub const DS: u16 = 43;
    pub const RRSIG: u16 = 46;
    pub const NSEC: u16 = 47;
    pub const DNSKEY: u16 = 48;
    pub const NSEC3: u16 = 50;
    pub const SVCB: u16 = 64;
    pub const HTTPS: u16 = 65;
    pub const ANY: u16 = 255;
}

/// Response codes (RFC 1035, 4.1.1; RFC 6891, 9).
pub mod rcode {
    #![allow(missing_docs, reason = "IANA's names, RFC 6895")]
    pub const NOERROR: u16 = 0;
    pub const FORMERR: u16 = 1;
    pub const SERVFAIL: u16 = 2;
    pub const NXDOMAIN: u16 = 3;
    pub const NOTIMP: u16 = 4;
    pub const REFUSED: u16 = 5;
    /// Needs an OPT record, because it exceeds four bits.
    pub const BADVERS: u16 = 16;
}

// Bits of the header's second word.
const RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const AUTHORITATIVE: u16 = 0x0400;
pub(super) const TRUNCATED: u16 = 0x0200;
const RECURSION_DESIRED: u16 = 0x0100;
const RECURSION_AVAILABLE: u16 = 0x0080;
const CHECKING_DISABLED: u16 = 0x0010;
pub(super) const RCODE: u16 = 0x000f;
/// In the TTL field of an OPT record: the guest understands DNSSEC (RFC 3225).
const DNSSEC_OK: u32 = 0x8000;

/// An option of an OPT record: code 15 (extended error), length 2, value 15 (blocked; RFC 8914,
/// 4.16).
const EXTENDED_ERROR: [u8; 6] = [0, 15, 0, 2, 0, 15];

/// A message with the number of byte reads: each byte counts as often as it was read.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
    pub visits: usize,
}

impl<'a> Reader<'a> {
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, visits: 0 }
    }

    /// The next `count` bytes; `None` if fewer remain.
    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(count)?)?;
        self.at += count;
        self.visits += count;
        Some(taken)
    }

    pub fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub fn word(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    pub fn long(&mut self) -> Option<u32> {
        Some(u32::from(self.word()?) << 16 | u32::from(self.word()?))
    }
}

/// A name in wire form: labels with a length byte each, and the root's 0; at most
/// [`MAX_NAME_BYTES`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name(Box<[u8]>);

impl Name {
    /// The name in wire form.
    #[must_use]
    pub fn wire(&self) -> &[u8] {
        &self.0
    }

    /// The labels without the root's.
    pub fn labels(&self) -> impl Iterator<Item = &[u8]> {
        Self::labels_of(&self.0)
    }

    /// The labels of a name in wire form.
    pub(super) fn labels_of(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
        std::iter::from_fn(move || {
            let (length, after) = rest.split_first()?;
            let (label, after) =
                after.split_at_checked(usize::from(*length)).filter(|_| *length > 0)?;
            rest = after;
            Some(label)
        })
    }

    /// Whether both names are equal in DNS, which ignores case (RFC 4343).
    #[must_use]
    pub fn is(&self, other: &[u8]) -> bool {
        // The comparison may ignore case in length bytes too, because they are below 64 and so no
        // letters.
        self.0.eq_ignore_ascii_case(other)
    }

    /// Reads a name without compression pointers.
    fn read(reader: &mut Reader<'_>) -> Option<Self> {
        let start = reader.at;
        loop {
            match usize::from(reader.byte()?) {
                0 => break,
                length @ 1..=MAX_LABEL_BYTES => drop(reader.take(length)?),
                // Compression pointers, and unassigned label types (RFC 6891, 5).
                _ => return None,
            }
            if reader.at - start >= MAX_NAME_BYTES {
                return None;
            }
        }
        Some(Self(reader.bytes[start..reader.at].into()))
    }
}

/// The question section's entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The name in question.
    pub name: Name,
    /// The type of records.
    pub kind: u16,
    /// The class.
    pub class: u16,
}

impl Question {
    fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(self.name.wire());
        to.extend(self.kind.to_be_bytes());
        to.extend(self.class.to_be_bytes());
    }

    /// Bytes of the question in a message.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.name.wire().len() + 4
    }
}

/// The fields of an OPT record (RFC 6891). Its options are not parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edns {
    /// Maximum bytes of an answer over UDP that the guest accepts.
    pub udp_bytes: u16,
    /// Whether the guest understands DNSSEC.
    pub dnssec_ok: bool,
}

/// A guest's question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    /// The message id, which the answer repeats.
    pub id: u16,
    /// The RD bit: the guest wants a recursive lookup.
    pub recursion_desired: bool,
    /// The CD bit: signatures need not be checked.
    pub checking_disabled: bool,
    /// The one question.
    pub question: Question,
    /// The fields of its OPT record, if it has one.
    pub edns: Option<Edns>,
}

/// Why a message cannot be answered as a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unusable {
    /// The message is a response, or too short for an id. No reply is sent, because two servers
    /// could otherwise answer each other forever.
    Silence,
    /// The reply to send.
    Reply(Vec<u8>),
}

/// Parses a guest's message, and adds the number of byte reads to `visits`: at most the message's
/// length.
///
/// # Errors
/// What to do with a message that is no valid question.
pub fn parse(bytes: &[u8], visits: &mut usize) -> Result<Query, Unusable> {
    let mut reader = Reader::new(bytes);
    let read = read(&mut reader);
    *visits += reader.visits;
    read
}

fn read(reader: &mut Reader<'_>) -> Result<Query, Unusable> {
    let (Some(id), Some(flags)) = (reader.word(), reader.word()) else {
        return Err(Unusable::Silence);
    };
    if flags & RESPONSE != 0 {
        return Err(Unusable::Silence);
    }
    let no = |code: u16| {
        let flags = RESPONSE | flags & (OPCODE | RECURSION_DESIRED) | RECURSION_AVAILABLE | code;
        let mut head = [id.to_be_bytes(), flags.to_be_bytes()].concat();
        head.resize(HEADER_BYTES, 0);
        Unusable::Reply(head)
    };
    let mut counts = [0; 4];
    for count in &mut counts {
        *count = reader.word().ok_or(Unusable::Silence)?;
    }
    if flags & OPCODE != 0 {
        return Err(no(rcode::NOTIMP));
    }
    if !matches!(counts, [1, 0, 0, 0 | 1]) || reader.bytes.len() > MAX_QUESTION_BYTES {
        return Err(no(rcode::FORMERR));
    }
    let rest = |reader: &mut Reader<'_>| {
        let name = Name::read(reader)?;
        let question = Question { name, kind: reader.word()?, class: reader.word()? };
        let edns = if counts[3] == 1 { Some(opt(reader)?) } else { None };
        (reader.at == reader.bytes.len()).then_some((question, edns))
    };
    let (question, edns) = rest(reader).ok_or_else(|| no(rcode::FORMERR))?;
    let query = Query {
        id,
        recursion_desired: flags & RECURSION_DESIRED != 0,
        checking_disabled: flags & CHECKING_DISABLED != 0,
        question,
        edns: edns.map(|(edns, _)| edns),
    };
    match edns {
        Some((_, 1..)) => Err(Unusable::Reply(query.answer(Head::of(rcode::BADVERS), &[]))),
        _ => Ok(query),
    }
}

/// Reads an OPT record and its version.
fn opt(reader: &mut Reader<'_>) -> Option<(Edns, u8)> {
    let (root, kind, udp_bytes) = (reader.byte()?, reader.word()?, reader.word()?);
    let (ttl, length) = (reader.long()?, reader.word()?);
    if root != 0 || kind != kind::OPT {
        return None;
    }
    reader.take(usize::from(length))?;
    let [_, version, ..] = ttl.to_be_bytes();
    Some((Edns { udp_bytes, dnssec_ok: ttl & DNSSEC_OK != 0 }, version))
}

/// The header fields of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Head {
    /// The response code; more than four bits need an OPT record.
    pub rcode: u16,
    /// The AA bit: this service is the authority.
    pub authoritative: bool,
    /// The TC bit: the answer does not fit.
    pub truncated: bool,
    /// Number of records in the answer section.
    pub answers: u16,
    /// Number of records in the authority section, which follow.
    pub authorities: u16,
    /// Whether addresses were left out, which an OPT record reports.
    pub blocked: bool,
}

impl Head {
    /// The header of an answer without records.
    #[must_use]
    pub fn of(rcode: u16) -> Self {
        Self { rcode, ..Self::default() }
    }
}

impl Query {
    /// Maximum bytes of an answer over UDP.
    #[must_use]
    pub fn udp_bytes(&self) -> usize {
        self.edns
            .map_or(MIN_UDP_BYTES, |edns| edns.udp_bytes.clamp(MIN_UDP_BYTES, MAX_UDP_BYTES))
            .into()
    }

    /// The offset of an answer's records.
    #[must_use]
    pub fn records_at(&self) -> usize {
        HEADER_BYTES + self.question.bytes()
    }

    /// Writes an answer with these records, which begin at [`Self::records_at`].
    #[must_use]
    pub fn answer(&self, head: Head, records: &[u8]) -> Vec<u8> {
        let mut flags = RESPONSE | RECURSION_AVAILABLE | head.rcode & RCODE;
        let set = [
            (head.authoritative, AUTHORITATIVE),
            (head.truncated, TRUNCATED),
            (self.recursion_desired, RECURSION_DESIRED),
            (self.checking_disabled, CHECKING_DISABLED),
        ];
        flags |= set.iter().filter(|(is, _)| *is).map(|(_, bit)| bit).sum::<u16>();
        let counts = [1, head.answers, head.authorities, u16::from(self.edns.is_some())];
        let mut bytes = self.message(self.id, flags, counts, records, head.rcode);
        if head.blocked && self.edns.is_some() {
            // The OPT record is the last one, and its length of options is 0 so far.
            bytes.truncate(bytes.len() - 2);
            bytes.extend([0, 6]);
            bytes.extend(EXTENDED_ERROR);
        }
        bytes
    }

    /// Writes a truncated answer without records.
    #[must_use]
    pub fn truncated(&self, rcode: u16) -> Vec<u8> {
        self.answer(Head { truncated: true, ..Head::of(rcode) }, &[])
    }

    /// Writes the question for a server, only from parsed fields and in lower case.
    #[must_use]
    pub fn forwarded(&self, id: u16) -> Vec<u8> {
        let flags = RECURSION_DESIRED | if self.checking_disabled { CHECKING_DISABLED } else { 0 };
        let mut bytes = self.message(id, flags, [1, 0, 0, u16::from(self.edns.is_some())], &[], 0);
        bytes[HEADER_BYTES..][..self.question.name.wire().len()].make_ascii_lowercase();
        bytes
    }

    fn message(&self, id: u16, flags: u16, counts: [u16; 4], records: &[u8], code: u16) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.records_at() + records.len() + 11);
        bytes.extend(id.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        counts.iter().for_each(|count| bytes.extend(count.to_be_bytes()));
        self.question.write(&mut bytes);
        bytes.extend_from_slice(records);
        if let Some(edns) = self.edns {
            bytes.push(0);
            bytes.extend(kind::OPT.to_be_bytes());
            bytes.extend(MAX_UDP_BYTES.to_be_bytes());
            let dnssec_ok = if edns.dnssec_ok { DNSSEC_OK } else { 0 };
            bytes.extend((u32::from(code >> 4) << 24 | dnssec_ok).to_be_bytes());
            bytes.extend([0, 0]);
        }
        bytes
    }
}

/// A record whose owner is the question's name (a pointer to offset 12).
#[must_use]
pub fn record(kind: u16, ttl_seconds: u32, data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(data.len()).unwrap_or(u16::MAX);
    let mut bytes = vec![0xc0, 12];
    bytes.extend(kind.to_be_bytes());
    bytes.extend(IN.to_be_bytes());
    bytes.extend(ttl_seconds.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}
