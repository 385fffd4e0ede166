//! A request with an `Idempotency-Key` whose daemon is killed before the answer, and its repetition
//! to the next daemon.

use crate::guest;
use crate::testbed::Testbed;
use anyhow::{Context, Result, ensure};
use dayfly_api::types::{Forked, Vm};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Sends a POST with a key, and returns the answer's status and body.
async fn post(bed: &Testbed, path: &str, key: &str, body: &str) -> Result<(u16, String)> {
    let mut stream = UnixStream::connect(bed.run().join("dayflyd.sock")).await?;
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: d\r\nConnection: close\r\nIdempotency-Key: \"{key}\"\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    Ok((head.split(' ').nth(1).context("no status")?.parse()?, body.to_owned()))
}

/// Sends a request whose daemon kills itself at `point`, and starts the next daemon.
async fn killed(bed: &mut Testbed, point: &str, path: &str, key: &str, body: &str) -> Result<()> {
    bed.arm(point)?;
    ensure!(post(bed, path, key, body).await.is_err(), "{point}: there was an answer");
    bed.died()?;
    bed.start().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_repeated_after_a_kill_creates_nothing_twice() -> Result<()> {
    let mut bed = guest::testbed().await?;
    let create = format!(r#"{{"source":{{"snapshot":"{}"}}}}"#, guest::BASE);

    // The record is there: the VM is the answer.
    killed(&mut bed, "daemon.create.recorded:1", "/v1/vms", "one", &create).await?;
    let made = bed.client.vms(true).await?;
    ensure!(made.len() == 1, "expected one VM, got {}", made.len());
    for _ in 0..2 {
        let (status, body) = post(&bed, "/v1/vms", "one", &create).await?;
        ensure!(status == 201, "{status}: {body}");
        let vm: Vm = serde_json::from_str(&body)?;
        ensure!(vm.id == made[0].id, "another VM: {body}");
    }
    let other = create.replace("}}", r#"},"labels":{"a":"b"}}"#);
    let (status, body) = post(&bed, "/v1/vms", "one", &other).await?;
    ensure!(status == 422 && body.contains("key_reused"), "{status}: {body}");
    let parent = made[0].id.to_string();
    let fork = format!("/v1/vms/{parent}/fork");

    // The clones are not committed: the next daemon removes them, and the repetition makes two.
    let two = r#"{"count":2}"#;
    killed(&mut bed, "daemon.fork.children:1", &fork, "two", two).await?;
    ensure!(bed.client.vms(true).await?.len() == 1, "clones of an unanswered fork are left");
    let (status, body) = post(&bed, &fork, "two", two).await?;
    ensure!(status == 201, "{status}: {body}");
    ensure!(bed.client.vms(true).await?.len() == 3, "{body}");

    // They are committed: they are the answer.
    killed(&mut bed, "daemon.fork.committed:1", &fork, "three", two).await?;
    ensure!(bed.client.vms(true).await?.len() == 5, "committed clones are gone");
    let (status, body) = post(&bed, &fork, "three", two).await?;
    let forked: Forked = serde_json::from_str(&body).with_context(|| format!("{status}"))?;
    ensure!(forked.items.len() == 2 && bed.client.vms(true).await?.len() == 5, "{body}");
    // The clones do not have the key of the VM that they were forked from.
    let (_, body) = post(&bed, "/v1/vms", "one", &create).await?;
    ensure!(serde_json::from_str::<Vm>(&body)?.id == made[0].id, "{body}");
    for vm in bed.client.vms(true).await? {
        bed.client.remove_vm(&vm.id.to_string(), true).await?;
    }
    bed.stop()
}
