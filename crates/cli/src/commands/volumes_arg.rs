//! The option `--volume`.

use crate::connect::{self, Place};
use crate::home::home;
use crate::offers;
use anyhow::Result;
use dayfly_api::types::{VolumeRequest, VolumeSource};
use dayfly_machine::Machine;
use std::path::Path;

/// Folders for a VM.
#[derive(Debug, Clone, clap::Args)]
pub struct VolumeArgs {
    /// Mount a folder of this host, or a named volume (dayfly volume), at PATH in the VM:
    /// FOLDER:PATH[:ro] or NAME:PATH[:ro]; may be repeated. What is missing is made. The VM has
    /// your rights to the folder's files
    #[arg(short, long = "volume", value_name = "FOLDER:PATH", value_parser = volume)]
    volumes: Vec<VolumeRequest>,
}

impl VolumeArgs {
    /// The options as a part of the API request to the daemon, which runs already. For a daemon in
    /// the machine, a process of this user stays behind that has the folders of this host.
    ///
    /// # Errors
    /// A folder cannot be had.
    pub async fn request(self) -> Result<Vec<VolumeRequest>> {
        let of_host = |volume: &VolumeRequest| matches!(volume.source, VolumeSource::Path(_));
        if !self.volumes.iter().any(of_host) {
            return Ok(self.volumes);
        }
        let Place::Machine(_) = connect::place()? else { return Ok(self.volumes) };
        let offered = move || offers::offer(self.volumes, &Machine::open(&home()?)?.api_socket());
        tokio::task::spawn_blocking(offered).await?
    }
}

/// Parses `/host:/guest`, `./here:/guest:ro` or `name:/guest`.
fn volume(text: &str) -> std::result::Result<VolumeRequest, String> {
    let mut words = text.split(':');
    let (source, target, access, more) = (words.next(), words.next(), words.next(), words.next());
    let (Some(source), Some(target), None) = (source, target, more) else {
        return Err(format!("expected FOLDER:PATH or NAME:PATH, or either with :ro, got {text:?}"));
    };
    let read_only = match access {
        None | Some("rw") => false,
        Some("ro") => true,
        Some(other) => {
            return Err(format!("expected ro or rw behind the VM's path, got {other:?}"));
        }
    };
    if !target.starts_with('/') {
        return Err(format!("expected an absolute path in the VM, got {target:?}"));
    }
    let source = if source.starts_with('/') {
        VolumeSource::Path(source.to_owned())
    } else if source.starts_with('.') {
        VolumeSource::Path(here(source)?)
    } else {
        let named = source.parse().map(VolumeSource::Name);
        named.map_err(|e| {
            format!(
                "{e}; a folder of this host begins with / or ., the name of a volume with a letter \
                 or digit"
            )
        })?
    };
    Ok(VolumeRequest { source, target: target.to_owned(), read_only })
}

/// The absolute path of a folder that is given from the working directory. A `..` removes the
/// component before it, as `cd` does.
fn here(path: &str) -> std::result::Result<String, String> {
    let wrong = |e: std::io::Error| format!("{path}: {e}");
    let own = std::env::current_dir().map_err(wrong)?;
    let mut whole = own.clone();
    for part in Path::new(path).components() {
        match part {
            std::path::Component::ParentDir => {
                whole.pop();
            }
            std::path::Component::Normal(name) => whole.push(name),
            _ => {}
        }
    }
    let text = whole.into_os_string().into_string();
    text.map_err(|path| format!("{}: expected a path in UTF-8", Path::new(&path).display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_names_are_told_apart_by_their_beginning() {
        let parsed = |text| {
            let VolumeRequest { source, target, read_only } = volume(text).unwrap();
            let source = match source {
                VolumeSource::Path(path) => format!("path {path}"),
                VolumeSource::Name(name) => format!("name {name}"),
                VolumeSource::Offer(offer) => panic!("{offer:?}"),
            };
            (source, target, read_only)
        };
        let own = std::env::current_dir().unwrap();
        let own = own.to_str().unwrap();
        for (text, source, target, read_only) in [
            ("/src:/work", "path /src", "/work", false),
            ("/:/host:ro", "path /", "/host", true),
            ("data:/var/lib/x:rw", "name data", "/var/lib/x", false),
            (".:/work", &format!("path {own}"), "/work", false),
            ("./a/../b:/work:ro", &format!("path {own}/b"), "/work", true),
        ] {
            assert_eq!(parsed(text), (source.to_owned(), target.to_owned(), read_only), "{text}");
        }
        let above = Path::new(own).parent().unwrap().join("x");
        assert_eq!(parsed("../x:/w").0, format!("path {}", above.display()));
    }

    #[test]
    fn what_is_no_volume_is_refused_with_the_form() {
        for (text, says) in [
            ("/src", "FOLDER:PATH or NAME:PATH"),
            ("", "FOLDER:PATH"),
            ("/a:/b:ro:x", "FOLDER:PATH"),
            ("/a:/b:z", "expected ro or rw behind the VM's path, got \"z\""),
            ("/a:b", "expected an absolute path in the VM, got \"b\""),
            (":/b", "begins with / or ."),
            ("Data:/b", "begins with / or ."),
            ("src/app:/b", "begins with / or ."),
        ] {
            let refused = volume(text).unwrap_err();
            assert!(refused.contains(says), "{text}: {refused}");
        }
    }
}
