//! The guests' program: a small Python server that a warm-up starts and leaves running, and the
//! programs that send it requests.
//!
//! The server listens on vsock port [`PORT`]: one line in, one line of JSON out, until the peer
//! closes. The process that was running when the snapshot was taken answers; no process is started
//! for the answer. Inside the guest a request goes through pipes (a line into `/run/ask`, the
//! answer from `/run/answer`). That takes one `/bin/sh` and the same code as the port, so a request
//! by pipe in a warm-up or a recording also warms up the code for the port.

use dayfly_api::agent::ExecSpec;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// How often the checksum's hash is applied.
const ROUNDS: u32 = 200;

/// The vsock port that the server listens on.
pub const PORT: u32 = 5000;

/// The server. Python starts and imports once, in the warm-up; in a clone the server already waits
/// for connections.
const SERVER: &str = r#"
import hashlib, json, os, selectors, socket

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

class Peer:
    """One line in, one line out. After the line `echo`, whatever comes in goes out."""

    def __init__(self, stream):
        self.stream, self.heard, self.echo = stream, b"", False

    def hear(self):
        """False: the peer has closed."""
        try:
            piece = self.stream.recv(1 << 16)
            self.heard += piece
            while not self.echo and b"\n" in self.heard:
                line, self.heard = self.heard.split(b"\n", 1)
                if line.strip() == b"echo":
                    self.echo = True
                else:
                    self.stream.sendall(self.reply(line))
            if self.echo:
                self.stream.sendall(self.heard)
                self.heard = b""
        except OSError:
            return False
        return bool(piece)

    def reply(self, line):
        try:
            said = answer(line.decode().split())
        except Exception as e:
            said = {"error": repr(e)}
        return json.dumps(said).encode() + b"\n"

waiting = selectors.DefaultSelector()

def take():
    try:
        stream, _ = port.accept()
    except OSError:
        return
    peer = Peer(stream)

    def hear():
        if not peer.hear():
            waiting.unregister(stream)
            stream.close()
    waiting.register(stream, selectors.EVENT_READ, hear)

def asked():
    line = os.read(pipe, 4096)
    near, far = socket.socketpair()
    with near:
        near.sendall(line)
        Peer(far).hear()
        # Without the end of a line there is no answer.
        far.close()
        said = near.recv(1 << 16)
    with open("/run/answer", "wb") as out:
        out.write(said)

port = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
port.bind((socket.VMADDR_CID_ANY, PORT))
port.listen(64)
port.setblocking(False)
pipe = os.open("/run/ask", os.O_RDWR)
waiting.register(port, selectors.EVENT_READ, take)
waiting.register(pipe, selectors.EVENT_READ, asked)
with open("/run/answer", "w") as out:
    out.write("listening\n")
while True:
    for key, _ in waiting.select():
        key.data()
"#;

/// Sends a request and prints the answer, with builtin commands of `/bin/sh` only: no further
/// process. The pipe is also opened for writing, because the server closes its end after each
/// answer and `read` would otherwise see the end of the file.
const ASK: &str = r#"echo "$*" >/run/ask; read -r said <>/run/answer; printf '%s\n' "$said""#;

/// Keeps the program, and thereby an ephemeral VM, running until standard input ends.
const STAY: &str = "read -r end\n";

/// A guest that does not answer within this time counts as lost.
const TIMEOUT_MS: u64 = 60_000;

/// The server's text.
#[must_use]
pub fn server() -> String {
    // `SERVER` uses the names of these two constants.
    SERVER.replace("ROUNDS", &ROUNDS.to_string()).replace("PORT", &PORT.to_string())
}

/// A text for `/bin/sh` that starts the server and waits until it listens.
fn start() -> String {
    format!(
        "set -e\nmkfifo /run/ask /run/answer\ncat >/run/server.py <<'END'\n{}END\n\
         setsid python3 /run/server.py >/run/server.log 2>&1 </dev/null &\n\
         read -r said <>/run/answer\n",
        server()
    )
}

/// A text for `/bin/sh` that starts the server and sends it one request.
#[must_use]
pub fn warmup() -> String {
    format!("{}set -- sum 0\n{ASK}\n", start())
}

/// The program that runs [`warmup`].
#[must_use]
pub fn warmup_exec() -> ExecSpec {
    script(&warmup(), &[])
}

/// The program that starts the server, prints the line `listening` once the server listens, and
/// then runs until its connection ends.
#[must_use]
pub fn start_and_stay() -> ExecSpec {
    ExecSpec { stdin: true, ..script(&format!("{}printf '%s\\n' \"$said\"\n{STAY}", start()), &[]) }
}

/// The program that sends the server a request.
#[must_use]
pub fn ask(words: &[&str]) -> ExecSpec {
    ExecSpec { timeout_ms: Some(TIMEOUT_MS), ..script(ASK, words) }
}

/// A text for `/bin/sh` with arguments.
#[must_use]
pub fn script(text: &str, arguments: &[&str]) -> ExecSpec {
    let mut argv: Vec<String> = ["/bin/sh", "-c", text, "sh"].map(str::to_owned).into();
    argv.extend(arguments.iter().map(|a| (*a).to_owned()));
    ExecSpec { argv, ..ExecSpec::default() }
}

/// The server's answer to `sum`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Sum {
    /// Computed from the index; compare [`checksum`].
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
    /// Keys and values of all `keep` requests so far.
    pub kept: BTreeMap<String, String>,
    /// As in [`Sum`].
    pub started: String,
}

/// The checksum that the server must compute for `index`.
#[must_use]
pub fn checksum(index: usize) -> String {
    let mut value = format!("dayfly {index}").into_bytes();
    for _ in 0..ROUNDS {
        value = Sha256::digest(&value).to_vec();
    }
    hex::encode(value)
}
