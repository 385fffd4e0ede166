//! The host's half of the traffic: a client of the program that `dayfly-witness serve` is in the
//! guest.
//!
//! It is the same code, at the same place, for guests of every VMM. Its calls block, because a
//! runtime's wake-ups would count in each answer.

use super::jobs::Net;
use crate::prelude::*;
use dayfly_e2e::traffic::{CHUNK_BYTES, Order, Ran};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpStream, UdpSocket};
use std::time::Duration;

/// A guest that is silent for so long, beyond the time of its job, is lost.
const SILENCE: Duration = Duration::from_secs(180);
/// Most bytes of an answer.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// A datagram without an answer for so long is lost, and is sent again.
const LOST: Duration = Duration::from_millis(250);
/// The most datagrams that may be lost one after the other.
const MOST_LOST: u32 = 40;

/// A guest.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddrV4);

impl Peer {
    /// What a text for /bin/sh writes in the guest, which may take `time`.
    ///
    /// # Errors
    /// It fails.
    pub fn run(self, text: &str, time: Duration) -> Result<String> {
        let stream = self.order(&Order::Run { text: text.to_owned() }, time)?;
        let ran: Ran = serde_json::from_str(&answer(&stream)?).context("the guest's answer")?;
        let Ran { code, stdout, stderr } = ran;
        ensure!(code == Some(0), "in the guest: {text:?}: {code:?}: {stderr}{stdout}");
        Ok(stdout)
    }

    /// MB or requests in a second, of traffic that takes `time`.
    ///
    /// # Errors
    /// The guest is silent, or the traffic ends early.
    pub fn rate(self, traffic: Net, time: Duration) -> Result<f64> {
        match traffic {
            Net::Sends => self.sends(time),
            Net::Receives => self.receives(time),
            Net::TcpRequests => self.tcp_requests(time),
            Net::UdpRequests => self.udp_requests(time),
        }
    }

    fn order(self, order: &Order, time: Duration) -> Result<TcpStream> {
        let mut stream = TcpStream::connect_timeout(&self.0.into(), SILENCE)
            .with_context(|| self.0.to_string())?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(time + SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        stream.write_all(format!("{}\n", serde_json::to_string(order)?).as_bytes())?;
        Ok(stream)
    }

    /// From the first bytes that arrive to the last.
    fn sends(self, time: Duration) -> Result<f64> {
        let millis = u64::try_from(time.as_millis())?;
        let mut stream = self.order(&Order::Send { millis }, time)?;
        let mut bytes = vec![0; CHUNK_BYTES];
        ensure!(read(&mut stream, &mut bytes)? > 0, "the guest sent nothing");
        let (begun, mut got) = (Instant::now(), 0);
        loop {
            match read(&mut stream, &mut bytes)? {
                0 => break,
                len => got += len as u64,
            }
        }
        rate(got, begun.elapsed(), 1e6)
    }

    /// Until the guest has read all.
    fn receives(self, time: Duration) -> Result<f64> {
        let mut stream = self.order(&Order::Receive, time)?;
        let (zeroes, begun, mut sent) = (vec![0; CHUNK_BYTES], Instant::now(), 0);
        while begun.elapsed() < time {
            stream.write_all(&zeroes).context("sending to the guest")?;
            sent += zeroes.len() as u64;
        }
        stream.shutdown(Shutdown::Write)?;
        let got: u64 = answer(&stream)?.trim().parse().context("the guest's answer")?;
        let took = begun.elapsed();
        ensure!(got == sent, "the guest received {got} bytes of {sent}");
        rate(got, took, 1e6)
    }

    fn tcp_requests(self, time: Duration) -> Result<f64> {
        let mut stream = self.order(&Order::Echo, time)?;
        let (begun, mut answered, mut byte) = (Instant::now(), 0, [0]);
        while begun.elapsed() < time {
            stream.write_all(&byte).context("a request to the guest")?;
            ensure!(read(&mut stream, &mut byte)? == 1, "the guest ended the connection");
            answered += 1;
        }
        rate(answered, begun.elapsed(), 1.0)
    }

    /// The byte is the request's number, so an answer that comes late is not another's.
    fn udp_requests(self, time: Duration) -> Result<f64> {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        socket.connect(self.0)?;
        socket.set_read_timeout(Some(LOST))?;
        let (begun, mut answered, mut lost, mut number) = (Instant::now(), 0, 0, 0_u8);
        while begun.elapsed() < time || answered == 0 {
            number = number.wrapping_add(1);
            socket.send(&[number]).context("a datagram to the guest")?;
            if is_answered(&socket, number)? {
                (answered, lost) = (answered + 1, 0);
            } else {
                lost += 1;
                ensure!(lost < MOST_LOST, "{lost} datagrams in a row got no answer");
            }
        }
        rate(answered, begun.elapsed(), 1.0)
    }
}

fn rate(count: u64, took: Duration, unit: f64) -> Result<f64> {
    let rate = float(count) / unit / took.as_secs_f64();
    ensure!(rate.is_finite() && rate > 0.0, "expected traffic, got {count} in {took:?}");
    Ok(rate)
}

fn read(stream: &mut TcpStream, bytes: &mut [u8]) -> Result<usize> {
    loop {
        match stream.read(bytes) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            other => return other.context("the guest is silent"),
        }
    }
}

fn answer(stream: &TcpStream) -> Result<String> {
    let mut line = String::new();
    let mut reader = BufReader::new(stream).take(MAX_ANSWER_BYTES);
    reader.read_line(&mut line).context("the guest's answer")?;
    let is_whole = line.ends_with('\n');
    ensure!(is_whole, "the guest's answer: expected a line, got {} bytes", line.len());
    Ok(line)
}

fn is_answered(socket: &UdpSocket, number: u8) -> Result<bool> {
    let mut got = [0];
    loop {
        match socket.recv(&mut got) {
            Ok(1) if got == [number] => return Ok(true),
            Ok(_) => {}
            Err(e) => match e.kind() {
                ErrorKind::Interrupted => {}
                // Refused: an ICMP message, from a guest with a program that does not serve yet.
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::ConnectionRefused => {
                    return Ok(false);
                }
                _ => return Err(e).context("an answer of the guest"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_e2e::traffic::serve_on;
    use std::net::{Ipv4Addr, TcpListener};

    /// A guest's program, served by this process.
    fn guest() -> Peer {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let datagrams = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        std::thread::spawn(move || serve_on(&listener, datagrams));
        Peer(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
    }

    #[test]
    fn all_traffic_has_a_rate() {
        let peer = guest();
        for traffic in [Net::Sends, Net::Receives, Net::TcpRequests, Net::UdpRequests] {
            let rate = peer.rate(traffic, Duration::from_millis(20)).unwrap();
            assert!(rate > 0.0, "{traffic:?}");
        }
    }

    #[test]
    fn programs_run_in_the_guest_and_their_errors_come_back() {
        let (peer, time) = (guest(), Duration::from_secs(1));
        assert_eq!(peer.run("echo here; echo there >&2", time).unwrap(), "here\n");
        let error = peer.run("echo why >&2; exit 3", time).unwrap_err().to_string();
        assert!(error.contains("Some(3)") && error.contains("why"), "{error}");
    }

    #[test]
    fn a_guest_that_answers_without_an_end_of_line_has_not_answered() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        listener.accept().unwrap().0.write_all(b"4").unwrap();
        assert!(answer(&stream).is_err());
    }
}
