use super::*;

fn key(key: &str, request: &[u8]) -> RequestKey {
    RequestKey { key: key.into(), request: Digest::of(request) }
}

fn answer(bytes: usize) -> Answer {
    Answer { status: StatusCode::CREATED, kind: "application/json", body: vec![b'x'; bytes].into() }
}

fn first(requests: &Arc<Requests>, of: &RequestKey) -> (Ticket, Waiting, CancellationToken) {
    match requests.enter(of).unwrap() {
        Entered::First(ticket, waiting, token) => (ticket, waiting, token),
        other => panic!("{other:?}"),
    }
}

fn kept(requests: &Arc<Requests>, of: &RequestKey) -> bool {
    matches!(requests.enter(of), Ok(Entered::Kept(_)))
}

#[tokio::test]
async fn a_repetition_gets_the_first_answer_also_while_it_is_made() {
    let requests = Arc::new(Requests::default());
    let a = key("a", b"1");
    let (ticket, _waiting, token) = first(&requests, &a);
    let Ok(Entered::Again(mut again)) = requests.enter(&a) else { panic!() };
    ticket.finish(answer(3), true);
    assert_eq!(*again.answer().await.unwrap(), answer(3));
    assert!(kept(&requests, &a) && !token.is_cancelled());
    let refused = requests.enter(&key("a", b"2")).unwrap_err();
    assert_eq!(refused.0.code, ErrorCode::KeyReused, "{refused}");
    assert!(refused.0.message.contains("another request"), "{refused}");
}

#[tokio::test]
async fn the_work_is_cancelled_with_the_last_request_that_waits() {
    let requests = Arc::new(Requests::default());
    let a = key("a", b"1");
    let (old, waiting, token) = first(&requests, &a);
    let Ok(Entered::Again(again)) = requests.enter(&a) else { panic!() };
    drop(waiting);
    assert!(!token.is_cancelled(), "one still waits");
    drop(again);
    assert!(token.is_cancelled());
    // A new request begins anew, and the end of the old work leaves it alone.
    let (ticket, mut waiting, token) = first(&requests, &a);
    old.finish(answer(1), true);
    assert!(!token.is_cancelled());
    ticket.finish(answer(2), true);
    assert_eq!(*waiting.answer().await.unwrap(), answer(2));
    assert!(kept(&requests, &a));
}

#[tokio::test]
async fn a_failure_and_what_was_given_up_are_forgotten() {
    let requests = Arc::new(Requests::default());
    let a = key("a", b"1");
    let (ticket, mut waiting, _token) = first(&requests, &a);
    ticket.finish(answer(1), false);
    assert_eq!(*waiting.answer().await.unwrap(), answer(1));
    let (ticket, mut waiting, _token) = first(&requests, &a);
    drop(ticket);
    assert!(waiting.answer().await.unwrap_err().0.message.contains("given up"));
    // Another request may have the key then.
    first(&requests, &key("a", b"2"));
}

#[tokio::test(start_paused = true)]
async fn answers_are_bounded_in_number_bytes_and_time() {
    let requests = Arc::new(Requests::default());
    let end = |name: &str, bytes| first(&requests, &key(name, b"1")).0.finish(answer(bytes), true);
    for n in 0..=MOST {
        end(&format!("{n}"), 1);
    }
    assert!(!kept(&requests, &key("0", b"1")));
    assert!(kept(&requests, &key("1", b"1")) && kept(&requests, &key(&format!("{MOST}"), b"1")));
    for n in 0..=MOST_BYTES / LONGEST {
        end(&format!("long {n}"), LONGEST);
    }
    assert!(!kept(&requests, &key("long 0", b"1")) && kept(&requests, &key("long 1", b"1")));
    end("longer", LONGEST + 1);
    let error = requests.enter(&key("longer", b"1")).unwrap_err();
    assert!(error.0.message.contains("was carried out"), "{error}");
    tokio::time::advance(KEEP).await;
    first(&requests, &key("longer", b"1"));
    let inner = lock(&requests.0);
    assert_eq!((inner.ended.len(), inner.bytes), (0, 0));
}

#[tokio::test]
async fn vms_of_an_earlier_daemon_are_found_by_their_key() {
    let requests = Arc::new(Requests::default());
    let (a, vms) = (key("a", b"1"), [VmId::random(), VmId::random()]);
    for vm in vms {
        requests.adopt(&a, vm);
    }
    let Ok(Entered::Adopted(found)) = requests.enter(&a) else { panic!() };
    assert_eq!(found, vms);
    assert!(requests.enter(&key("a", b"2")).is_err());
    requests.forget(&a);
    let anew = first(&requests, &a);
    // Another repetition finds the VMs gone too.
    requests.forget(&a);
    assert!(matches!(requests.enter(&a), Ok(Entered::Again(_))));
    drop(anew);
}
