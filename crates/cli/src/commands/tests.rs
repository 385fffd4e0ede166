//! Tests of the command-line grammar.

use super::*;

fn parse(text: &str) -> Result<Command, clap::Error> {
    Args::try_parse_from(std::iter::once("dayfly").chain(text.split(' '))).map(|args| args.command)
}

#[test]
fn the_definition_is_consistent() {
    Args::command().debug_assert();
}

#[test]
fn what_follows_the_snapshot_is_the_programs() {
    for text in [
        "run web -- ls -la",
        "run web ls -la --help",
        "run -it -e A=1 -w /tmp -u nobody --timeout 30s --name x web sh -c true",
        "run --keep web true",
        "run web",
        "stop -t 30s web db",
        "stop --time 0 web",
        "start web db",
        "restart web",
        "restart -t 30s web db",
        "wait --format json web",
        "run --entrypoint /bin/sh web -c true",
        "exec -d web sleep 5",
        "exec -it web sh",
        "connect web 5000",
        "connect web 4294967295",
        "create web",
        "create --boot debian --memory 512M --cpus 4 --init /sbin/init",
        "bake debian -t web",
        "bake debian --cmd true -t web",
        "bake debian -t web -- python3 -c pass",
        "ps -aq",
        "ps --format json",
        "ps -f name=web --filter label=a=b -q",
        "stats",
        "stats web --format json",
        "snapshots",
        "snapshots -q",
        "snapshots rm a b",
        "snapshot web -t later",
        "colours web",
        "colours web --no-picture --format json",
        "colours web -o x.png --width 1024",
        "store stats",
        "store du --format json",
        "store verify",
        "store verify --format json a b",
        "store gc",
        "rm -f a b",
        "logs -f a",
        "logs --raw a 123",
        "exec --raw web true",
        "cp a:/x y",
        "inspect --timeline a",
        "image ls",
        "image build --debian bookworm --include python3,fio web",
        "image build --from ./root --free 1G web",
        "image build --from docker://localhost:5000/a/b:1 --size 4G web",
        "image inspect a/b:1",
        "image rm a b:1",
        "image pull a/b",
        "image tag a b:1",
        "images -q",
        "pull debian:12",
        "pull -q [::1]:5000/a/b:V1",
        "tag web localhost:5000/a/b:1",
        "rmi web a/b:1",
        "run --pull never a/b:1 true",
        "create --pull always a/b:1",
        "create --boot a/b:1 --pull missing",
        "bake a/b:1 -t web",
        "run -it -v .:/work -v data:/data:ro web sh",
        "create --volume data:/data web",
        "volume create data",
        "volume ls -q",
        "volume ls --format json --filter name=da",
        "volume rm a b",
        "kernel ls -q",
        "kernel fetch 6.1",
        "kernel fetch 6.12 --name new",
        "kernel add --from tree mine",
        "completions bash",
        "man /tmp",
    ] {
        assert!(parse(text).is_ok(), "{text}: {:?}", parse(text).err().map(|e| e.to_string()));
    }
}

#[test]
fn mistakes_are_refused() {
    for text in [
        "run",
        "run --entrypoint",
        "exec -d -i web cat",
        "connect web",
        "connect web 0",
        "connect web 4294967296",
        "connect web http",
        "create",
        "create web --memory 1G",
        "create web --boot debian",
        "bake debian",
        "bake debian -t Web",
        "bake debian -t web --cpus 17",
        "bake debian -t web --cpus 0",
        "bake debian -t web --memory lots",
        "bake debian -t web --cmd true -- true",
        "snapshots -q rm a",
        "colours",
        "colours web --width 0",
        "colours web --width 16385",
        "colours web --no-picture -o x.png",
        "store",
        "store verify Web",
        "store du web",
        "store gc web",
        "rm",
        "image build web",
        "pull",
        "pull A/b:1:2",
        "tag a",
        "rmi",
        "run --pull sometimes web",
        "run Web",
        "bake a/b: -t web",
        "image build --debian bookworm --from x web",
        "image build --from x --include python3 web",
    ] {
        assert!(parse(text).is_err(), "{text}");
    }
}

#[test]
fn a_vm_is_not_named_as_a_host_of_the_internet_or_as_an_address() {
    for command in ["create --name NAME s", "run --name NAME s true", "fork --name NAME vm"] {
        for bad in ["pypi.org", "www.example.com", "10.88.0.6", "localhost", "a..b"] {
            let Err(error) = parse(&command.replace("NAME", bad)) else {
                panic!("{command}: {bad}")
            };
            let error = error.to_string();
            assert!(error.contains("VM name") && error.contains(bad), "{error}");
            assert!(error.contains("choose another"), "{error}");
        }
        assert!(parse(&command.replace("NAME", "web-1")).is_ok(), "{command}");
    }
    // All other names may contain dots.
    for text in ["create --name a my.snapshot", "snapshot web -t v1.2", "fork --as v1.2 web"] {
        assert!(parse(text).is_ok(), "{text}");
    }
}

#[test]
fn an_update_changes_something_and_a_policy_is_checked_at_once() {
    for text in [
        "update --egress none web",
        "update --ttl 5m --egress example.org:443,10.0.0.0/8 web db",
        "create --egress internet base",
        "fork --egress *.example.org web",
        "bake debian -t base --egress none",
        "run --egress 192.0.2.0/24:icmp base -- true",
    ] {
        assert!(parse(text).is_ok(), "{text}");
    }
    for text in [
        "update web",
        "update --egress none",
        "create --egress none --closed base",
        "create --egress 10.0.0.1/8 base",
    ] {
        assert!(parse(text).is_err(), "{text}");
    }
    let wrong = parse("create --egress example.org:99999 base").unwrap_err().to_string();
    assert!(wrong.contains("egress rule \"example.org:99999\": expected TARGET"), "{wrong}");
}
