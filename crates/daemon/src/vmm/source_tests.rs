use super::*;
use crate::templates::pagers::Pagers;
use dayfly_api::types::ErrorCode;
use dayfly_units::CpuModel;

#[test]
fn clones_share_no_description_of_a_file() {
    use dayfly_host::process::ProcessId;
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    let folder = tempfile::tempdir().unwrap();
    let config = crate::fixture::config(folder.path());
    let store = dayfly_store::Store::open(&config.state).unwrap();
    crate::fixture::snapshot(&store, "default", "s", 0..3);
    let templates = TemplateCache::new(store, Pagers::new(&config));
    let open = templates.open_snapshot(&"s".parse().unwrap()).unwrap();
    let own = ProcessId::of(std::process::id()).unwrap().unwrap();
    let vmm = Arc::new(Process::open(own).unwrap().unwrap());
    let clone = || {
        let (id, frozen) = (VmId::random(), Frozen::from(&open));
        let exit = Path::new("/nonexistent");
        CloneOf::new(&templates, exit, id, &vmm, frozen, Purpose::User).unwrap()
    };
    let (one, other) = (clone(), clone());
    // State, RAM, image, a layer's data and map, both hash trees, the writable layer.
    assert_eq!((one.fds.len(), other.fds.len()), (8, 8));
    for fd in &one.fds {
        // Not every file system has O_DIRECT.
        let _ = fcntl_setfl(fd, OFlags::DIRECT);
        let flags = fcntl_getfl(fd).unwrap();
        fcntl_setfl(fd, flags | OFlags::APPEND).unwrap();
    }
    let disk = &open.disks[0];
    let layer = &disk.layers[0];
    let trees = [&disk.tree, &layer.tree].map(|tree| &tree.as_ref().unwrap().file);
    let kept = [&open.state, &open.memory, &disk.base, &layer.data, &layer.map];
    let kept = kept.into_iter().chain(trees);
    let kept: Vec<OwnedFd> = kept.map(|file| file.try_clone().unwrap().into()).collect();
    for fd in other.fds.iter().chain(&clone().fds).chain(&kept) {
        let flags = fcntl_getfl(fd).unwrap();
        assert!(!flags.intersects(OFlags::APPEND | OFlags::DIRECT), "{flags:?}");
    }
    let mode = |fd: &OwnedFd| fcntl_getfl(fd).unwrap() & OFlags::RWMODE;
    let modes: Vec<_> = other.fds.iter().map(mode).collect();
    assert_eq!(modes, [[OFlags::RDONLY; 7].as_slice(), &[OFlags::RDWR]].concat());
}

#[test]
fn an_init_that_would_change_the_command_line_is_refused() {
    let boot = |init: &str| BootSource {
        image: "i".parse().unwrap(),
        kernel: None,
        memory_bytes: 64 << 20,
        vcpus: 1,
        cpu_model: CpuModel::Host,
        init: Some(init.to_owned()),
    };
    assert!(check(&boot("/sbin/init")).is_ok());
    for bad in ["", "sbin/init", "/a b", "/a\tb", "/a\"b", "/a\nroot=/dev/vdb"] {
        assert_eq!(check(&boot(bad)).unwrap_err().0.code, ErrorCode::Invalid, "{bad:?}");
    }
}
