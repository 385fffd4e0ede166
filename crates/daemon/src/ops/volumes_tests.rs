use super::*;
use crate::fixture;
use crate::model::facts::Facts;
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::Pagers;
use dayfly_api::agent::{Failure, FailureCode, FrameKind, HEADER_BYTES, decode_header, encode};
use dayfly_store::Store;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// A server that returns each message.
const ECHO: &str = "#!/bin/sh\necho ready\nexec cat <&3 >&3\n";

struct World {
    _folder: TempDir,
    daemon: Arc<Daemon>,
    vm: Arc<Vm>,
    guest: UnixListener,
}

impl World {
    /// A VM with a volume in `target`, whose agent this test is.
    fn new(server: &str, agent_version: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = fixture::config(folder.path());
        config.vmm = folder.path().join("dayfly-vmm");
        std::fs::write(server::program(&config), server).unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(server::program(&config), executable).unwrap();
        std::fs::create_dir_all(&config.state).unwrap();
        let store = Store::open(&config.state).unwrap();
        let pagers = Pagers::new(&config);
        let daemon = fixture::daemon(config, TemplateCache::new(store, pagers), fixture::nodes());
        let owner = Caller::default();
        let request = VolumeRequest {
            source: VolumeSource::Path(folder.path().join("shared").to_str().unwrap().into()),
            target: "/work".into(),
            read_only: true,
        };
        let volumes = asked(&daemon, &[request], Some(&owner)).unwrap();
        let facts = Facts { volumes, ..fixture::facts() };
        let reserved =
            daemon.registry.reserve(&daemon.config, None, facts, fixture::memory(), None);
        let vm = reserved.unwrap();
        vm.update(|live| agent_version.clone_into(&mut live.agent_version));
        std::fs::create_dir_all(vm.dir.root()).unwrap();
        let guest = UnixListener::bind(vm.dir.vsock()).unwrap();
        Self { _folder: folder, daemon, vm, guest }
    }

    async fn mount(&self) -> Outcome<()> {
        self.vm.volumes.keep(open(&self.daemon, &self.vm.facts.volumes).await?);
        mount(&self.daemon, &self.vm).await
    }

    /// The agent's side of a request.
    async fn answers(&self, reply: Reply) -> (Request, UnixStream) {
        let (mut stream, _) = self.guest.accept().await.unwrap();
        let mut connect = [0; 13];
        stream.read_exact(&mut connect).await.unwrap();
        assert_eq!(&connect, b"CONNECT 1024\n");
        stream.write_all(b"OK 7\n").await.unwrap();
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).await.unwrap();
        let (kind, length) = decode_header(header).unwrap();
        assert_eq!(kind, FrameKind::Request);
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.unwrap();
        let reply = encode(FrameKind::Reply, &serde_json::to_vec(&reply).unwrap());
        stream.write_all(&reply).await.unwrap();
        (serde_json::from_slice(&body).unwrap(), stream)
    }
}

#[tokio::test]
async fn a_volume_is_mounted_served_and_missed_when_its_server_ends() {
    let world = World::new(ECHO, "0.1.0+2");
    let (mounted, (request, mut stream)) = tokio::join!(world.mount(), world.answers(Reply::Ok));
    mounted.unwrap();
    let Request::Mount { path, name, read_only } = request else { panic!("{request:?}") };
    assert!(path == "/work" && name.ends_with("/shared") && read_only, "{path} {name}");
    // The server has the stream itself.
    stream.write_all(b"message").await.unwrap();
    let mut back = [0; 7];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"message");
    let server = world.vm.live().volumes[0].server.unwrap();
    assert!(world.daemon.volume_servers.has(server));
    let shown = &world.vm.shown().volumes[0];
    assert_eq!((shown.uid, shown.problem.clone()), (0, None));

    Process::open(server).unwrap().unwrap().kill().unwrap();
    assert_eq!(stream.read(&mut back).await.unwrap(), 0, "the guest sees the end");
    let problem = async {
        loop {
            if let Some(problem) = world.vm.shown().volumes[0].problem.clone() {
                return problem;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let problem = timeout(Duration::from_secs(120), problem).await.unwrap();
    assert!(problem.contains("signal 9") && problem.contains("ENOTCONN"), "{problem}");
    assert!(!world.daemon.volume_servers.has(server));
}

#[tokio::test]
async fn what_cannot_be_mounted_is_explained() {
    let old = World::new(ECHO, "0.1.0+1");
    let refused = old.mount().await.unwrap_err().0;
    assert_eq!(refused.code, ErrorCode::State);
    assert!(refused.message.contains("bake its snapshot anew"), "{}", refused.message);

    let world = World::new("#!/bin/sh\necho 'this is /proc' >&2\nexit 1\n", "0.1.0+2");
    let failure = Failure { code: FailureCode::Io, message: "no FUSE".into() };
    let (refused, _) = tokio::join!(world.mount(), world.answers(Reply::Err(failure)));
    let refused = refused.unwrap_err().0.message;
    assert!(refused.contains("/shared at /work: ") && refused.contains("no FUSE"), "{refused}");
    let (refused, (_, mut stream)) = tokio::join!(world.mount(), world.answers(Reply::Ok));
    let refused = refused.unwrap_err().0.message;
    assert!(refused.contains("exit code 1: this is /proc"), "{refused}");
    assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0, "the guest sees the end");
}

#[tokio::test]
async fn only_a_known_user_shares_folders_and_in_a_machine_none_by_path() {
    let world = World::new(ECHO, "0.1.0+2");
    let request = |source| VolumeRequest { source, target: "/x".into(), read_only: false };
    let path = request(VolumeSource::Path("/src".into()));
    let unknown = asked(&world.daemon, std::slice::from_ref(&path), None).unwrap_err().0.message;
    assert!(unknown.contains("does not say"), "{unknown}");
    assert!(asked(&world.daemon, &[], None).unwrap().is_empty());
    let mut config = world.daemon.config.clone();
    config.ports = Some("/run/ports.sock".into());
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let cache = TemplateCache::new(store, Pagers::new(&config));
    let daemon = fixture::daemon(config, cache, fixture::nodes());
    let caller = Caller::default();
    let refused = asked(&daemon, &[path], Some(&caller)).unwrap_err().0.message;
    assert!(refused.contains("\"/src\"") && refused.contains("named volume"), "{refused}");
    let named = request(VolumeSource::Name("data".parse().unwrap()));
    assert_eq!(asked(&daemon, &[named], Some(&caller)).unwrap().len(), 1);
}
