//! Programs of the image that make a clone what it is to be, before anything is served: `/etc/dayfly/clone.d/*` (Kaleidoscope, section 6.2.2: the
//! reconfiguration hook).
//!
//! They run one after the other, by name, as root, with `DAYFLY_CLONE_ID`, `DAYFLY_CLONE_NUMBER` (0 where it is no clone of a machine that was forked),
//! `DAYFLY_HOSTNAME` and, where it has a network, `DAYFLY_ADDRESS` (IPv4, the machine's own by then); what they print goes to the console. What begins with `.`, ends with `~` or cannot be executed is no hook. All steps of the identity
//! but the last are done by then, and it fails where a hook does: then the machine is not served.

use crate::exec::{self, Programs};
use dayfly_api::agent::{ExecSpec, Identity};
use rustix::fs::Access;
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FOLDER: &str = "etc/dayfly/clone.d";
/// The most hooks.
const MOST: usize = 64;
/// How long all of them may take; the host waits longer for the identity.
const PATIENCE: Duration = Duration::from_secs(20);

/// The hooks below `root`, in their order.
fn find(root: &Path) -> Result<Vec<PathBuf>, String> {
    let folder = root.join(FOLDER);
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(e)),
    };
    let mut hooks = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let named = !name.starts_with('.') && !name.ends_with('~');
        if named && path.is_file() && rustix::fs::access(&path, Access::EXEC_OK) != Err(Errno::ACCESS) {
            hooks.push(path);
        }
        if hooks.len() > MOST {
            return Err(format!("{}: expected at most {MOST} hooks, got more", folder.display()));
        }
    }
    hooks.sort_unstable();
    Ok(hooks)
}

/// Runs them all, in a machine that becomes `identity`.
///
/// # Errors
/// Which failed, and how; those after it did not run.
pub fn run(programs: &Programs, identity: &Identity) -> Result<(), String> {
    let until = Instant::now() + PATIENCE;
    for hook in find(&programs.root)? {
        let shown = hook.display().to_string();
        let env = [
            ("DAYFLY_CLONE_ID", Some(identity.machine_id.clone())),
            ("DAYFLY_CLONE_NUMBER", Some(identity.number.to_string())),
            ("DAYFLY_HOSTNAME", Some(identity.hostname.clone())),
            ("DAYFLY_ADDRESS", identity.network.as_ref().map(|network| network.address.to_string())),
        ];
        let spec = ExecSpec {
            argv: vec![shown.clone()],
            env: env.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect(),
            cwd: "/".to_owned(),
            detach: true,
            ..ExecSpec::default()
        };
        let exit = exec::run_alone(programs, &spec, until).map_err(|e| e.to_string())?;
        match (exit.code, exit.signal) {
            _ if exit.timed_out => {
                return Err(format!("{shown}: all hooks took longer than {} s", PATIENCE.as_secs()));
            }
            (Some(0), _) => {}
            (Some(code), _) => return Err(format!("{shown}: expected exit code 0, got {code}")),
            (None, signal) => return Err(format!("{shown}: ended by signal {}", signal.unwrap_or_default())),
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "hooks_tests.rs"]
mod tests;
