//! A VM of a chain: a clone that grows, and is snapshotted, again and again. Plays the daemon's part, as [`crate::bake`] does.

use crate::bake::{self, Fds, Keep, Saved, Vmm, WITHIN};
use crate::room::Room;
use anyhow::{Context, Result, bail, ensure};
use dayfly_microguest::Growth;
use dayfly_store::{ChainLayer, DiskSpec, Pin, SnapshotSpec, Store, VmLayer};
use dayfly_units::{Name, VmId};
use dayfly_vmm::config::{DiskConfig, LayerConfig, RestoreConfig, Shape, Start};
use dayfly_vmm::control::Client;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// A clone of a snapshot of a guest with the word `grow=`.
pub struct Grower<'a> {
    store: &'a Store,
    folder: tempfile::TempDir,
    _vmm: Vmm,
    id: VmId,
    spec: SnapshotSpec,
    writable: VmLayer,
    _pin: Pin,
}

impl<'a> Grower<'a> {
    /// Clones `from`, and has the guest do `what`; returns when it has.
    pub fn new(room: &Room, store: &'a Store, from: &Name, what: Growth) -> Result<Self> {
        let open = store.open_snapshot(from)?;
        let (manifest, file) = (&open.manifest, open.disks.first().context("a snapshot has a disk")?);
        let id = VmId::random();
        let folder = tempfile::Builder::new().prefix("grow").tempdir_in(room.run())?;
        let shape = Shape { memory_bytes: manifest.memory_bytes, vcpus: manifest.vcpus, disks: 1, nets: 0 };
        let vmm =
            bake::spawn(room, folder.path(), id, Start::Shell { shape, record: false }, Fds::default())?;
        let (writable, data) = store.create_vm_layer(id, 0)?;
        let mut fds: Vec<OwnedFd> = Vec::new();
        let mut add = |fd: OwnedFd| {
            fds.push(fd);
            i32::try_from(fds.len() - 1)
        };
        let (state_fd, memory_fd) =
            (add(open.state.try_clone()?.into())?, add(open.memory.try_clone()?.into())?);
        let base_fd = add(file.base.try_clone()?.into())?;
        let mut layers = Vec::new();
        for layer in &file.layers {
            let data_fd = add(layer.data.try_clone()?.into())?;
            layers.push(LayerConfig { data_fd, map_fd: add(layer.map.try_clone()?.into())? });
        }
        let writable_fd = Some(add(data.into())?);
        let disk = DiskConfig { size_bytes: file.size_bytes, base_fd, layers, writable_fd };
        let config = RestoreConfig {
            state_fd,
            memory_fd,
            shared: None,
            disks: vec![disk],
            generation: what.generation(),
            working_set_fd: None,
            pager_fd: None,
            paused: false,
        };
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        Client::connect(&folder.path().join("control.sock"), Some(WITHIN))?.restore(config, &borrowed)?;
        let disk = manifest.disks.first().context("a snapshot has a disk")?;
        let spec = SnapshotSpec {
            parent: Some(from.clone()),
            kernel: manifest.kernel.clone(),
            vcpus: manifest.vcpus,
            nets: 0,
            memory_bytes: manifest.memory_bytes,
            agent_version: manifest.agent_version.clone(),
            config: manifest.config.clone(),
            labels: manifest.labels.clone(),
            disks: vec![DiskSpec {
                image: disk.image.clone(),
                size_bytes: disk.size_bytes,
                writable: true,
                layers: disk.layers.iter().copied().map(ChainLayer::Stored).collect(),
            }],
        };
        let vm = Self { store, folder, _vmm: vmm, id, spec, writable, _pin: open.pin.clone() };
        vm.wait()?;
        Ok(vm)
    }

    /// What the guest has printed.
    pub fn console(&self) -> Result<String> {
        std::fs::read_to_string(self.folder.path().join("console.log")).context("the guest's console")
    }

    /// Waits until the guest has obeyed, well or not.
    fn wait(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let console = self.console()?;
            if ["ready\n", "churning\n"].iter().any(|end| console.ends_with(end)) {
                // A handful of instructions until it waits.
                std::thread::sleep(Duration::from_millis(20));
                return Ok(());
            }
            if console.contains("failed") || begun.elapsed() > WITHIN {
                let exit = std::fs::read_to_string(self.folder.path().join("exit.json")).unwrap_or_default();
                bail!("a guest of a chain; console {console:?}, exit record {exit:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Snapshots it; it stands then.
    pub fn snapshot(&mut self, to: &Name, keep: Keep<'_>) -> Result<Saved> {
        let saved = bake::save(self.store, self.folder.path(), to, self.spec.clone(), &self.writable, keep)?;
        self.writable = saved.writable;
        Ok(saved)
    }

    /// Lets it go on after that, told of the chain that was committed if that is another than its own; gives the layers it stands on.
    pub fn go_on(&mut self, saved: &Saved) -> Result<usize> {
        let mut control = Client::connect(&self.folder.path().join("control.sock"), Some(WITHIN))?;
        control.resume()?;
        let stored = &saved.committed.manifest.disks[0].layers;
        let chain = &mut self.spec.disks[0].layers;
        if stored.len() <= chain.len() {
            let open = self.store.open_layers(stored, "a VM that goes on")?;
            let files = open.iter().flat_map(|layer| [layer.data.as_fd(), layer.map.as_fd()]);
            let fds: Vec<_> = std::iter::once(saved.top.as_fd()).chain(files).collect();
            control.rebase(0, &fds)?;
        }
        *chain = stored.iter().copied().map(ChainLayer::Stored).collect();
        Ok(chain.len())
    }

    /// Ends it.
    pub fn end(self) -> Result<()> {
        let Self { store, id, _vmm: vmm, .. } = self;
        drop(vmm);
        Ok(store.remove_vm(id)?)
    }
}

/// Lets a clone of `of` read all of its disk and memory, and compare it with what it remembers; gives how many slots were written.
pub fn look(room: &Room, store: &Store, of: &Name) -> Result<u64> {
    let vm = Grower::new(room, store, of, Growth::Look)?;
    let console = vm.console()?;
    vm.end()?;
    let found = console.lines().find_map(|line| line.strip_prefix("found "));
    let found = found.with_context(|| format!("a clone of {of}; console {console:?}"))?;
    let found = u64::from_str_radix(found, 16)?;
    ensure!(found > 0, "a clone of {of} found nothing");
    Ok(found)
}
