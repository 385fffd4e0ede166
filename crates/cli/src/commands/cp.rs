//! `dayfly cp`: files and folders, both ways, by docker's rules; `-` is a tar stream.

use crate::bridge::{PieceReader, PieceWriter, pump};
use crate::connect;
use crate::progress::Steps;
use crate::tarball::{self, Kind, Place};
use anyhow::{Context, Result, bail};
use dayfly_api::client::{Client, stream_body};
use dayfly_api::types::ErrorCode;
use std::ffi::OsStr;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Arguments of `dayfly cp`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "A folder is copied with all below it; FOLDER/. copies what is in it. - reads or writes a tar stream.\n  \
                        dayfly cp results.json web:/tmp/\n  dayfly cp web:/var/log logs"
)]
pub struct Args {
    /// PATH, VM:PATH, or -
    source: String,
    /// PATH, VM:PATH, or -
    destination: String,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        match (split(&self.source), split(&self.destination)) {
            (Some((vm, path)), None) => from_vm(vm, &path, &self.destination).await,
            (None, Some((vm, path))) => to_vm(&self.source, vm, &path).await,
            (Some(_), Some(_)) => {
                bail!(
                    "from one VM to another: copy to this host first, or `dayfly cp A:PATH - | dayfly cp - B:PATH`"
                )
            }
            (None, None) => bail!("expected one of the two as VM:PATH"),
        }
    }
}

/// `VM:PATH`. A text whose first `/` comes before its first `:` is a path of this host; so is one that starts with `.` or `/`.
fn split(text: &str) -> Option<(&str, String)> {
    let (vm, path) = text.split_once(':')?;
    if vm.is_empty() || vm.contains('/') || vm.starts_with('.') {
        return None;
    }
    // As docker does: relative to the root.
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    Some((vm, path))
}

/// Whether `text` ends in `/.`, and the text without that.
fn contents(text: &str) -> (bool, &str) {
    match text.strip_suffix("/.") {
        Some("") => (true, "/"),
        Some(rest) => (true, rest),
        None => (false, text),
    }
}

async fn from_vm(vm: &str, path: &str, destination: &str) -> Result<()> {
    let (contents, source) = contents(path);
    let steps = Steps::new();
    steps.begin(format!("copying {vm}:{path}"));
    let mut stream = pump(connect::client().await?.read_archive(vm, source).await?);
    let destination = destination.to_owned();
    let copied = tokio::task::spawn_blocking(move || {
        if destination == "-" {
            let mut out = io::stdout().lock();
            return io::copy(&mut stream, &mut out).and_then(|_| out.flush());
        }
        tarball::unpack(stream, Path::new(&destination), contents)
    });
    copied.await?.with_context(|| format!("copying {vm}:{path}"))
}

async fn to_vm(source: &str, vm: &str, path: &str) -> Result<()> {
    let client = connect::client().await?;
    let steps = Steps::new();
    let (contents, from) = contents(source);
    if source == "-" {
        steps.begin(format!("copying into {vm}:{path}"));
        return send(&client, vm, path, |mut out| io::copy(&mut io::stdin().lock(), &mut out).map(drop))
            .await;
    }
    let from = PathBuf::from(from);
    let metadata = std::fs::symlink_metadata(&from).with_context(|| from.display().to_string())?;
    let is_folder = if contents { from.is_dir() } else { metadata.is_dir() };
    let target = path.trim_end_matches('/');
    let there = kind_in_vm(&client, vm, if target.is_empty() { "/" } else { target }).await?;
    let place = tarball::place(there, path.ends_with('/'), is_folder, contents)
        .map_err(|e| anyhow::anyhow!("{vm}:{path}: {e}"))?;
    let (folder, name) = match place {
        Place::Inside => {
            // `.` and `..` have no name of their own.
            let full = std::path::absolute(&from)?;
            let full = if full.file_name().is_some() { full } else { from.canonicalize()? };
            let name = full.file_name().map(OsStr::to_owned);
            (path.to_owned(), Some(name.with_context(|| format!("{}: no name", from.display()))?))
        }
        Place::Contents => (path.to_owned(), None),
        Place::As => {
            let (folder, name) = target.rsplit_once('/').with_context(|| format!("{target}: no name"))?;
            let folder = if folder.is_empty() { "/" } else { folder };
            (folder.to_owned(), Some(name.into()))
        }
    };
    steps.begin(format!("copying {source} into {vm}:{path}"));
    send(&client, vm, &folder, move |out| tarball::pack(&from, name.as_ref().map(Path::new), out)).await
}

/// Sends what `write` writes, as an archive to be unpacked in `folder`.
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
        // Why our side stopped is the better reason, unless it only saw the other side go.
        (Err(e), Err(ours)) if ours.kind() == io::ErrorKind::BrokenPipe => Err(e.into()),
        (_, Err(ours)) => Err(ours).context("reading what is to be copied"),
        (Err(e), Ok(())) => Err(e.into()),
        (Ok(()), Ok(())) => Ok(()),
    }
}

/// What is at `path` in the VM.
async fn kind_in_vm(client: &Client, vm: &str, path: &str) -> Result<Kind> {
    let look = async |path: &str| -> Result<Option<tar::EntryType>> {
        let stream: PieceReader = match client.read_archive(vm, path).await {
            Ok(stream) => pump(stream),
            Err(e) if e.code() == Some(ErrorCode::NotFound) => {
                // It may be the VM that is not there.
                client.vm(vm).await?;
                return Ok(None);
            }
            Err(e) => return Err(e.into()),
        };
        let first = tokio::task::spawn_blocking(move || tarball::first_entry(stream)).await?;
        Ok(Some(first.with_context(|| format!("{vm}:{path}"))?.0))
    };
    Ok(match look(path).await? {
        None => Kind::Missing,
        Some(tar::EntryType::Directory) => Kind::Folder,
        // A link to a folder counts as one; seen through it, it ends in `/.`.
        Some(tar::EntryType::Symlink) => match look(&format!("{path}/.")).await {
            Ok(Some(tar::EntryType::Directory)) => Kind::Folder,
            _ => Kind::File,
        },
        Some(_) => Kind::File,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_a_vm_has_a_colon_before_any_slash() {
        assert_eq!(split("web:/etc"), Some(("web", "/etc".into())));
        assert_eq!(split("web:etc"), Some(("web", "/etc".into())));
        assert_eq!(split("web:"), Some(("web", "/".into())));
        for host in ["./a:b", "/a:b", "a/b:c", "plain", ":x", "-", "."] {
            assert_eq!(split(host), None, "{host}");
        }
        assert_eq!(contents("a/."), (true, "a"));
        assert_eq!(contents("/."), (true, "/"));
        assert_eq!(contents("a/b."), (false, "a/b."));
    }
}
