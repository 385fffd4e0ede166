//! Wrong answers of an agent to a request for an archive, and what a copy has to report for each.
//! `dayfly-liar` sends them in a guest.
//!
//! The path of the request selects the answer: `/archive-7/result.json` is number 7 of
//! [`dayfly_hostile::archives::all`] in honest frames, `/lie-7/result.json` number 7 of [`all`],
//! and `/silence-2/result.json` number 2 of [`silent`]. Numbers count from 0.

use dayfly_api::agent::{Failure, FailureCode, FrameKind, MAX_FRAME_BYTES, Ready, Reply, encode};
use dayfly_hostile::Verdict::{self, Refused, Written};
use dayfly_hostile::archives;
use std::io::{self, Read, Write};

/// What the liar does with a connection after its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Closes it.
    Close,
    /// Keeps it open without sending anything, until the peer closes it.
    Hold,
}

/// One wrong answer.
#[derive(Debug)]
pub struct Lie {
    /// Its name in reports of the test.
    pub name: &'static str,
    /// The required result of a copy.
    pub verdict: Verdict,
    /// Sends the answer. An error means that the peer has closed the connection.
    pub say: fn(&mut dyn Write) -> io::Result<Then>,
}

/// The most bytes that an honest agent sends in one frame.
const CHUNK_BYTES: usize = 64 << 10;
const ESCAPES: &str = "\x1b]0;owned\x07\u{9b}2J\u{202e}\nforged: line";
const SHOWN: &str = r"in the guest: \x1b]0;owned\x07\u{9b}2J\u{202e}\nforged: line";
const EARLY: &str = "its agent closed the connection before it had sent everything";
const RESULT: Verdict = Written(&[("result.json", "644 result\n")]);

/// Sends an archive in honest frames.
///
/// # Errors
/// The peer has closed the connection.
pub fn send(out: &mut dyn Write, mut archive: Box<dyn Read + Send>) -> io::Result<Then> {
    reply(out, &Reply::Ok)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match archive.read(&mut buffer)? {
            0 => break,
            n => frame(out, FrameKind::Data, &buffer[..n])?,
        }
    }
    frame(out, FrameKind::End, &[])?;
    Ok(Then::Hold)
}

fn frame(out: &mut dyn Write, kind: FrameKind, body: &[u8]) -> io::Result<()> {
    out.write_all(&encode(kind, body))
}

fn reply(out: &mut dyn Write, reply: &Reply) -> io::Result<()> {
    frame(out, FrameKind::Reply, &serde_json::to_vec(reply)?)
}

fn failure(message: &str) -> Reply {
    Reply::Err(Failure { code: FailureCode::Io, message: message.to_owned() })
}

/// The complete archive of the request.
fn honest() -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    archives::named("honest").bytes.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Sends the reply, and an archive that ends in the content of its file.
fn half(out: &mut dyn Write) -> io::Result<()> {
    reply(out, &Reply::Ok)?;
    frame(out, FrameKind::Data, &honest()?[..515])
}

/// Sends the reply and half of the archive, and then `bytes`.
fn half_and(out: &mut dyn Write, bytes: &[u8]) -> io::Result<Then> {
    half(out)?;
    out.write_all(bytes)?;
    Ok(Then::Hold)
}

fn over_the_limit() -> [u8; 5] {
    let [a, b, c, d] = u32::try_from(MAX_FRAME_BYTES + 1).unwrap_or(u32::MAX).to_le_bytes();
    [a, b, c, d, FrameKind::Data as u8]
}

/// The lies that the liar sends without delay.
#[must_use]
pub fn all() -> Vec<Lie> {
    let parts = [before_the_archive(), short_archives(), wrong_frames(), errors(), odd_frames()];
    parts.into_iter().flatten().collect()
}

fn before_the_archive() -> Vec<Lie> {
    let lie = |name, verdict, say| Lie { name, verdict, say };
    vec![
        lie("no reply", Refused("expected a reply, got the end of the connection"), |_| {
            Ok(Then::Close)
        }),
        lie("garbage for a reply", Refused("frame length at byte 0: expected at most"), |out| {
            out.write_all(&[0xff; 4096]).map(|()| Then::Hold)
        }),
        lie(
            "a reply of no kind",
            Refused("frame kind at byte 4: expected 1 to 11, got 200"),
            |out| out.write_all(&[2, 0, 0, 0, 200, b'{', b'}']).map(|()| Then::Hold),
        ),
        lie("a frame that is no reply", Refused("a frame of kind Exit"), |out| {
            frame(out, FrameKind::Exit, br#"{"code":0,"signal":null,"timed_out":false}"#)?;
            Ok(Then::Hold)
        }),
        lie("a reply that is no JSON", Refused("JSON that does not parse"), |out| {
            frame(out, FrameKind::Reply, b"\x1b]0;owned\x07").map(|()| Then::Hold)
        }),
        lie("a reply of brackets", Refused("JSON that does not parse"), |out| {
            frame(out, FrameKind::Reply, &[b'['; MAX_FRAME_BYTES]).map(|()| Then::Hold)
        }),
        lie("another reply", Refused("expected Ok, got Started"), |out| {
            reply(out, &Reply::Started { pid: 1, id: None }).map(|()| Then::Hold)
        }),
        lie("a long reply", Refused(r"expected Ok, got Ready"), |out| {
            let (version, kernel) = (ESCAPES.repeat(4000), ESCAPES.to_owned());
            let ready = Ready { version, kernel, uptime_us: 0, sealed: false };
            reply(out, &Reply::Ready(ready)).map(|()| Then::Hold)
        }),
        lie("a refusal with control sequences", Refused(SHOWN), |out| {
            reply(out, &failure(ESCAPES)).map(|()| Then::Hold)
        }),
        lie("a long refusal", Refused("in the guest: xxxxxxxx"), |out| {
            reply(out, &failure(&"x".repeat(200_000))).map(|()| Then::Hold)
        }),
    ]
}

/// Archives that end too early.
fn short_archives() -> Vec<Lie> {
    let lie = |name, verdict, say| Lie { name, verdict, say };
    vec![
        lie("an end at once", Refused("got an empty one"), |out| {
            reply(out, &Reply::Ok)?;
            frame(out, FrameKind::End, &[]).map(|()| Then::Hold)
        }),
        lie("half an archive, then End", Refused("more bytes, got the stream's end"), |out| {
            half(out)?;
            frame(out, FrameKind::End, &[]).map(|()| Then::Hold)
        }),
        lie("half an archive", Refused(EARLY), |out| half(out).map(|()| Then::Close)),
        lie("all of the archive, without End", Refused(EARLY), |out| {
            reply(out, &Reply::Ok)?;
            frame(out, FrameKind::Data, &honest()?).map(|()| Then::Close)
        }),
        lie("half a frame", Refused(EARLY), |out| {
            half_and(out, &[0, 4, 0, 0, FrameKind::Data as u8, 1, 2, 3]).map(|_| Then::Close)
        }),
    ]
}

/// Frames inside an archive that have no place there.
fn wrong_frames() -> Vec<Lie> {
    let lie = |name, verdict, say| Lie { name, verdict, say };
    vec![
        lie(
            "a frame over the limit",
            Refused("frame length at byte 0: expected at most 262144"),
            |out| half_and(out, &over_the_limit()),
        ),
        lie("garbage", Refused("frame length at byte 0: expected at most 262144"), |out| {
            half_and(out, b"GET / HTTP/1.1\r\n\r\n")
        }),
        lie(
            "a frame of no kind",
            Refused("frame kind at byte 4: expected 1 to 11, got 83"),
            |out| half_and(out, &[1, 0, 0, 0, b'S', 0]),
        ),
        lie("an Exit", Refused("got a frame of kind Exit"), |out| {
            half_and(
                out,
                &encode(FrameKind::Exit, br#"{"code":0,"signal":null,"timed_out":false}"#),
            )
        }),
        lie("output of a program", Refused("got a frame of kind Stdout"), |out| {
            half_and(out, &encode(FrameKind::Stdout, ESCAPES.as_bytes()))
        }),
        lie("a second reply", Refused("got the reply Ok"), |out| {
            half(out)?;
            reply(out, &Reply::Ok).map(|()| Then::Hold)
        }),
    ]
}

/// Errors inside an archive, with texts that a terminal must not get.
fn errors() -> Vec<Lie> {
    let lie = |name, verdict, say| Lie { name, verdict, say };
    vec![
        lie("an error with control sequences", Refused(SHOWN), |out| {
            half(out)?;
            reply(out, &failure(ESCAPES)).map(|()| Then::Hold)
        }),
        lie("a long error", Refused("in the guest: \u{29e3d}\u{29e3d}"), |out| {
            half(out)?;
            reply(out, &failure(&"\u{29e3d}".repeat(60_000))).map(|()| Then::Hold)
        }),
    ]
}

/// Data frames that are too small, or more of them than the archive needs.
fn odd_frames() -> Vec<Lie> {
    let lie = |name, verdict, say| Lie { name, verdict, say };
    vec![
        lie("empty frames", Refused("got an empty frame of kind Data"), |out| {
            half(out)?;
            let empty = encode(FrameKind::Data, &[]).repeat(1000);
            loop {
                out.write_all(&empty)?;
            }
        }),
        lie("zeroes without end", Refused("bytes after the archive's end"), |out| {
            reply(out, &Reply::Ok)?;
            frame(out, FrameKind::Data, &honest()?)?;
            loop {
                frame(out, FrameKind::Data, &[0; CHUNK_BYTES])?;
            }
        }),
        lie("frames of one byte", RESULT, |out| {
            reply(out, &Reply::Ok)?;
            for byte in honest()? {
                frame(out, FrameKind::Data, &[byte])?;
            }
            frame(out, FrameKind::End, &[]).map(|()| Then::Hold)
        }),
        lie("more after End", RESULT, |out| {
            send(out, archives::named("honest").bytes)?;
            loop {
                frame(out, FrameKind::Data, &[b'x'; CHUNK_BYTES])?;
            }
        }),
    ]
}

/// The lies that the daemon notices when its time limit is over.
#[must_use]
pub fn silent() -> Vec<Lie> {
    let lie = |name, verdict, say| Lie { name, verdict, say };
    vec![
        lie("no word", Refused("did not answer within"), |_| Ok(Then::Hold)),
        lie("no more after half an archive", Refused("expected a frame within"), |out| {
            half(out).map(|()| Then::Hold)
        }),
        lie("no more after half a frame", Refused("expected a frame within"), |out| {
            half_and(out, &[0, 4, 0, 0, FrameKind::Data as u8, 1, 2, 3])
        }),
    ]
}
