use super::*;
use crate::base::config::Deadlines;
use crate::fixture;
use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn a_pager_and_a_daemon_append_one_record_to_what_a_vmm_counts() {
    assert_eq!(dayfly_pager::wire::EXIT_PAGE_BYTES, METER_BYTES as u64);
    let folder = tempfile::tempdir().unwrap();
    let exit = folder.path().join("exit.json");
    let file = File::options().create_new(true).read(true).append(true).open(&exit).unwrap();
    meter::prepare(&file).unwrap();
    let counted = meter::Meter::map(file.as_fd()).unwrap();
    let groups = GroupStock::default();
    for cause in ["first", "second"] {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let vmm = ProcessId::of(child.id()).unwrap().unwrap();
        let vmm = Process::open(vmm).unwrap().unwrap();
        end_with(&vmm, &exit, cause, &groups).unwrap();
        child.wait().unwrap();
        // It would end this process if the page were gone.
        counted.read(0, 7);
    }
    let bytes = std::fs::read(&exit).unwrap();
    let (metered, record) = meter::split(&bytes);
    assert_eq!(metered.unwrap().disks[0].read_bytes, 14);
    let record: ExitRecord = serde_json::from_slice(record).unwrap();
    assert_eq!(record.message, "first");
}

#[test]
fn a_pager_is_looked_for_by_its_process_and_not_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join(PAGER_NAME);
    let sleep = || {
        let child = Command::new("sleep").arg0(&name).arg("1000").spawn().unwrap();
        // It has its command line a little later than its program.
        let cmdline = format!("/proc/{}/cmdline", child.id());
        while std::fs::read(&cmdline).unwrap().is_empty() {
            std::thread::yield_now();
        }
        child
    };
    let id = |child: &std::process::Child| ProcessId::of(child.id()).unwrap().unwrap();
    let (mut dies, mut other) = (sleep(), sleep());
    let (pager, of_another_template) = (id(&dies), id(&other));
    assert!(pager_lives(Some(pager), &name).unwrap());
    dies.kill().unwrap();
    dies.wait().unwrap();
    assert!(!pager_lives(Some(pager), &name).unwrap(), "another template's pager counts");
    assert!(pager_lives(Some(of_another_template), &name).unwrap());
    assert!(pager_lives(None, &name).unwrap());
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(!pager_lives(None, &name).unwrap());
}

/// Pagers whose program is the built one.
fn pagers(folder: &Path) -> Pagers {
    Pagers::new(&Config { vmm: fixture::vmm(), ..fixture::config(folder) })
}

#[test]
fn one_pager_waits_and_ends_with_its_connection() {
    let folder = tempfile::tempdir().unwrap();
    let pagers = pagers(folder.path());
    let waits = |pagers: &Pagers| lock(&pagers.prepared).as_ref().map(|s| s.process.id());
    pagers.warm();
    let first = waits(&pagers).unwrap();
    pagers.warm();
    assert_eq!(waits(&pagers), Some(first), "a second one was started");
    let taken = pagers.take().unwrap();
    assert_eq!((taken.process.id(), waits(&pagers)), (first, None));
    pagers.warm();
    assert_ne!(waits(&pagers), Some(first));
    pagers.end();
    assert_eq!(waits(&pagers), None);
    // A daemon that is killed closes the connection.
    drop(taken.socket);
    assert_eq!(taken.process.wait(None).unwrap(), Some(Ended::Code(0)));
}

#[test]
fn a_pager_that_died_while_it_waited_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let pagers = pagers(folder.path());
    pagers.warm();
    let dead = {
        let prepared = lock(&pagers.prepared);
        let process = &prepared.as_ref().unwrap().process;
        process.kill().unwrap();
        while process.is_alive().unwrap() {
            std::thread::yield_now();
        }
        process.id()
    };
    let taken = pagers.take().unwrap();
    assert_ne!(taken.process.id(), dead);
    assert!(taken.process.is_alive().unwrap());
    taken.end();
}

#[test]
fn a_patient_daemons_clones_wait_longer_for_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let deadlines = Deadlines::default();
    let mut config = Config { deadlines, ..fixture::config(folder.path()) };
    let usual = Pagers::new(&config).settings;
    assert_eq!(usual, Settings::default());
    config.deadlines = config.deadlines.times(4);
    assert_eq!(
        Pagers::new(&config).settings,
        Settings { deadline_s: usual.deadline_s * 4, ..usual }
    );
}
