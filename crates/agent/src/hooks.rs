//! Programs of the image that adapt a clone before the agent serves any request:
//! `/etc/dayfly/clone.d/*` (Kaleidoscope, section 6.2.2: the reconfiguration hook).
//!
//! Hooks run as root, one after the other, in the order of their names. Their environment has
//! `DAYFLY_CLONE_ID`, `DAYFLY_CLONE_NUMBER` (0 unless the machine is a clone of a fork) and
//! `DAYFLY_HOSTNAME`. With a network it also has `DAYFLY_ADDRESS`, the machine's IPv4 address,
//! which is already set. Output goes to the console.
//!
//! A file whose name begins with `.` or ends with `~`, or that is not executable, is no hook. All
//! steps of the identity but the last are done before the hooks run. If a hook fails, the identity
//! fails, and the machine is not served.

use crate::exec::{self, Programs};
use dayfly_api::agent::{ExecSpec, Identity};
use rustix::fs::Access;
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FOLDER: &str = "etc/dayfly/clone.d";
/// Maximum number of hooks.
const MOST: usize = 64;

/// Time limit for all hooks together: two thirds of the time that the host waits for the identity.
fn limit(identity: &Identity) -> Duration {
    identity.answer_time() * 2 / 3
}

/// The hooks below `root`, in order.
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
        if named
            && path.is_file()
            && rustix::fs::access(&path, Access::EXEC_OK) != Err(Errno::ACCESS)
        {
            hooks.push(path);
        }
        if hooks.len() > MOST {
            return Err(format!("{}: expected at most {MOST} hooks, got more", folder.display()));
        }
    }
    hooks.sort_unstable();
    Ok(hooks)
}

/// Runs all hooks, in a machine that takes on `identity`.
///
/// # Errors
/// The hook that failed, and its failure; later hooks did not run.
pub fn run(programs: &Programs, identity: &Identity) -> Result<(), String> {
    let limit = limit(identity);
    let until = Instant::now() + limit;
    for hook in find(&programs.root)? {
        let shown = hook.display().to_string();
        let env = [
            ("DAYFLY_CLONE_ID", Some(identity.machine_id.clone())),
            ("DAYFLY_CLONE_NUMBER", Some(identity.number.to_string())),
            ("DAYFLY_HOSTNAME", Some(identity.hostname.clone())),
            (
                "DAYFLY_ADDRESS",
                identity.network.as_ref().map(|network| network.address.to_string()),
            ),
        ];
        let spec = ExecSpec {
            argv: vec![shown.clone()],
            env: env
                .into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value?)))
                .collect(),
            cwd: "/".to_owned(),
            detach: true,
            ..ExecSpec::default()
        };
        let exit = exec::run_alone(programs, &spec, until).map_err(|e| e.to_string())?;
        match (exit.code, exit.signal) {
            _ if exit.timed_out => {
                return Err(format!("{shown}: all hooks took longer than {limit:.1?}"));
            }
            (Some(0), _) => {}
            (Some(code), _) => return Err(format!("{shown}: expected exit code 0, got {code}")),
            (None, signal) => {
                return Err(format!("{shown}: ended by signal {}", signal.unwrap_or_default()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "hooks_tests.rs"]
mod tests;
