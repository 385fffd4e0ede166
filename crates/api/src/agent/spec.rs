//! A program that is asked for.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A program to run in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecSpec {
    /// Program and arguments. The program is looked up in the PATH of `env`, or else of the agent.
    pub argv: Vec<String>,
    /// Variables in addition to the image's, and to the agent's own: PATH, HOME, and TERM if there
    /// is a pty.
    pub env: BTreeMap<String, String>,
    /// Working directory. If empty, the image's, or else the user's home, or `/` if the home is
    /// missing.
    pub cwd: String,
    /// Whether a missing working directory is made, as the daemon asks for the image's.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub make_cwd: bool,
    /// `name`, `uid`, `name:group` or `uid:gid`. If empty, the image's user, or else root.
    pub user: String,
    /// If set, the program gets a pseudo-terminal of this size, and its standard error arrives with
    /// its standard output.
    pub pty: Option<WindowSize>,
    /// If set, the program's process group is killed after this many milliseconds.
    pub timeout_ms: Option<u64>,
    /// Whether `Stdin` frames will follow. Otherwise the program reads from /dev/null.
    pub stdin: bool,
    /// Whether the program and its children survive the end of the connection. Its output is then
    /// read by its id.
    pub detach: bool,
    /// Silence in milliseconds after which the daemon asks the agent whether it still answers. If
    /// two answers in a row are missing, and the VM is not paused, the wait for the program ends
    /// with an error. 0 turns the check off; without a value it is 30 s. The agent ignores it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub liveness_ms: Option<u64>,
    /// Announces `Strings` frames, which have `argv` and `env`. Not part of the API's JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(ignore))]
    pub strings: Option<Strings>,
}

/// A terminal's size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WindowSize {
    /// Lines of text.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

/// What `Strings` frames follow a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strings {
    /// The number of arguments among the strings.
    pub arguments: u32,
    /// The length of all strings in bytes, NULs included.
    pub bytes: u32,
}
