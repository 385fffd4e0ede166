//! The commands of README and of the documents, as they are printed.

use crate::harness::{BASE, IMAGE, bin, home, machine, ok, world};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const README: &str = include_str!("../../../../README.md");
/// Documents whose commands go on where README's tour ends.
const DOCUMENTS: [&str; 2] =
    [include_str!("../../../../docs/volumes.md"), include_str!("../../../../docs/http-api.md")];

/// The commands of the first block of shell commands in `text`, with continued lines joined.
fn commands(text: &str) -> Vec<String> {
    let block = text.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    let joined = block.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

fn tour() -> Vec<String> {
    let commands = commands(README.split("## Tour").nth(1).unwrap());
    assert!(commands.len() >= 15, "{commands:#?}");
    commands.into_iter().filter(|line| !line.starts_with("make build")).collect()
}

/// Runs a line as a user does, on a terminal of 80 columns in the project's folder. Returns what
/// the terminal shows.
fn typed(line: &str) -> String {
    eprintln!("e2e: tour: {line}");
    let path = format!("{}:{}", bin().display(), std::env::var("PATH").unwrap());
    let mut child = Command::new("script")
        .args(["--quiet", "--return", "--command"])
        .arg(format!("stty cols 80 rows 24; {line}"))
        .arg("/dev/null")
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .env("PATH", path)
        .env_remove("DAYFLY_HOST")
        .envs(
            [("DAYFLY_HOME", "home"), ("DAYFLY_RUN", "run"), ("DAYFLY_STATE", "state")]
                .map(|(name, folder)| (name, home().join(folder))),
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // For the line that starts bash.
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"exit\n").unwrap();
    let output = child.wait_with_output().unwrap();
    drop(input);
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{line}\n{shown}");
    for (command, word) in
        [("hello from", "hello from a clone"), ("http://web", "200"), ("curl", "\"id\"")]
    {
        assert!(!line.contains(command) || shown.contains(word), "{line}\n{shown}");
    }
    // On a terminal of the usual width no table wraps.
    if ["dayfly ps", "dayfly volume ls"].contains(&line) {
        assert!(shown.lines().all(|row| row.chars().count() <= 80), "{shown}");
    }
    shown
}

#[test]
#[ignore = "long"]
fn the_tour_works_as_printed() {
    let world = world();
    for line in tour() {
        typed(&line);
    }
    let socket = if machine() {
        dayfly_machine::Machine::open(&home().join("home")).unwrap().api_socket()
    } else {
        home().join("run/dayflyd.sock")
    };
    let socket = socket.display().to_string();
    for line in DOCUMENTS.iter().flat_map(|text| commands(text)) {
        typed(&line.replace("/run/dayfly/dayflyd.sock", &socket));
    }
    world.remove_all();
    for volume in ok(&["volume", "ls", "-q"]).lines() {
        ok(&["volume", "rm", volume]);
    }
    for snapshot in ok(&["snapshots", "-q"]).lines().filter(|name| !name.starts_with("e2e-")) {
        ok(&["snapshots", "rm", snapshot]);
    }
    ok(&["image", "rm", "debian"]);
    world.clean();
}

/// What the tour builds and bakes takes minutes. The rest of it, with the snapshot of the tests;
/// other tests have a web server, and look at all memory and at the whole store.
#[test]
fn the_tour_works_with_a_snapshot_that_is_there() {
    let world = world();
    let slow = ["image build", "run debian", "bake", "--network", "colours", "verify"];
    let lines: Vec<String> =
        tour().into_iter().filter(|line| slow.iter().all(|word| !line.contains(word))).collect();
    assert!(lines.len() >= 8, "{lines:#?}");
    for line in lines {
        // VM web is of a line with a network.
        typed(&line.replace("warm", BASE).replace("a web c", "a c"));
    }
    ok(&["snapshots", "rm", "later"]);
    assert_eq!(ok(&["snapshots", "-q"]), BASE);
    assert_eq!(ok(&["image", "ls", "-q"]), IMAGE);
    world.clean();
}
