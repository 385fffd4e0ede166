use super::server::{Reply, Server, Then};
use super::*;

#[tokio::test]
async fn a_blob_is_verified_and_fetched_once() {
    let whole = content(300_000);
    let wanted = blob(&whole);
    let sent = whole.clone();
    let server = Server::start(move |asked| Reply::range(asked, &sent)).await;
    let (_folder, cache) = cache();
    let (registry, image, done) = (client(), server.image("a/b:1"), AtomicU64::new(0));
    for times in 1..=2 {
        registry.blob(&image, &wanted, &cache, &done).await.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), times * wanted.size);
    }
    let asked = server.asked();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].target, format!("/v2/a/b/blobs/{}", wanted.digest));
    let empty = blob(b"");
    let server = Server::start(|_| Reply::ok("")).await;
    assert_eq!(fetched(&registry, &server, &empty).await.unwrap(), (Vec::new(), 0));
}

#[tokio::test]
async fn a_wrong_digest_names_blob_expected_and_got_and_leaves_nothing() {
    let (right, wrong) = (content(1000), content(1001)[1..].to_vec());
    let sent = wrong.clone();
    let server = Server::start(move |_| Reply::ok(&sent)).await;
    let (folder, cache) = cache();
    let (wanted, done) = (blob(&right), AtomicU64::new(0));
    let failed = client().blob(&server.image("a/b:1"), &wanted, &cache, &done).await;
    let error = failed.unwrap_err().to_string();
    let (expected, got) = (&wanted.digest, BlobDigest::of(&wrong));
    assert!(error.contains(&format!("blob {expected} of {}/a/b:1", server.host())), "{error}");
    assert!(error.contains(&format!("expected {expected}, got {got} of 1000 bytes")), "{error}");
    assert_eq!(server.asked().len(), 1);
    for kind in ["partial", "blobs"] {
        assert_eq!(std::fs::read_dir(folder.path().join(kind)).unwrap().count(), 0, "{kind}");
    }
}

#[tokio::test]
async fn a_blob_is_exactly_as_long_as_its_descriptor_says() {
    let whole = content(10_000);
    let wanted = blob(&whole);
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunk = format!("1000\r\n{}\r\n", "x".repeat(4096));
    for (reply, what) in [
        (Reply::ok(content(10_001)), "Content-Length: expected 10000"),
        (Reply::ok(content(9_999)), "Content-Length: expected 10000"),
        (Reply::raw(format!("{chunked}{chunk}")).then(Then::Close), "got an end after 4096"),
        (Reply::raw(format!("{chunked}{}", chunk.repeat(2))).then(Then::Again), "at most 10000"),
        (Reply::raw([b"HTTP/1.1 200 OK\r\n\r\n", &content(20_000)[..]].concat()), "at most 10000"),
    ] {
        let server = Server::start(move |_| reply.clone()).await;
        let error = fetched(&client(), &server, &wanted).await.unwrap_err().to_string();
        let expected = error.contains(what) || error.contains("error reading a body");
        assert!(expected, "{what}: {error}");
    }
}

#[tokio::test]
async fn a_cut_download_goes_on_where_it_was_cut() {
    let whole = content(500_000);
    let wanted = blob(&whole);
    let sent = whole.clone();
    let server = Server::start(move |asked| {
        let mut reply = Reply::range(asked, &sent);
        // Each connection sends 150,000 bytes.
        let head = reply.bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        reply.bytes.truncate(head + 150_000);
        reply
    })
    .await;
    let (bytes, done) = fetched(&client(), &server, &wanted).await.unwrap();
    assert!(bytes == whole && done == wanted.size);
    let ranges: Vec<usize> = server.asked().iter().map(|asked| asked.from()).collect();
    assert_eq!(ranges, [0, 150_000, 300_000, 450_000]);
}

#[tokio::test]
async fn a_registry_without_ranges_sends_the_whole_again_a_few_times() {
    let whole = content(300_000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let times = AtomicU64::new(0);
    let server = Server::start(move |_| {
        let mut reply = Reply::ok(&sent);
        if times.fetch_add(1, Ordering::SeqCst) == 0 {
            reply.bytes.truncate(100_000);
        }
        reply
    })
    .await;
    let (bytes, done) = fetched(&client(), &server, &wanted).await.unwrap();
    assert!(bytes == whole && done == wanted.size);
    assert_eq!(server.asked().len(), 2);
    // It never sends the whole, and each time more.
    let (times, sent) = (AtomicU64::new(0), whole.clone());
    let server = Server::start(move |_| {
        let mut reply = Reply::ok(&sent);
        let times = usize::try_from(times.fetch_add(1, Ordering::SeqCst)).unwrap();
        reply.bytes.truncate(70_000 * (times % 4 + 1));
        reply
    })
    .await;
    fetched(&client(), &server, &wanted).await.unwrap_err();
    assert!(server.asked().len() <= 12, "{}", server.asked().len());
}

#[tokio::test]
async fn a_byte_at_a_time_comes_to_an_end() {
    let whole = content(1000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let server = Server::start(move |asked| {
        let mut reply = Reply::range(asked, &sent);
        let head = reply.bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        reply.bytes.truncate(head + 1);
        reply
    })
    .await;
    let error = fetched(&client(), &server, &wanted).await.unwrap_err();
    assert!(matches!(error, RegistryError::Broken { .. }), "{error}");
    assert_eq!(server.asked().len(), 3);
}

#[tokio::test]
async fn another_range_than_the_one_asked_for_is_refused() {
    let whole = content(200_000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let server = Server::start(move |asked| {
        if asked.from() == 0 {
            let mut reply = Reply::ok(&sent);
            reply.bytes.truncate(100_000);
            return reply;
        }
        let range = "Content-Range: bytes 5-199999/200000\r\n";
        Reply::new("206 Partial Content", range, &sent[5..])
    })
    .await;
    let error = fetched(&client(), &server, &wanted).await.unwrap_err().to_string();
    assert!(error.contains("Content-Range: expected bytes 9"), "{error}");
}

#[tokio::test]
async fn bytes_of_a_killed_process_that_do_not_fit_are_fetched_again() {
    let whole = content(100_000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let server = Server::start(move |asked| Reply::range(asked, &sent)).await;
    let (folder, cache) = cache();
    let partial = folder.path().join("partial");
    std::fs::create_dir_all(&partial).unwrap();
    let (registry, image) = (client(), server.image("a"));
    let partial = partial.join(format!("{}.{}", wanted.digest.hex(), wanted.size));
    for beginning in [&whole[..40_000], &[7; 40_000], &[7; 100_000], &[7; 200_000]] {
        std::fs::write(&partial, beginning).unwrap();
        let done = AtomicU64::new(0);
        registry.blob(&image, &wanted, &cache, &done).await.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), wanted.size);
        let path = folder.path().join("blobs").join(wanted.digest.hex());
        assert!(std::fs::read(path).unwrap() == whole);
        cache.forget(&wanted.digest);
    }
    let ranges: Vec<usize> = server.asked().iter().map(|asked| asked.from()).collect();
    assert_eq!(ranges, [40_000, 40_000, 0, 0, 0]);
}

#[tokio::test]
async fn a_blob_that_stalls_ends_and_keeps_what_has_arrived() {
    let whole = content(100_000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let server = Server::start(move |asked| {
        let mut reply = Reply::range(asked, &sent);
        if asked.from() == 0 {
            reply.bytes.truncate(60_000);
            return reply.then(Then::Stall);
        }
        reply
    })
    .await;
    let (_folder, cache) = cache();
    let (image, done) = (server.image("a"), AtomicU64::new(0));
    // On a busy host, the silence may be over before the first bytes arrive.
    while done.load(Ordering::Relaxed) == 0 {
        let error = hasty().blob(&image, &wanted, &cache, &done).await.unwrap_err();
        assert!(matches!(error, RegistryError::Silent { .. }), "{error}");
    }
    client().blob(&image, &wanted, &cache, &AtomicU64::new(0)).await.unwrap();
    assert!(server.asked().last().unwrap().from() > 0);
}

#[tokio::test]
async fn concurrent_pulls_of_a_blob_fetch_it_once() {
    let whole = content(200_000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let server = Server::start(move |asked| Reply::range(asked, &sent)).await;
    let (_folder, cache) = cache();
    let (first, second) = (client(), client());
    let (image, done) = (server.image("a"), AtomicU64::new(0));
    let (one, two) = tokio::join!(
        first.blob(&image, &wanted, &cache, &done),
        second.blob(&image, &wanted, &cache, &done)
    );
    one.unwrap();
    two.unwrap();
    assert_eq!(done.load(Ordering::Relaxed), 2 * wanted.size);
    assert_eq!(server.asked().len(), 1);
}

#[tokio::test]
async fn a_mirror_with_wrong_bytes_gives_way_to_the_registry() {
    let whole = content(1000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let registry = Server::start(move |asked| Reply::range(asked, &sent)).await;
    let mirror = Server::start(|_| Reply::ok([7; 1000])).await;
    let text = format!("[registry.\"{}\"]\nmirrors = [\"{}\"]", registry.host(), mirror.host());
    let client = client_with(config(&text), DockerConfig::none());
    let (bytes, done) = fetched(&client, &registry, &wanted).await.unwrap();
    assert!(bytes == whole && done == 1000);
}

#[tokio::test]
async fn bytes_of_mirrors_that_send_too_much_are_not_mixed_with_those_of_the_registry() {
    let whole = content(10_000);
    let (wanted, sent) = (blob(&whole), whole.clone());
    let registry = Server::start(move |asked| Reply::range(asked, &sent)).await;
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunks = format!("1000\r\n{}\r\n", "x".repeat(4096)).repeat(3);
    let garbage = format!("{head}{chunks}0\r\n\r\n");
    // More mirrors than one endpoint's resets.
    let mut mirrors = Vec::new();
    for _ in 0..5 {
        let garbage = garbage.clone();
        mirrors.push(Server::start(move |_| Reply::raw(garbage.clone())).await);
    }
    let names: Vec<String> = mirrors.iter().map(Server::host).collect();
    let text = format!("[registry.\"{}\"]\nmirrors = {names:?}", registry.host());
    let client = client_with(config(&text), DockerConfig::none());
    let (bytes, done) = fetched(&client, &registry, &wanted).await.unwrap();
    assert!(bytes == whole && done == wanted.size);
    let ranges: Vec<usize> = registry.asked().iter().map(|asked| asked.from()).collect();
    assert!(ranges.len() == 2 && ranges[0] > 0 && ranges[1] == 0, "{ranges:?}");
}

#[tokio::test]
async fn a_blob_that_is_not_there_is_named() {
    let server = Server::start(|_| Reply::status("404 Not Found")).await;
    let wanted = blob(b"x");
    let error = fetched(&client(), &server, &wanted).await.unwrap_err().to_string();
    assert!(error.contains(&format!("blob {}", wanted.digest)), "{error}");
}
