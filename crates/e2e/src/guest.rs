//! What runs in the guests: a small Python server that a warm-up leaves running, and how it is asked.
//!
//! The server reads one line at a time from the pipe `/run/ask` and writes one line of JSON to the pipe `/run/answer`. Asking
//! takes one `/bin/sh` and nothing else, so that what is measured is the clone, not the asking.

use dayfly_api::agent::ExecSpec;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// How often the checksum's hash is applied.
const ROUNDS: u32 = 200;

/// The server. Python starts and imports once, in the warm-up; a clone finds it waiting in `open`.
const SERVER: &str = r#"
import hashlib, json, os, socket

started = os.getrandom(16).hex()
kept = {}

def checksum(index):
    value = b"dayfly %d" % index
    for _ in range(ROUNDS):
        value = hashlib.sha256(value).digest()
    return value.hex()

def answer(words):
    if words[0] == "sum":
        with open("/etc/machine-id") as f:
            machine_id = f.read().strip()
        return {"checksum": checksum(int(words[1])), "hostname": socket.gethostname(),
                "machine_id": machine_id, "random": os.getrandom(32).hex(), "started": started}
    if words[0] == "keep":
        kept[words[1]] = words[2]
    return {"kept": kept, "started": started}

while True:
    with open("/run/ask") as ask:
        line = ask.readline()
    try:
        said = answer(line.split())
    except Exception as e:
        said = {"error": repr(e)}
    with open("/run/answer", "w") as out:
        out.write(json.dumps(said) + "\n")
"#;

/// Asks, and prints the answer. Only the shell's own commands: no further process.
const ASK: &str = r#"echo "$*" >/run/ask; read -r said </run/answer; printf '%s\n' "$said""#;

/// Keeps the program, and with it an ephemeral VM, until its standard input ends.
const STAY: &str = "\nread -r end\n";

/// A guest that does not answer within this is lost.
const PATIENCE_MS: u64 = 60_000;

/// A text for `/bin/sh` that starts the server and has it answer once.
#[must_use]
pub fn warmup() -> String {
    let server = SERVER.replace("ROUNDS", &ROUNDS.to_string());
    format!(
        "set -e\nmkfifo /run/ask /run/answer\ncat >/run/server.py <<'END'\n{server}END\n\
         setsid python3 /run/server.py >/run/server.log 2>&1 </dev/null &\n\
         set -- sum 0\n{ASK}\n"
    )
}

/// The program that runs [`warmup`].
#[must_use]
pub fn warmup_exec() -> ExecSpec {
    shell(&warmup(), &[])
}

/// The program that runs [`warmup`] and then stays until its connection ends.
#[must_use]
pub fn warmup_and_stay() -> ExecSpec {
    ExecSpec { stdin: true, ..shell(&(warmup() + STAY), &[]) }
}

/// The program that asks the server and then stays until its connection ends.
#[must_use]
pub fn ask_and_stay(words: &[&str]) -> ExecSpec {
    ExecSpec { stdin: true, ..shell(&format!("{ASK}{STAY}"), words) }
}

/// The program that asks the server.
#[must_use]
pub fn ask(words: &[&str]) -> ExecSpec {
    ExecSpec { timeout_ms: Some(PATIENCE_MS), ..shell(ASK, words) }
}

/// A text for `/bin/sh` with arguments.
#[must_use]
pub fn shell(text: &str, arguments: &[&str]) -> ExecSpec {
    let mut argv: Vec<String> = ["/bin/sh", "-c", text, "sh"].map(str::to_owned).into();
    argv.extend(arguments.iter().map(|a| (*a).to_owned()));
    ExecSpec { argv, ..ExecSpec::default() }
}

/// The server's answer to `sum`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Sum {
    /// What it computed from the index.
    pub checksum: String,
    /// The guest's host name.
    pub hostname: String,
    /// The guest's /etc/machine-id.
    pub machine_id: String,
    /// 32 bytes that the guest's kernel gave at this moment, hexadecimal.
    pub random: String,
    /// Drawn when the server started: the same in all clones of one bake.
    pub started: String,
}

/// The server's answer to anything else.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Kept {
    /// What it was told to keep in its memory.
    pub kept: BTreeMap<String, String>,
    /// As in [`Sum`].
    pub started: String,
}

/// What the server must compute for `index`.
#[must_use]
pub fn checksum(index: usize) -> String {
    let mut value = format!("dayfly {index}").into_bytes();
    for _ in 0..ROUNDS {
        value = Sha256::digest(&value).to_vec();
    }
    hex::encode(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// The server's own text, run by this host's Python if it has one, gives what [`checksum`] expects.
    #[test]
    fn both_sides_compute_the_same() {
        let function = SERVER.replace("ROUNDS", &ROUNDS.to_string());
        let until = function.find("def answer").expect("the function after checksum");
        let text = format!("{}\nprint(checksum(7), end='')\n", &function[..until]);
        let python = Command::new("python3").arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let Ok(mut python) = python else { return };
        python.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("a reader");
        let out = python.wait_with_output().expect("an end");
        assert_eq!(String::from_utf8_lossy(&out.stdout), checksum(7));
    }
}
