//! What the daemon and a process of streams say to each other: datagrams on SOCK_SEQPACKET sockets.
//!
//! A stream is handed over on the control socket, with three descriptors (SCM_RIGHTS): the client's
//! connection, the agent's, and the stream's *line*. All other messages about a stream are sent on
//! its line.
//!
//! ```text
//!  daemon ── hand-over ──▶ process    the daemon passes nothing on from here
//!  daemon ◀───  Taken  ─── process    the process has the descriptors, and passes nothing on yet
//!  daemon ───    Go    ──▶ process    the stream is the process's
//!      or ───    No    ──▶            it stays with the daemon; the process closes its descriptors
//! ```
//! A line that is closed without either means that the daemon has ended: the process goes on with
//! the stream, because no other process has its descriptors.
//!
//! | offset | size | field of a hand-over, integers little-endian |
//! |---|---|---|
//! | 0 | 4 | `DFst` |
//! | 4 | 1 | version, [`VERSION`] |
//! | 5 | 3 | zero |
//! | 8 | 4 | kinds of frames that pass, a bit for each |
//! | 12 | 4 | kinds of frames that end the stream, a bit for each |
//! | 16 | 4 | longest body of a frame that passes |
//! | 20 | 4 | longest body of a frame that ends the stream |
//! | 24 | 4 | bytes of the current frame's body that the agent has not sent yet |
//! | 28 | 16 | lengths of the four texts that follow, 4 bytes each |
//! | 44 | … | bytes for the agent; for the client; of the agent's next header; the farewell |

/// The version of hand-overs. Each daemon starts its own processes. If its package was renewed
/// while it runs, that is the program of another version, which refuses its arguments or each
/// hand-over. The streams then stay with the daemon.
pub const VERSION: u8 = 1;
/// Bytes of a frame's header: the length of its body, little-endian, and its kind.
pub const HEADER_BYTES: usize = 5;
/// Most bytes of a hand-over.
pub const HANDED_MAX_BYTES: usize = 160 << 10;
/// Most bytes of a farewell.
pub const FAREWELL_MAX_BYTES: usize = 64 << 10;
/// Most bytes of a frame that ends a stream.
pub const END_MAX_BYTES: usize = 32 << 10;
/// Most bytes of a message on a line.
pub const LINE_MAX_BYTES: usize = 1 + FAREWELL_MAX_BYTES;
/// Most bytes of a message of the process on a line.
pub const EVENT_MAX_BYTES: usize = 1 + HEADER_BYTES + END_MAX_BYTES;

const MAGIC: &[u8; 4] = b"DFst";
const FIXED_BYTES: usize = 44;

/// Which frames of the agent pass, and which end the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rules {
    /// Kinds that go to the client: bit `n` is kind `n`.
    pub passed: u32,
    /// Kinds after which the agent sends nothing. Such a frame goes to the daemon.
    pub ending: u32,
    /// The longest body of a frame that passes, in bytes.
    pub passed_max: u32,
    /// The longest body of a frame that ends the stream, in bytes.
    pub ending_max: u32,
}

/// What a header means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Header {
    /// A frame that passes, with a body of this length.
    Passes(u32),
    /// A frame that ends the stream, with a body of this length.
    Ends(u32),
    /// The agent may not send it.
    Wrong,
}

impl Rules {
    /// Reads a header.
    #[must_use]
    pub fn read(&self, header: [u8; HEADER_BYTES]) -> Header {
        let [a, b, c, d, kind] = header;
        let length = u32::from_le_bytes([a, b, c, d]);
        let has = |kinds: u32| kind < 32 && kinds >> kind & 1 == 1;
        if has(self.passed) && length <= self.passed_max {
            Header::Passes(length)
        } else if has(self.ending) && length <= self.ending_max {
            Header::Ends(length)
        } else {
            Header::Wrong
        }
    }
}

/// A stream that is handed over, without its descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Handed {
    /// Which frames there may be.
    pub rules: Rules,
    /// Bytes of the current frame's body that the agent has not sent yet.
    pub body_left: u32,
    /// Bytes of the client that the agent has not got yet.
    pub to_agent: Vec<u8>,
    /// Bytes of the agent, in frames that pass, that the client has not got yet.
    pub to_client: Vec<u8>,
    /// The beginning of the agent's next header.
    pub header: Vec<u8>,
    /// What the client gets if the agent's connection ends early and no daemon can say why.
    pub farewell: Vec<u8>,
}

impl Handed {
    /// The message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let texts = [&self.to_agent, &self.to_client, &self.header, &self.farewell];
        let mut out =
            Vec::with_capacity(FIXED_BYTES + texts.iter().map(|t| t.len()).sum::<usize>());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&[VERSION, 0, 0, 0]);
        let Rules { passed, ending, passed_max, ending_max } = self.rules;
        let length = |text: &Vec<u8>| u32::try_from(text.len()).unwrap_or(u32::MAX);
        let lengths = texts.map(length);
        for number in [passed, ending, passed_max, ending_max, self.body_left] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        for number in lengths {
            out.extend_from_slice(&number.to_le_bytes());
        }
        texts.iter().for_each(|text| out.extend_from_slice(text));
        out
    }

    /// Reads a message; `None` if it is not one.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        if message.len() > HANDED_MAX_BYTES {
            return None;
        }
        let (fixed, mut rest) = message.split_first_chunk::<FIXED_BYTES>()?;
        if &fixed[..4] != MAGIC || fixed[4..8] != [VERSION, 0, 0, 0] {
            return None;
        }
        let mut numbers = fixed[8..].chunks_exact(4).filter_map(|four| four.try_into().ok());
        let mut number = || numbers.next().map(u32::from_le_bytes);
        let rules = Rules {
            passed: number()?,
            ending: number()?,
            passed_max: number()?,
            ending_max: number()?,
        };
        let body_left = number()?;
        let lengths = [number()?, number()?, number()?, number()?];
        let mut texts = lengths.into_iter().map(|length| {
            let (text, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            rest = after;
            Some(text.to_vec())
        });
        let mut text = || texts.next().flatten();
        let all = Self {
            rules,
            body_left,
            to_agent: text()?,
            to_client: text()?,
            header: text()?,
            farewell: text()?,
        };
        let ok = all.header.len() < HEADER_BYTES
            && (all.header.is_empty() || body_left == 0)
            && body_left <= rules.passed_max
            && all.farewell.len() <= FAREWELL_MAX_BYTES
            && usize::try_from(rules.ending_max).ok()? <= END_MAX_BYTES
            && rules.passed & rules.ending == 0;
        (ok && rest.is_empty()).then_some(all)
    }
}

/// A message of the process on a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It has the descriptors, and waits for [`Order::Go`]. The first message.
    Taken,
    /// The agent sent this frame, which ends the stream. The client has all that came before it.
    Ended(Vec<u8>),
    /// The agent's connection ended without such a frame.
    Closed,
    /// The agent sent this header, which it may not.
    Wrong([u8; HEADER_BYTES]),
    /// The client is gone. The last message.
    Gone,
    /// The client has the farewell, or its kernel has it for the client. The last message.
    Done,
    /// The answer to a question. Each question has one answer, in turn.
    Heard {
        /// The question's number.
        question: u64,
        /// The answer.
        heard: Heard,
    },
}

/// What has come from the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Heard {
    /// Bytes since the hand-over, counted modulo 2^64.
    pub bytes: u64,
    /// Whether all of them are with the client, so that the next byte is due from the agent.
    pub waits: bool,
}

impl Event {
    /// The message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let with = |first: u8, rest: &[u8]| [&[first], rest].concat();
        match self {
            Self::Taken => vec![b'T'],
            Self::Ended(frame) => with(b'E', frame),
            Self::Closed => vec![b'C'],
            Self::Wrong(header) => with(b'W', header),
            Self::Gone => vec![b'G'],
            Self::Done => vec![b'D'],
            Self::Heard { question, heard: Heard { bytes, waits } } => {
                let mut out = vec![b'H', u8::from(*waits)];
                out.extend_from_slice(&question.to_le_bytes());
                out.extend_from_slice(&bytes.to_le_bytes());
                out
            }
        }
    }

    /// Reads a message; `None` if it is not one.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        let (first, rest) = message.split_first()?;
        Some(match (first, rest) {
            (b'T', []) => Self::Taken,
            (b'E', frame)
                if (HEADER_BYTES..=HEADER_BYTES + END_MAX_BYTES).contains(&frame.len()) =>
            {
                Self::Ended(frame.to_vec())
            }
            (b'C', []) => Self::Closed,
            (b'W', header) => Self::Wrong(header.try_into().ok()?),
            (b'G', []) => Self::Gone,
            (b'D', []) => Self::Done,
            (b'H', [waits @ (0 | 1), numbers @ ..]) => {
                let (question, bytes) = numbers.split_first_chunk::<8>()?;
                let bytes = u64::from_le_bytes(bytes.try_into().ok()?);
                Self::Heard {
                    question: u64::from_le_bytes(*question),
                    heard: Heard { bytes, waits: *waits == 1 },
                }
            }
            _ => return None,
        })
    }
}

/// A message of the daemon on a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// The process goes on with the stream.
    Go,
    /// The stream stays with the daemon.
    No,
    /// Asks what has come from the agent. The number is that of the question before plus one.
    Ask(u64),
    /// The client's last bytes, which the process leaves out in the middle of a frame. It closes
    /// the agent's connection, and sends the client what it has before.
    Finish(Vec<u8>),
}

impl Order {
    /// The message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Go => vec![b'G'],
            Self::No => vec![b'N'],
            Self::Ask(question) => [b"Q".as_slice(), &question.to_le_bytes()].concat(),
            Self::Finish(bytes) => [b"F", bytes.as_slice()].concat(),
        }
    }

    /// Reads a message; `None` if it is not one.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<Self> {
        match message.split_first()? {
            (b'G', []) => Some(Self::Go),
            (b'N', []) => Some(Self::No),
            (b'Q', number) => Some(Self::Ask(u64::from_le_bytes(number.try_into().ok()?))),
            (b'F', bytes) if bytes.len() <= FAREWELL_MAX_BYTES => {
                Some(Self::Finish(bytes.to_vec()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { passed: 0b11 << 5, ending: 1 << 9, passed_max: 9, ending_max: 7 };

    #[test]
    fn what_is_encoded_decodes_and_nothing_that_is_cut_or_longer() {
        let handed = Handed {
            rules: RULES,
            body_left: 0,
            to_agent: b"one".to_vec(),
            to_client: Vec::new(),
            header: vec![1, 2],
            farewell: b"bye".to_vec(),
        };
        let bytes = handed.encode();
        assert_eq!(Handed::decode(&bytes), Some(handed.clone()));
        for cut in 0..bytes.len() {
            assert_eq!(Handed::decode(&bytes[..cut]), None, "{cut}");
        }
        assert_eq!(Handed::decode(&[bytes.as_slice(), &[0]].concat()), None);
        for at in 0..8 {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_eq!(Handed::decode(&other), None, "byte {at}");
        }
        let wrong = |change: fn(&mut Handed)| {
            let mut one = handed.clone();
            change(&mut one);
            assert_eq!(Handed::decode(&one.encode()), None, "{one:?}");
        };
        wrong(|one| one.header = vec![0; HEADER_BYTES]);
        wrong(|one| one.body_left = 1);
        wrong(|one| (one.header, one.body_left) = (Vec::new(), 10));
        wrong(|one| one.rules.ending_max = u32::MAX);
        wrong(|one| one.rules.ending |= 1 << 5);
        wrong(|one| one.farewell = vec![0; FAREWELL_MAX_BYTES + 1]);
        wrong(|one| one.to_agent = vec![0; HANDED_MAX_BYTES]);
    }

    #[test]
    fn messages_of_a_line() {
        let heard = Heard { bytes: u64::MAX - 1, waits: true };
        for event in [
            Event::Taken,
            Event::Ended(vec![7; HEADER_BYTES]),
            Event::Closed,
            Event::Wrong([1; HEADER_BYTES]),
            Event::Gone,
            Event::Done,
            Event::Heard { question: u64::MAX - 2, heard },
        ] {
            assert_eq!(Event::decode(&event.encode()), Some(event));
        }
        let long = [b"E".as_slice(), &vec![0; HEADER_BYTES + END_MAX_BYTES + 1]].concat();
        let heard = Event::Heard { question: 1, heard: Heard { bytes: 2, waits: false } }.encode();
        let (cut, more) = (&heard[..heard.len() - 1], [heard.as_slice(), b"1"].concat());
        let other = [b"H\x02".as_slice(), &heard[2..]].concat();
        for wrong in [&b""[..], b"T1", b"E123", b"W1", b"H", cut, &more, &other, b"x", &long] {
            assert_eq!(Event::decode(wrong), None, "{wrong:?}");
        }
        let finish = |bytes: &[u8]| Order::Finish(bytes.to_vec());
        for order in [Order::Go, Order::No, Order::Ask(u64::MAX - 1), finish(b""), finish(b"123")] {
            assert_eq!(Order::decode(&order.encode()), Some(order));
        }
        let long = [b"F".as_slice(), &vec![0; FAREWELL_MAX_BYTES + 1]].concat();
        for wrong in [&b""[..], b"Q", b"Q1", b"Q123456789", b"G1", b"N1", b"T", &long] {
            assert_eq!(Order::decode(wrong), None);
        }
    }

    #[test]
    fn headers_are_read_by_the_rules() {
        let read = |length: u32, kind: u8| {
            let [a, b, c, d] = length.to_le_bytes();
            RULES.read([a, b, c, d, kind])
        };
        assert_eq!(read(9, 5), Header::Passes(9));
        assert_eq!(read(0, 6), Header::Passes(0));
        assert_eq!(read(7, 9), Header::Ends(7));
        for (length, kind) in [(10, 5), (8, 9), (0, 4), (0, 32), (0, 37), (0, 255), (u32::MAX, 5)] {
            assert_eq!(read(length, kind), Header::Wrong, "{length} {kind}");
        }
    }
}
