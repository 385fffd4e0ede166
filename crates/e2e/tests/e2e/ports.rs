//! Connections to the vsock port of a program that was running when the snapshot was taken.

use crate::harness::{
    BASE, dayfly, fed, home, inspect, machine, ok, refused, sh, start, until, wait, world,
};
use dayfly_api::client::Client;
use dayfly_api::types::{ConnectRequest, CreateRequest, Lifetime, NetworkRequest, Source};
use dayfly_e2e::guest::{self, Sum};
use dayfly_e2e::setup;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};

const PORT: &str = "5000";

#[test]
fn ports_reach_the_program_of_the_snapshot() {
    assert_eq!(PORT, guest::PORT.to_string());
    let world = world();
    ok(&["create", "--name", "one", BASE]);
    ok(&["create", "--name", "two", BASE]);
    let ask = |vm: &str, question: &str| {
        let got = fed(&["connect", vm, PORT], question.as_bytes());
        assert_eq!((got.code, got.err.as_str()), (0, ""), "{}", got.out);
        got.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let sums = ["one", "two"].map(|vm| {
        let lines = ask(vm, "sum 7\nsum 8\n");
        let sums: Vec<Sum> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(sums.len(), 2, "{lines:?}");
        assert_eq!(
            (&*sums[0].checksum, &*sums[1].checksum),
            (&*guest::checksum(7), &*guest::checksum(8))
        );
        assert_eq!(sums[0].hostname, vm);
        sums
    });
    assert_eq!(sums[0][0].started, sums[1][0].started, "both are the baked program");
    assert_ne!(sums[0][0].random, sums[1][0].random);
    // The pipe reaches the same process.
    let line = sh("one", "echo sum 7 >/run/ask; cat /run/answer");
    assert_eq!(serde_json::from_str::<Sum>(&line).unwrap().started, sums[0][0].started);
    world.clean();
}

#[test]
fn ports_carry_a_mebibyte_whole_and_several_connections_at_once() {
    let world = world();
    ok(&["create", "--name", "echo", BASE]);
    let text: Vec<u8> =
        (0..1u32 << 20).map(|i| u8::try_from((i ^ (i >> 11)) % 26).unwrap() + b'a').collect();
    // A connection that stays open, and whose answers come before its input ends.
    let mut open = start(&["connect", "echo", PORT]);
    let mut input = open.stdin.take().unwrap();
    input.write_all(b"sum 1\n").unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(open.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    assert!(line.contains(&guest::checksum(1)), "{line}");
    let got = fed(&["connect", "echo", PORT], &[b"echo\n", &text[..]].concat());
    assert_eq!(got.code, 0, "{}", got.err);
    assert!(got.out.as_bytes() == text, "{} bytes came back of {}", got.out.len(), text.len());
    input.write_all(b"sum 2\n").unwrap();
    line.clear();
    output.read_line(&mut line).unwrap();
    assert!(line.contains(&guest::checksum(2)), "{line}");
    // The end of the VM is the end of the connection.
    ok(&["rm", "-f", "echo"]);
    line.clear();
    assert_eq!(output.read_line(&mut line).unwrap(), 0, "{line}");
    drop(input);
    assert_eq!(wait(open).code, 0);
    world.clean();
}

#[test]
fn ports_that_cannot_be_reached_are_refused_with_the_reason() {
    let world = world();
    ok(&["create", "--name", "web", BASE]);
    refused(&["connect", "web", "5001"], &["VM web", "port 5001", "listen"]);
    refused(&["connect", "web", "1024"], &["port 1024", "agent"]);
    refused(&["connect", "web", "1025"], &["port 1025", "agent"]);
    refused(&["connect", "absent", PORT], &["absent"]);
    ok(&["pause", "web"]);
    refused(&["connect", "web", PORT], &["paused", "running"]);
    ok(&["unpause", "web"]);
    let got = fed(&["connect", "web", PORT], b"sum 3\n");
    assert!(got.code == 0 && got.out.contains(&guest::checksum(3)), "{got:?}");
    // The end of the program is the end of its connections.
    let mut open = start(&["connect", "web", PORT]);
    let input = open.stdin.take();
    let find = "for p in /proc/[0-9]*; do \
                tr '\\0' ' ' <$p/cmdline | grep -q '^python3 /run/server.py' && echo $p; \
                done; true";
    let server = sh("web", find);
    // Two sockets: the one that listens, and the connection.
    until("a connection", || sh("web", &format!("ls -l {server}/fd | grep -c socket")) == "2");
    sh("web", &format!("kill {}", server.trim_start_matches("/proc/")));
    let ended = wait(open);
    drop(input);
    assert_eq!((ended.code, ended.out.as_str()), (0, ""), "{}", ended.err);
    // The process is gone only after all its sockets are closed.
    sh("web", &format!("while [ -e {server} ]; do sleep 0.05; done"));
    refused(&["connect", "web", PORT], &["port 5000", "listen"]);
    assert_eq!(dayfly(&["kill", "web"]).code, 0);
    assert_eq!(inspect("web")["vm"]["state"], "exited");
    refused(&["connect", "web", PORT], &["exited", "running"]);
    world.clean();
}

#[test]
fn ports_of_clones_that_live_as_long_as_their_connection() {
    let world = world();
    let socket = if machine() {
        dayfly_machine::Machine::open(&home().join("home")).unwrap().api_socket()
    } else {
        home().join("run/dayflyd.sock")
    };
    let client = Client::new(socket);
    let request = |name: &str, port, keep| ConnectRequest {
        create: CreateRequest {
            source: Source::Snapshot(BASE.parse().unwrap()),
            name: Some(name.parse().unwrap()),
            labels: BTreeMap::from([("what".to_owned(), "schön".to_owned())]),
            forks: 0,
            lifetime: Lifetime::UNLIMITED,
            network: NetworkRequest::default(),
            volumes: Vec::new(),
            limits: Default::default(),
            vcpus: None,
        },
        port,
        keep,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for (name, keep) in [("brief", false), ("kept", true)] {
            let mut connection =
                client.run_connected(&request(name, guest::PORT, keep)).await.unwrap();
            assert_eq!((connection.vm.name.as_str(), connection.vm.ephemeral), (name, !keep));
            assert_eq!(connection.vm.labels["what"], "schön");
            let line = setup::ask(&mut connection, &["sum", "9"]).await.unwrap();
            let sum: Sum = serde_json::from_str(&line).unwrap();
            assert_eq!((&*sum.checksum, &*sum.hostname), (&*guest::checksum(9), name));
            drop(connection);
            if keep {
                assert_eq!(inspect(name)["vm"]["state"], "running");
            } else {
                until("the end of the VM", || ok(&["ps", "-aq"]).is_empty());
            }
        }
        world.remove_all();
        // If no program listens, no VM stays, although the request says `keep`.
        let refused = client.run_connected(&request("silent", 5001, true)).await.unwrap_err();
        assert!(refused.to_string().contains("port 5001"), "{refused}");
        until("the end of the VM", || ok(&["ps", "-aq"]).is_empty());
    });
    world.clean();
}
