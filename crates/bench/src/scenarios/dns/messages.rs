//! DNS messages: questions, answers, and the ones that cost a careless reader the most.

/// A's and NULL's type numbers (RFC 1035, 3.2.2), and the internet's class.
const A_IN: [u8; 4] = [0, 1, 0, 1];

fn word(n: usize) -> [u8; 2] {
    u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes()
}

/// A name as it is sent.
fn labels(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap_or(63));
        bytes.extend(label.bytes().take(63));
    }
    bytes.push(0);
    bytes
}

/// The question for an address of this name.
pub fn question(id: u16, name: &str) -> Vec<u8> {
    [&id.to_be_bytes()[..], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0], &labels(name), &A_IN].concat()
}

/// The question as an answer with one public address.
pub fn answer(question: &[u8]) -> Vec<u8> {
    let mut bytes = question.to_vec();
    if let [_, _, flags, _, _, _, _, count, ..] = bytes.as_mut_slice() {
        (*flags, *count) = (*flags | 0x80, 1);
    }
    [&bytes[..], &[0xc0, 12], &A_IN, &[0, 0, 0, 9, 0, 4, 1, 1, 1, 1]].concat()
}

/// Behind the header and the question of `asked`: a chain of compression pointers, each to the one
/// before, then as many records as fit into `total` bytes, each with three names that begin at the
/// chain's end. A parser that follows each pointer takes 10^8 steps for 64 KiB.
pub fn bomb(asked: &[u8], total: usize) -> Vec<u8> {
    let start = asked.len() + 12;
    let end = (start + total.saturating_sub(start) / 2).min(0x3ffe);
    let mut chain = word(0xc000 | 12).to_vec();
    for at in (start..end.saturating_sub(3)).step_by(2) {
        chain.extend(word(0xc000 | at));
    }
    let null =
        [&word(0xc000 | 12)[..], &[0, 10, 0, 1, 0, 0, 0, 0], &word(chain.len()), &chain].concat();
    let last = word(0xc000 | (start + chain.len() - 2));
    let minfo = [&last[..], &[0, 14, 0, 1, 0, 0, 0, 0, 0, 4], &last, &last].concat();
    let count = total.saturating_sub(asked.len() + null.len()) / minfo.len();
    let mut bytes = [asked, &null, &minfo.repeat(count)].concat();
    bytes[6..8].copy_from_slice(&word(count + 1));
    bytes
}

/// A message of a stream: two bytes of length come first.
pub fn framed(message: &[u8]) -> Vec<u8> {
    [&word(message.len())[..], message].concat()
}
