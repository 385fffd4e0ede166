//! README's tour, as it is printed.

use crate::harness::{bin, home, ok, world};
use std::io::Write;
use std::process::{Command, Stdio};

/// The commands of README's tour, with continued lines joined.
fn commands(readme: &str) -> Vec<String> {
    let tour = readme.split("## Tour").nth(1).unwrap();
    let block = tour.split("```").nth(1).unwrap().strip_prefix("sh\n").unwrap();
    let joined = block.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// Runs a line as a user does, on a terminal. Returns what the terminal shows.
fn typed(line: &str) -> (bool, String) {
    let path = format!("{}:{}", bin().display(), std::env::var("PATH").unwrap());
    let mut child = Command::new("script")
        .args(["--quiet", "--return", "--command"])
        .arg(format!("stty cols 80 rows 24; {line}"))
        .arg("/dev/null")
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
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
#[ignore = "long"]
fn readmes_tour_works_as_printed() {
    let world = world();
    let readme = include_str!("../../../../README.md");
    let commands = commands(readme);
    assert!(commands.len() >= 15, "{commands:#?}");
    for line in &commands {
        if line.starts_with("make build") {
            continue;
        }
        eprintln!("e2e: tour: {line}");
        let (success, shown) = typed(line);
        assert!(success, "{line}\n{shown}");
        for (command, word) in [("hello from", "hello from a clone"), ("http://web", "200")] {
            assert!(!line.contains(command) || shown.contains(word), "{line}\n{shown}");
        }
        // On a terminal of the usual width no table wraps.
        if line == "dayfly ps" {
            assert!(shown.lines().all(|row| row.chars().count() <= 80), "{shown}");
        }
    }
    for snapshot in ok(&["snapshots", "-q"]).lines().filter(|name| !name.starts_with("e2e-")) {
        ok(&["snapshots", "rm", snapshot]);
    }
    ok(&["image", "rm", "debian"]);
    world.clean();
}
