//! The clock stands still while anything else can happen.

use super::super::tests::{Served, served};
use super::UNUSED;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;

/// Offers a folder, says `more`, and returns what the daemon says, and when.
async fn offered(served: &Served, more: &[u8]) -> (String, Duration) {
    let mut client = UnixStream::connect(&served.socket).await.unwrap();
    let token = "0123456789abcdef0123456789abcdef";
    let head = format!(
        "POST /v1/volumes/offers/{token} HTTP/1.1\r\nHost: d\r\nContent-Length: 0\r\n\
         Connection: upgrade\r\nUpgrade: dayfly-volume\r\n\r\n"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(client.read_u8().await.unwrap());
    }
    assert!(answer.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&answer));
    client.write_all(more).await.unwrap();
    let since = Instant::now();
    let mut said = String::new();
    client.read_to_string(&mut said).await.unwrap();
    (said, since.elapsed())
}

#[tokio::test(start_paused = true)]
async fn an_offer_without_a_vm_ends_soon_after_its_command() {
    let served = served();
    let (said, waited) = offered(&served, b"").await;
    assert!(said == "end\n" && waited >= UNUSED, "{said:?} after {waited:?}");
    let (said, waited) = offered(&served, b"\n").await;
    assert!(said == "end\n" && waited < UNUSED / 10, "{said:?} after {waited:?}");
    let (said, _) = offered(&served, b"x").await;
    assert_eq!(said, "", "a client that breaks the protocol");
}
