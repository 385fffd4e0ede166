//! Debian's `docker-registry`, which tests of several crates start.

use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// The user that [`LocalRegistry::with_user`] lets in, and its password.
pub const USER: (&str, &str) = ("tester", "hunter2");
/// [`USER`] as a line of htpasswd (bcrypt).
const HTPASSWD: &str = "tester:$2y$05$abcdefghijklmnopqrstuuoXuKqgZXLiJqzfmMXDDhSFPIvxV7t8.\n";

/// A registry on a port of 127.0.0.1. It ends with this value, or with the thread that started it.
#[derive(Debug)]
pub struct LocalRegistry {
    child: Child,
    folder: TempDir,
    port: u16,
}

impl LocalRegistry {
    /// Starts a registry that asks for no password.
    ///
    /// # Errors
    /// `docker-registry` is not there or does not start.
    pub fn start() -> io::Result<Self> {
        Self::configured("")
    }

    /// Starts a registry for [`USER`] only.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub fn with_user() -> io::Result<Self> {
        Self::configured("auth: {htpasswd: {realm: test, path: htpasswd}}\n")
    }

    fn configured(more: &str) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("htpasswd"), HTPASSWD)?;
        let config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: data}}}}\n\
             http: {{addr: '127.0.0.1:0', secret: test}}\n{more}"
        );
        std::fs::write(folder.path().join("config.yml"), config)?;
        // setpriv(1): the registry ends if a test is killed.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "docker-registry", "serve", "config.yml"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = child.stderr.take().map(BufReader::new);
        let mut lines = stderr.ok_or_else(|| io::Error::other("no standard error"))?;
        let (mut said, mut port) = (String::new(), None);
        while port.is_none() {
            let begin = said.len();
            if lines.read_line(&mut said)? == 0 {
                let _ = child.wait();
                return Err(io::Error::other(format!("docker-registry ended: {said}")));
            }
            let after = said[begin..].split("listening on 127.0.0.1:").nth(1);
            let digits = after.and_then(|text| text.split(|c: char| !c.is_ascii_digit()).next());
            port = digits.and_then(|digits| digits.parse().ok());
        }
        // The registry must not wait for a reader of its log.
        std::thread::spawn(move || io::copy(&mut lines, &mut io::sink()));
        Ok(Self { child, folder, port: port.unwrap_or_default() })
    }

    /// Host and port.
    #[must_use]
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The folder with everything that was pushed.
    #[must_use]
    pub fn data(&self) -> std::path::PathBuf {
        self.folder.path().join("data")
    }

    /// Copies an image of another place (skopeo-copy(1), such as `oci:FOLDER:NAME`) to `name`, for
    /// all its platforms.
    ///
    /// # Errors
    /// `skopeo` is not there or fails.
    pub fn push(&self, from: &str, name: &str) -> io::Result<()> {
        let (user, password) = USER;
        let output = Command::new("skopeo")
            .args(["copy", "--all", "--insecure-policy", "--dest-tls-verify=false"])
            .args(["--dest-creds", &format!("{user}:{password}"), from])
            .arg(format!("docker://{}/{name}", self.host()))
            .env("TMPDIR", self.folder.path())
            .output()?;
        if output.status.success() {
            return Ok(());
        }
        Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()))
    }

    /// Writes docker's configuration with the password of [`USER`] for this registry.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_docker_config(&self, path: &Path) -> io::Result<()> {
        let (user, password) = USER;
        let host = self.host();
        let text = format!(
            r#"{{"auths": {{"{host}": {{"username": "{user}", "password": "{password}"}}}}}}"#
        );
        std::fs::write(path, text)
    }
}

impl Drop for LocalRegistry {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
