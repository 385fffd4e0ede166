//! The files by which commands know a running machine and its last end.

use crate::config::InitOptions;
use crate::files::{self, FileError};
use crate::layout::Layout;
use crate::uplink::Uplink;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Content of `running.json`. Fields that a supervisor of an older version did not write have their
/// defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Running {
    pub(crate) since_unix_ms: u64,
    pub(crate) ready: bool,
    pub(crate) build_digest: String,
    pub(crate) options: InitOptions,
    /// The host's boot id: another one means that the host was restarted since.
    #[serde(default)]
    pub(crate) boot_id: String,
    /// How often the kernel crashed before this boot, in the same start.
    #[serde(default)]
    pub(crate) boot_crashes: u32,
    /// Number of VMs at the last count, ended ones that were not removed included.
    #[serde(default)]
    pub(crate) vms: Option<u64>,
    /// The uplink's state.
    #[serde(default)]
    pub(crate) uplink: Option<Uplink>,
}

/// Content of `ended.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) at_unix_ms: u64,
    /// Whether a command asked for the end and the disk was unmounted.
    pub(crate) clean: bool,
    pub(crate) cause: String,
    /// Number of VMs at the last count.
    #[serde(default)]
    pub(crate) vms: Option<u64>,
    /// Whether a command has reported the end to the user, or needs not to.
    #[serde(default)]
    pub(crate) reported: bool,
}

impl Ended {
    pub(crate) fn now(clean: bool, cause: String) -> Self {
        Self { at_unix_ms: unix_ms(), clean, cause, vms: None, reported: false }
    }
}

pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The id of this boot of the host; empty if the kernel does not give it.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// `running.json` as the supervisor's threads change it. The file is gone after [`Self::close`].
#[derive(Debug)]
pub(crate) struct RunState {
    layout: Layout,
    running: Mutex<Option<Running>>,
}

impl RunState {
    /// Writes the file.
    pub(crate) fn new(layout: &Layout, running: Running) -> Result<Self, FileError> {
        files::write_json(&layout.running(), &running)?;
        Ok(Self { layout: layout.clone(), running: Mutex::new(Some(running)) })
    }

    /// Changes the content, and writes the file if the change is one. Does nothing after
    /// [`Self::close`].
    pub(crate) fn change(&self, change: impl FnOnce(&mut Running)) -> Result<(), FileError> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(now) = running.as_mut() else { return Ok(()) };
        let before = now.clone();
        change(now);
        if *now == before {
            return Ok(());
        }
        files::write_json(&self.layout.running(), now)
    }

    /// Ends the changes, and returns the last content. The file stays.
    pub(crate) fn close(&self) -> Option<Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Why QEMU has paused the machine, in a file of fixed length: it can be written while the disk is
/// full, because its block exists already.
#[derive(Debug)]
pub(crate) struct PauseNote(File);

impl PauseNote {
    const BYTES: usize = 1024;

    /// Makes the file, without a reason.
    pub(crate) fn new(layout: &Layout) -> Result<Self, FileError> {
        let path = layout.paused();
        let failed = |e| FileError::new("making", &path, e);
        let note = Self(File::create(&path).map_err(failed)?);
        note.write(None).map_err(failed)?;
        Ok(note)
    }

    pub(crate) fn write(&self, why: Option<&str>) -> io::Result<()> {
        let mut bytes = why.unwrap_or_default().as_bytes().to_vec();
        bytes.resize(Self::BYTES, 0);
        self.0.write_all_at(&bytes, 0)
    }

    /// The reason, if there is one.
    pub(crate) fn read(layout: &Layout) -> Option<String> {
        let bytes = fs::read(layout.paused()).ok()?;
        let why = String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next()?).into_owned();
        (!why.is_empty()).then_some(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn running() -> Running {
        Running {
            since_unix_ms: 1,
            ready: false,
            build_digest: "d".to_owned(),
            options: InitOptions::default(),
            boot_id: boot_id(),
            boot_crashes: 0,
            vms: None,
            uplink: None,
        }
    }

    #[test]
    fn a_late_change_does_not_bring_back_the_file_of_a_machine_that_ended() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout { folder: folder.path().to_owned() };
        let state = RunState::new(&layout, running()).unwrap();
        state.change(|running| running.vms = Some(3)).unwrap();
        let read = || files::read_json::<Running>(&layout.running()).unwrap();
        assert_eq!(read().unwrap().vms, Some(3));
        assert_eq!(state.close().unwrap().vms, Some(3));
        files::remove(&layout.running()).unwrap();
        state.change(|running| running.vms = Some(4)).unwrap();
        assert_eq!(read(), None);
    }

    #[test]
    fn a_pause_is_noted_in_place_and_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout { folder: folder.path().to_owned() };
        assert_eq!(PauseNote::read(&layout), None, "no file");
        let note = PauseNote::new(&layout).unwrap();
        assert_eq!(PauseNote::read(&layout), None);
        let blocks = || fs::metadata(layout.paused()).unwrap().len();
        let before = blocks();
        note.write(Some("a long reason")).unwrap();
        note.write(Some("full")).unwrap();
        assert_eq!(PauseNote::read(&layout).as_deref(), Some("full"));
        assert_eq!(blocks(), before);
        note.write(None).unwrap();
        assert_eq!(PauseNote::read(&layout), None);
    }

    #[test]
    fn a_file_of_an_older_version_is_read() {
        let old = r#"{"since_unix_ms":1,"ready":true,"build_digest":"d","options":{"cpus":3}}"#;
        let old: Running = serde_json::from_str(old).unwrap();
        assert_eq!((old.vms, old.boot_crashes, old.boot_id.as_str()), (None, 0, ""));
        let old: Ended =
            serde_json::from_str(r#"{"at_unix_ms":1,"clean":true,"cause":"stopped"}"#).unwrap();
        assert!(!old.reported);
    }
}
