//! A guest that starts from a kernel.

use super::Vm;
use super::error::BuildError;
use super::shell::{Shell, on};
use crate::arch::{acpi, boot, cpuid, layout, regs};
use crate::config::BootConfig;
use crate::disk::DiskSpec;
use std::fs::File;
use vm_memory::Bytes;

impl Shell {
    /// Starts `kernel`; the guest runs.
    ///
    /// # Errors
    /// When the configuration is impossible or the host refuses.
    pub fn boot(
        mut self,
        config: &BootConfig,
        disks: Vec<DiskSpec>,
        kernel: File,
        initrd: Option<File>,
    ) -> Result<Vm, BuildError> {
        let writable_disks = self.devices.insert_disks(disks)?;
        let entry = boot::load(&self.memory, config.memory_bytes, kernel, initrd, &config.cmdline)?;
        self.timeline.done("kernel");

        let windows: Vec<_> = self.devices.slots().iter().map(|s| (s.base, s.size, s.gsi)).collect();
        acpi::write(&self.memory, config.vcpus, &windows)?;
        let mut generation = [0; 16];
        rustix::rand::getrandom(&mut generation, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| BuildError::Random(error.into()))?;
        self.memory.write_slice(&generation, layout::GENERATION).map_err(BuildError::Generation)?;

        let supported = cpuid::Supported::new(&self.kvm).map_err(on("KVM_GET_SUPPORTED_CPUID"))?;
        let template = cpuid::Template::new(&supported, config.vcpus);
        regs::write_tables(&self.memory)?;
        for vcpu in &self.vcpus {
            let fd = vcpu.fd();
            let entries = cpuid::for_kvm(&template.of(vcpu.id())).ok_or(BuildError::Cpuid)?;
            fd.set_cpuid2(&entries).map_err(on("KVM_SET_CPUID2"))?;
            regs::prepare_any(&fd, template.xcr0())?;
            if vcpu.id() == 0 {
                regs::prepare_first(&fd, entry)?;
            }
        }
        let mut vm = Vm {
            shell: self,
            parent: None,
            lazy: false,
            holes: Vec::new(),
            writable_disks,
            not_yet_run: None,
            paused: true,
            copying: None,
        };
        vm.resume()?;
        vm.shell.timeline.done("running");
        Ok(vm)
    }
}
