//! The agent's options on the kernel command line.

use std::path::PathBuf;

/// The options of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// `root=`: a device below /dev.
    pub root: PathBuf,
    /// `rootfstype=`; ext4 by default.
    pub kind: String,
    /// `rootflags=`: passed to the file system.
    pub flags: String,
    /// `ro`.
    pub read_only: bool,
    /// `dayfly.modules=`: a device below /dev with the modules of this kernel.
    pub modules: Option<PathBuf>,
    /// `dayfly.init=`: the image's own init, which becomes PID 1.
    pub init: Option<String>,
}

/// Why the command line is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// No `root=`.
    #[error("root=: expected a device such as /dev/vda, got none")]
    NoRoot,
    /// The root is not a path below /dev.
    #[error("root=: expected a device such as /dev/vda, got {0:?}")]
    Root(String),
    /// The disk of the modules is not a path below /dev.
    #[error("dayfly.modules=: expected a device such as /dev/vdb, got {0:?}")]
    Modules(String),
    /// The init is not an absolute path.
    #[error("dayfly.init=: expected an absolute path, got {0:?}")]
    Init(String),
    /// An unknown option with the prefix `dayfly.`.
    #[error("expected dayfly.init= or dayfly.modules=, got {0:?}")]
    Unknown(String),
}

/// Parses the command line. The last word of a kind counts, as in the kernel. Words after `--`
/// belong to init.
///
/// # Errors
/// [`OptionError`].
pub fn parse(line: &str) -> Result<Options, OptionError> {
    let mut root = None;
    let mut options = Options {
        root: PathBuf::new(),
        kind: "ext4".into(),
        flags: String::new(),
        read_only: false,
        modules: None,
        init: None,
    };
    for word in words(line).iter().take_while(|w| *w != "--") {
        let (name, value) = word.split_once('=').map_or((word.as_str(), ""), |(n, v)| (n, v));
        match name {
            "root" => root = Some(value.to_owned()),
            "rootfstype" => options.kind = value.to_owned(),
            "rootflags" => options.flags = value.to_owned(),
            "ro" => options.read_only = true,
            "rw" => options.read_only = false,
            "dayfly.modules" if is_device(value) => options.modules = Some(value.into()),
            "dayfly.modules" => return Err(OptionError::Modules(value.to_owned())),
            "dayfly.init" if value.starts_with('/') => options.init = Some(value.to_owned()),
            "dayfly.init" => return Err(OptionError::Init(value.to_owned())),
            other if other.starts_with("dayfly.") => {
                return Err(OptionError::Unknown(word.clone()));
            }
            _ => {}
        }
    }
    let root = root.ok_or(OptionError::NoRoot)?;
    if !is_device(&root) {
        return Err(OptionError::Root(root));
    }
    options.root = root.into();
    Ok(options)
}

fn is_device(path: &str) -> bool {
    path.starts_with("/dev/") && !path.contains("/..")
}

/// Splits at white space, except in double quotes, as the kernel does.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            c if c.is_ascii_whitespace() && !quoted => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemons_line_and_its_variants() {
        let plain = parse("console=ttyS0 quiet reboot=t panic=-1 root=/dev/vda\n").unwrap();
        assert_eq!(plain.root, PathBuf::from("/dev/vda"));
        assert_eq!((plain.kind.as_str(), plain.read_only, plain.init), ("ext4", false, None));
        assert_eq!(plain.modules, None);
        let all = parse(
            "root=/dev/vda ro rw ro rootfstype=xfs rootflags=\"a b\" \
                         dayfly.init=/sbin/init root=/dev/vdb \
                         dayfly.modules=/dev/vdc -- ro=x root=/x",
        )
        .unwrap();
        assert_eq!(all.root, PathBuf::from("/dev/vdb"));
        assert_eq!((all.kind.as_str(), all.flags.as_str(), all.read_only), ("xfs", "a b", true));
        assert_eq!(all.init.as_deref(), Some("/sbin/init"));
        assert_eq!(all.modules, Some(PathBuf::from("/dev/vdc")));
    }

    #[test]
    fn what_makes_no_sense_is_said() {
        assert_eq!(parse("quiet"), Err(OptionError::NoRoot));
        assert!(matches!(parse("root=UUID=12"), Err(OptionError::Root(_))));
        assert!(matches!(parse("root=/dev/../etc"), Err(OptionError::Root(_))));
        assert!(matches!(parse("root=/dev/vda dayfly.init=init"), Err(OptionError::Init(_))));
        for device in ["", "vdb", "/dev/../x"] {
            let line = format!("root=/dev/vda dayfly.modules={device}");
            assert!(matches!(parse(&line), Err(OptionError::Modules(_))), "{line}");
        }
        assert!(matches!(
            parse("root=/dev/vda dayfly.listen=serial"),
            Err(OptionError::Unknown(_))
        ));
    }
}
