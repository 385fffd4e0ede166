//! The addresses of the name in question: those of the name itself, or of the name to which its
//! aliases lead (RFC 1034, 3.6.2). Records of other names in the same answer do not count, because
//! the server of any name on the way could add them.

use super::{Answer, Node, Record};
use crate::net::names::message::kind;
use std::net::Ipv4Addr;

/// The most aliases that are followed.
pub const MAX_ALIASES: usize = 16;
/// The most records of the answer section that are looked at for each alias.
pub const MAX_RECORDS: usize = 256;

impl Answer<'_> {
    /// The addresses of the name in question, each with its time to live in seconds: the shortest
    /// of its record and of the aliases on the way. Empty if there are none, or the answer is
    /// truncated. Work: at most [`MAX_ALIASES`] times [`MAX_RECORDS`] comparisons of names.
    #[must_use]
    pub fn addresses(&self) -> Vec<(Ipv4Addr, u32)> {
        let answers = usize::from(self.answers).min(MAX_RECORDS);
        let records = self.records.get(..answers).unwrap_or_default();
        let (mut owner, mut ttl_seconds) = (self.question, u32::MAX);
        for _ in 0..=MAX_ALIASES {
            let mut of_owner = records.iter().filter(|record| self.is_same(record.owner, owner));
            let mut alias = None;
            let mut found = Vec::new();
            for record in &mut of_owner {
                match record.kind {
                    kind::A => found.extend(
                        self.address(record).map(|ip| (ip, record.ttl_seconds.min(ttl_seconds))),
                    ),
                    kind::CNAME => alias = alias.or(record.data.names[0].map(|to| (to, record))),
                    _ => {}
                }
            }
            match alias {
                Some((to, record)) if found.is_empty() => {
                    (owner, ttl_seconds) = (to, ttl_seconds.min(record.ttl_seconds));
                }
                _ => return found,
            }
        }
        Vec::new()
    }

    fn address(&self, record: &Record) -> Option<Ipv4Addr> {
        let (start, end) = record.data.before;
        let bytes: [u8; 4] = self.bytes.get(start..end)?.try_into().ok()?;
        Some(bytes.into())
    }

    /// Whether two nodes have equal names, in any case (RFC 4343). A name that a message has twice
    /// may have two nodes.
    fn is_same(&self, mut one: Node, mut other: Node) -> bool {
        let (labels, bytes) = (&self.names.labels, self.bytes);
        // Each step goes one label towards the root, and a name has at most 127.
        while one != other {
            let (a, b) = (labels[one], labels[other]);
            if one == 0 || other == 0 || a.bytes != b.bytes {
                return false;
            }
            let text = |at: usize| {
                let length = usize::from(*bytes.get(at)?);
                bytes.get(at..=at + length)
            };
            match (text(a.at), text(b.at)) {
                (Some(a), Some(b)) if a.eq_ignore_ascii_case(b) => {}
                _ => return false,
            }
            (one, other) = (a.parent, b.parent);
        }
        true
    }
}
