//! `dayfly cp`: copies files and folders in both directions by docker's rules; `-` is a tar stream.

use crate::bridge::{PieceReader, PieceWriter, pump, pump_until};
use crate::connect;
use crate::progress::Steps;
use crate::tarball::{self, Place, There};
use anyhow::{Context, Result, bail};
use dayfly_api::client::{Client, stream_body};
use dayfly_api::types::ErrorCode;
use dayfly_archive::{Entry, Kind};
use std::ffi::OsStr;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Arguments of `dayfly cp`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A folder is copied with all below it; FOLDER/. copies what is in it. - reads or \
                  writes a tar stream.\n  \
                  dayfly cp results.json web:/tmp/\n  dayfly cp web:/var/log logs"
)]
pub struct Args {
    /// Keep the file capabilities (setcap) that a VM sends; a program from the VM may then have
    /// more rights on this host than the user who runs it
    #[arg(long)]
    capabilities: bool,
    /// PATH, VM:PATH, or - for a tar stream
    source: String,
    /// PATH, VM:PATH, or - for a tar stream
    destination: String,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        for text in [&self.source, &self.destination] {
            if let Some((vm, path)) = split(text)
                && path.is_empty()
            {
                bail!("{text}: expected VM:PATH, got no path; {vm}:/ is all of the VM's disk");
            }
        }
        match (split(&self.source), split(&self.destination)) {
            (Some((vm, path)), None) => {
                from_vm(vm, &path, &self.destination, self.capabilities).await
            }
            (None, Some((vm, path))) => to_vm(&self.source, vm, &path).await,
            (Some(_), Some(_)) => {
                bail!(
                    "from one VM to another: copy to this host first, or `dayfly cp A:PATH - | \
                     dayfly cp - B:PATH`"
                )
            }
            (None, None) => bail!("expected one of the two as VM:PATH"),
        }
    }
}

/// Splits `VM:PATH`. A text is a path of this host if its first `/` comes before its first `:`, or
/// if it starts with `.` or `/`.
fn split(text: &str) -> Option<(&str, String)> {
    let (vm, path) = text.split_once(':')?;
    if vm.is_empty() || vm.contains('/') || vm.starts_with('.') {
        return None;
    }
    // As in docker, the path is relative to the root.
    let path =
        if path.starts_with('/') || path.is_empty() { path.to_owned() } else { format!("/{path}") };
    Some((vm, path))
}

/// Whether `text` ends in `/.`, and the text without that end.
fn contents(text: &str) -> (bool, &str) {
    match text.strip_suffix("/.") {
        Some("") => (true, "/"),
        Some(rest) => (true, rest),
        None => (false, text),
    }
}

/// A request for a path of a VM.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    /// The path to request from the VM.
    path: String,
    /// The name that the archive must have; `None` for the root folder.
    name: Option<String>,
    /// Whether only the folder's content is copied.
    contents: bool,
}

fn asked(path: &str) -> Asked {
    let (contents, folder) = contents(path);
    let mut names: Vec<&str> =
        folder.split('/').filter(|name| !name.is_empty() && *name != ".").collect();
    let mut path = path.to_owned();
    // The last component of `/a/b/..` is no usable name, so the path becomes `/a`, as in docker.
    if names.last() == Some(&"..") {
        let whole = std::mem::take(&mut names);
        for name in whole {
            if name == ".." {
                names.pop();
            } else {
                names.push(name);
            }
        }
        path = format!("/{}{}", names.join("/"), if contents { "/." } else { "" });
    }
    let name = names.last().map(|name| (*name).to_owned());
    // The root folder has no name for a copy, so only its content is copied.
    Asked { path, contents: contents || name.is_none(), name }
}

async fn from_vm(vm: &str, path: &str, destination: &str, capabilities: bool) -> Result<()> {
    let Asked { path: source, name, contents } = asked(path);
    let to_stdout = destination == "-";
    if to_stdout && io::stdout().is_terminal() {
        bail!("expected standard output to be a file or a pipe for an archive, got a terminal");
    }
    let steps = Steps::new();
    steps.begin(format!("copying {vm}:{path}"));
    let stream = connect::client().await?.read_archive(vm, &source).await?;
    let destination = destination.to_owned();
    let copied = if to_stdout {
        let mut stream = pump(stream);
        tokio::task::spawn_blocking(move || {
            let mut out = io::stdout().lock();
            io::copy(&mut stream, &mut out)
                .and_then(|_| out.flush())
                .map(|()| 0)
                .map_err(Into::into)
        })
    } else {
        // Staged files must be removed, so a signal ends the stream and not this program.
        let mut stream = pump_until(stream, interrupted());
        tokio::task::spawn_blocking(move || {
            let (name, destination) = (name.as_deref().map(OsStr::new), Path::new(&destination));
            tarball::unpack(&mut stream, name, destination, contents, capabilities)
        })
    };
    let left_out: u64 = copied.await?.with_context(|| format!("copying {vm}:{path}"))?;
    drop(steps);
    if left_out > 0 {
        eprintln!("dayfly: {left_out} devices and pipes were left out");
    }
    Ok(())
}

/// Waits for a signal that asks this program to end.
async fn interrupted() {
    let terminated = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        Ok(()) = tokio::signal::ctrl_c() => {}
        () = terminated => {}
        else => std::future::pending().await,
    }
}

async fn to_vm(source: &str, vm: &str, path: &str) -> Result<()> {
    let client = connect::client().await?;
    let steps = Steps::new();
    let (contents, from) = contents(source);
    if source == "-" {
        steps.begin(format!("copying into {vm}:{path}"));
        return send(&client, vm, path, |mut out| {
            io::copy(&mut io::stdin().lock(), &mut out).map(drop)
        })
        .await;
    }
    let from = PathBuf::from(from);
    let metadata = std::fs::symlink_metadata(&from).with_context(|| from.display().to_string())?;
    let is_folder = if contents { from.is_dir() } else { metadata.is_dir() };
    let target = path.trim_end_matches('/');
    let (there, resolved) =
        resolve(&client, vm, if target.is_empty() { "/" } else { target }).await?;
    let place = tarball::place(there, path.ends_with('/'), is_folder, contents)
        .map_err(|e| anyhow::anyhow!("{vm}:{path}: {e}"))?;
    let (folder, name) = match place {
        Place::Inside => {
            // `.` and `..` are no usable names.
            let full = std::path::absolute(&from)?;
            let full = if full.file_name().is_some() { full } else { from.canonicalize()? };
            let name = full.file_name().map(OsStr::to_owned);
            (path.to_owned(), Some(name.with_context(|| format!("{}: no name", from.display()))?))
        }
        Place::Contents => (path.to_owned(), None),
        Place::As => {
            let (folder, name) =
                resolved.rsplit_once('/').with_context(|| format!("{resolved}: no name"))?;
            let folder = if folder.is_empty() { "/" } else { folder };
            (folder.to_owned(), Some(OsStr::new(name).to_owned()))
        }
    };
    steps.begin(format!("copying {source} into {vm}:{path}"));
    send(&client, vm, &folder, move |out| tarball::pack(&from, name.as_ref().map(Path::new), out))
        .await
}

/// Sends the output of `write` as an archive to unpack in `folder`.
async fn send(
    client: &Client,
    vm: &str,
    folder: &str,
    write: impl FnOnce(BufWriter<PieceWriter>) -> io::Result<()> + Send + 'static,
) -> Result<()> {
    let (writer, stream) = PieceWriter::new();
    let handle = writer.handle();
    let writing = tokio::task::spawn_blocking(move || {
        let result = write(BufWriter::with_capacity(64 << 10, writer));
        if let Err(e) = &result {
            handle.fail(e);
        }
        result
    });
    let sent = client.write_archive(vm, folder, stream_body(stream)).await;
    let written = writing.await?;
    match (sent, written) {
        // The local cause is the better error, unless it only says that the peer has closed.
        (Err(e), Err(ours)) if ours.kind() == io::ErrorKind::BrokenPipe => Err(e.into()),
        (_, Err(ours)) => Err(ours).context("reading what is to be copied"),
        (Err(e), Ok(())) => Err(e.into()),
        (Ok(()), Ok(())) => Ok(()),
    }
}

/// The kind of the entry at `path` in the VM, and its path after links at its end are followed. As
/// in docker, a copy goes to the link's target.
async fn resolve(client: &Client, vm: &str, path: &str) -> Result<(There, String)> {
    /// Upper limit for followed links (Linux: `MAXSYMLINKS`).
    const MAX_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Some(entry) = look(client, vm, &path).await? else { return Ok((There::Missing, path)) };
        match entry.head.kind {
            Kind::Folder => return Ok((There::Folder, path)),
            Kind::Symlink => {
                let link = String::from_utf8(entry.head.link);
                let link =
                    link.ok().filter(|l| !l.is_empty() && l.len() < 4096 && !l.contains('\0'));
                let link =
                    link.with_context(|| format!("{vm}:{path}: a link that leads nowhere"))?;
                let trimmed = path.trim_end_matches('/');
                let folder = trimmed.rsplit_once('/').map_or("", |(folder, _)| folder);
                path = if link.starts_with('/') { link } else { format!("{folder}/{link}") };
            }
            _ => return Ok((There::File, path)),
        }
    }
    bail!("{vm}:{path}: expected at most {MAX_LINKS} links, got more, or a loop")
}

/// The entry at `path` in the VM; `None` if it does not exist.
async fn look(client: &Client, vm: &str, path: &str) -> Result<Option<Entry>> {
    let stream: PieceReader = match client.read_archive(vm, path).await {
        Ok(stream) => pump(stream),
        Err(e) if e.code() == Some(ErrorCode::NotFound) => {
            // If the VM itself does not exist, this call reports it.
            client.vm(vm).await?;
            return Ok(None);
        }
        Err(e) => return Err(e.into()),
    };
    let first = tokio::task::spawn_blocking(move || tarball::first_entry(stream)).await?;
    first.map(Some).with_context(|| format!("{vm}:{path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_a_vm_has_a_colon_before_any_slash() {
        assert_eq!(split("web:/etc"), Some(("web", "/etc".into())));
        assert_eq!(split("web:etc"), Some(("web", "/etc".into())));
        assert_eq!(split("web:"), Some(("web", String::new())));
        for host in ["./a:b", "/a:b", "a/b:c", "plain", ":x", "-", "."] {
            assert_eq!(split(host), None, "{host}");
        }
        assert_eq!(contents("a/."), (true, "a"));
        assert_eq!(contents("/."), (true, "/"));
        assert_eq!(contents("a/b."), (false, "a/b."));
    }

    #[test]
    fn a_path_of_a_vm_says_which_name_the_archive_must_have() {
        for (path, sent, name, contents) in [
            ("/etc/hosts", "/etc/hosts", Some("hosts"), false),
            ("/etc/", "/etc/", Some("etc"), false),
            ("/a/../etc/.", "/a/../etc/.", Some("etc"), true),
            ("/etc/./", "/etc/./", Some("etc"), false),
            ("/", "/", None, true),
            ("/.", "/.", None, true),
            ("/a/b/..", "/a", Some("a"), false),
            ("/a/b/../.", "/a/.", Some("a"), true),
            ("/a/../..", "/", None, true),
        ] {
            let name = name.map(str::to_owned);
            assert_eq!(asked(path), Asked { path: sent.to_owned(), name, contents }, "{path}");
        }
    }
}
