//! Bootstraps a Debian root file system with mmdebstrap.

use super::error::BuildError;
use super::types::{Debian, Progress, Size};
use crate::manifest::now_s;
use crate::tool::{self, ToolError};
use std::path::Path;
use std::process::Command;

const PACKAGE: &str = "mmdebstrap";

/// Checks that suite and packages have names that apt accepts. apt could take anything else for an
/// option or a pattern.
pub fn check(debian: &Debian) -> Result<(), BuildError> {
    let word = |text: &str| {
        let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        text.len() <= 128
            && text.bytes().next().is_some_and(alnum)
            && text.bytes().all(|b| alnum(b) || b"+.-".contains(&b))
    };
    let bad = |what, got: &str| BuildError::Word { what, got: got.chars().take(200).collect() };
    if !word(&debian.suite) {
        return Err(bad("suite", &debian.suite));
    }
    match debian.include.iter().find(|p| !word(p)) {
        Some(package) => Err(bad("package", package)),
        None => Ok(()),
    }
}

/// The sources.list lines of `suite` that the host's apt uses. If the list is empty, mmdebstrap
/// chooses its mirror itself.
fn mirrors(suite: &str) -> Vec<String> {
    let mut apt = tool::tool("apt-get");
    apt.args([
        "indextargets",
        "--format",
        "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ARCHITECTURE)|$(SIGNED_BY)",
    ]);
    apt.arg("Created-By: Packages");
    // A host without apt or without package lists is no error here: mmdebstrap knows Debian's
    // mirrors.
    let Ok(said) = tool::run(apt, "apt", |_| ()) else { return Vec::new() };
    mirrors_of(suite, &String::from_utf8_lossy(&said.stdout))
}

fn mirrors_of(suite: &str, targets: &str) -> Vec<String> {
    let wanted = |release: &str| {
        release
            .strip_prefix(suite)
            .is_some_and(|rest| matches!(rest, "" | "-updates" | "-security"))
    };
    let mut lines: Vec<String> = Vec::new();
    for target in targets.lines() {
        let fields: Vec<&str> = target.split('|').collect();
        let [uri, release, component, architecture, signed_by] = fields[..] else { continue };
        let odd =
            |text: &str| text.is_empty() || text.contains(|c: char| c.is_whitespace() || c == '[');
        if !wanted(release) || architecture != "amd64" || component != "main" || odd(uri) {
            continue;
        }
        // If a source has no such option, apt prints the placeholder unchanged.
        let line = if signed_by.starts_with('/') && !odd(signed_by) {
            format!("deb [signed-by={signed_by}] {uri} {release} {component}")
        } else {
            format!("deb {uri} {release} {component}")
        };
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    // Lines for extra suites (such as updates) are useless without a line for the suite itself.
    if lines.iter().any(|l| l.contains(&format!(" {suite} "))) { lines } else { Vec::new() }
}

/// The version of mmdebstrap, which is part of the cache key.
fn version() -> Result<String, ToolError> {
    let mut command = tool::tool("mmdebstrap");
    command.arg("--version");
    Ok(String::from_utf8_lossy(&tool::run(command, PACKAGE, |_| ())?.stdout).trim().to_owned())
}

/// The cache key: everything that the result depends on, except the state of the Debian archive.
pub fn cache_key(debian: &Debian, size: Size) -> Result<String, BuildError> {
    let mut include = debian.include.clone();
    include.sort();
    include.dedup();
    let inputs = serde_json::json!({
        "format": 2,
        "suite": debian.suite,
        "include": include,
        "size": format!("{size:?}"),
        "mirrors": mirrors(&debian.suite),
        "tool": version()?,
    });
    Ok(blake3::hash(inputs.to_string().as_bytes()).to_hex()[..32].to_owned())
}

/// Bootstraps into the new archive `tar`. `tmp` is an empty folder for mmdebstrap's temporary
/// files.
pub fn bootstrap(
    debian: &Debian,
    tar: &Path,
    tmp: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(), BuildError> {
    let root = rustix::process::geteuid().is_root();
    if !root {
        check_newuidmap()?;
    }
    let mut command = contained(root.then_some(tmp));
    command.args(["--variant=minbase", "--architectures=amd64", "--format=tar"]);
    if !debian.include.is_empty() {
        command.arg(format!("--include={}", debian.include.join(",")));
    }
    // The timestamp is midnight, so two builds on one day from one archive state are identical. It
    // is not older than the files of a package, so tools that compare times (Python's byte code)
    // work.
    let now = now_s();
    command.env("SOURCE_DATE_EPOCH", (now - now % 86_400).to_string());
    if let Some(proxy) = proxy().filter(|_| std::env::var_os("http_proxy").is_none()) {
        command.env("http_proxy", proxy);
    }
    command.arg(&debian.suite).arg(tar).args(mirrors(&debian.suite));
    tool::run(command, PACKAGE, |line| {
        if let Some(step) = line.strip_prefix("I: ") {
            progress(Progress { step: &format!("mmdebstrap: {step}"), done_bytes: 0 });
        }
    })?;
    Ok(())
}

/// mmdebstrap of an ordinary user needs newuidmap(1), and names no package without it.
fn check_newuidmap() -> Result<(), ToolError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = [Path::new("/usr/bin").to_owned()];
    if std::env::split_paths(&path).chain(more).any(|folder| folder.join("newuidmap").is_file()) {
        return Ok(());
    }
    let source = std::io::ErrorKind::NotFound.into();
    Err(ToolError::Start { program: "newuidmap".to_owned(), package: "uidmap", source })
}

/// An mmdebstrap command that leaves no processes or mounts behind.
///
/// As root, mmdebstrap runs in new process and mount namespaces. If mmdebstrap is killed, its apt
/// and dpkg die and its mounts disappear. For another user, mmdebstrap creates namespaces itself.
fn contained(root_tmp: Option<&Path>) -> Command {
    let Some(tmp) = root_tmp else { return tool::tool("mmdebstrap") };
    let mut command = tool::tool("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "mmdebstrap"]);
    command.env("TMPDIR", tmp);
    command
}

fn proxy() -> Option<String> {
    let mut config = tool::tool("apt-config");
    config.args(["shell", "P", "Acquire::http::Proxy"]);
    let said = tool::run(config, "apt", |_| ()).ok()?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let value = text.trim().strip_prefix("P='")?.strip_suffix('\'')?;
    (value.starts_with("http") && !value.contains('\'')).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_mirrors_for_the_suite_and_no_others() {
        let targets = "http://deb.debian.org/debian/|bookworm|main|amd64|$(SIGNED_BY)\n\
            http://deb.debian.org/debian/|bookworm|contrib|amd64|$(SIGNED_BY)\n\
            http://deb.debian.org/debian/|bookworm|main|amd64|$(SIGNED_BY)\n\
            http://deb.debian.org/debian-security/|bookworm-security|main|amd64|/usr/share/keyrings/d.gpg\n\
            https://deb.nodesource.com/node_20.x/|nodistro|main|amd64|/usr/share/keyrings/n.gpg\n\
            http://deb.debian.org/debian/|bookworm-backports|main|amd64|$(SIGNED_BY)\nnonsense\n";
        let lines = [
            "deb http://deb.debian.org/debian/ bookworm main",
            "deb [signed-by=/usr/share/keyrings/d.gpg] http://deb.debian.org/debian-security/ \
             bookworm-security main",
        ];
        assert_eq!(mirrors_of("bookworm", targets), lines);
        assert!(mirrors_of("trixie", targets).is_empty());
    }

    #[test]
    fn options_and_patterns_are_no_packages() {
        for bad in ["", "-x", "--include", "?essential", "a b", "a,b", "../x", "A", "a/b"] {
            let debian =
                Debian { suite: "bookworm".into(), include: vec![bad.into()], refresh: false };
            assert!(check(&debian).is_err(), "{bad:?}");
            let debian = Debian { suite: bad.into(), include: vec![], refresh: false };
            assert!(check(&debian).is_err(), "{bad:?}");
        }
        let include = vec!["libstdc++6".to_owned(), "python3.11".to_owned()];
        check(&Debian { suite: "bookworm".into(), include, refresh: false }).unwrap();
    }
}
