//! The number of VMs in the machine, counted at intervals, so that the report of the machine's end
//! can say what was lost.

use crate::run_state::RunState;
use dayfly_machine_init::{API_PORT, GUEST_ADDRESS, Token};
use serde::Deserialize;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Interval of the counts. VMs of the last interval are missing in a report.
const COUNT_EVERY: Duration = Duration::from_secs(10);
/// Time limit for each step of a request.
const ANSWER: Duration = Duration::from_secs(5);
/// Largest answer in bytes. The daemon's is some hundred bytes long.
const MAX_ANSWER_BYTES: u64 = 64 << 10;

/// Counts on a separate thread until the supervisor ends. A daemon that does not answer leaves the
/// last number.
pub(crate) fn keep(state: Arc<RunState>, token: Token) {
    let counting = move || {
        loop {
            if let Ok(Some(vms)) = ask(&token)
                && let Err(e) = state.change(|running| running.vms = Some(vms))
            {
                eprintln!("the number of VMs: {e}");
            }
            std::thread::sleep(COUNT_EVERY);
        }
    };
    let thread = std::thread::Builder::new().name("count".into()).stack_size(256 << 10);
    if let Err(e) = thread.spawn(counting) {
        eprintln!("VMs are not counted: {e}");
    }
}

fn ask(token: &Token) -> io::Result<Option<u64>> {
    let address = SocketAddr::from((GUEST_ADDRESS, API_PORT));
    let mut stream = TcpStream::connect_timeout(&address, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    token.send(&mut stream)?;
    stream.write_all(b"GET /v1/info HTTP/1.1\r\nhost: dayfly\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER_BYTES).read_to_end(&mut answer)?;
    Ok(vms_in(&answer))
}

/// The number of VMs in an HTTP answer; `None` if the answer does not say it.
pub(crate) fn vms_in(answer: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Info {
        vms: u64,
    }
    let body = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    let info: Info = serde_json::from_slice(answer.get(body + 4..)?).ok()?;
    Some(info.vms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_read_from_the_daemons_answer_and_from_nothing_else() {
        let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n\
            {\"version\":\"0.1.0\",\"vms\":12,\"kvm\":\"svm\"}";
        assert_eq!(vms_in(answer), Some(12));
        for other in [
            &b""[..],
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n\r\none 7",
            b"HTTP/1.1 500 x\r\n\r\n{\"code\":\"internal\"}",
            b"HTTP/1.1 200 OK\r\n\r\n{\"vms\":-1}",
        ] {
            assert_eq!(vms_in(other), None, "{}", String::from_utf8_lossy(other));
        }
    }
}
