//! Booting a guest from a kernel.

use super::error::{BuildError, on};
use super::machine::Vm;
use super::ram::Ram;
use super::warm::WarmVmm;
use crate::arch::{acpi, boot, cpuid, layout, regs};
use crate::config::BootConfig;
use crate::disk::DiskSpec;
use crate::vcpu::state::MAX_CPUID;
use std::fs::File;
use vm_memory::Bytes;

impl WarmVmm {
    /// Loads `kernel`. The guest is paused before its first instruction.
    ///
    /// # Errors
    /// When the configuration is invalid or the host refuses a step.
    pub fn boot(
        mut self,
        config: &BootConfig,
        disks: Vec<DiskSpec>,
        kernel: File,
        initrd: Option<File>,
    ) -> Result<Vm, BuildError> {
        let writable_disks = self.devices.insert_used_disks(disks)?;
        let entry = boot::load(&self.memory, config.memory_bytes, kernel, initrd, &config.cmdline)?;
        self.timeline.done("kernel");

        let windows: Vec<_> =
            self.devices.slots().iter().map(|s| (s.base, s.size, s.gsi)).collect();
        let known_vcpus = self.shape.known_vcpus();
        acpi::write(&self.memory, known_vcpus, &windows)?;
        let mut generation = [0; 16];
        rustix::rand::getrandom(&mut generation, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| BuildError::Random(error.into()))?;
        self.memory.write_slice(&generation, layout::GENERATION).map_err(BuildError::Generation)?;

        self.supported.check(config.cpu_model)?;
        let template = cpuid::Template::new(&self.supported, known_vcpus, config.cpu_model);
        regs::write_tables(&self.memory)?;
        for vcpu in &self.vcpus {
            let fd = vcpu.fd();
            let entries = template.of(vcpu.id());
            let given = cpuid::for_kvm(&entries).ok_or(BuildError::Cpuid)?;
            fd.set_cpuid2(&given).map_err(on("KVM_SET_CPUID2"))?;
            if !config.cpu_model.is_host() {
                let has = fd.get_cpuid2(MAX_CPUID).map_err(on("KVM_GET_CPUID2"))?;
                cpuid::check_given(config.cpu_model, has.as_slice(), &entries)?;
            }
            regs::prepare_any(&fd, template.xcr0())?;
            if vcpu.id() == 0 {
                regs::prepare_first(&fd, entry)?;
            }
        }
        Ok(Vm {
            warm: self,
            ram: Ram::Booted,
            writable_disks,
            not_yet_run: None,
            paused: true,
            stalled: false,
            copying: None,
        })
    }
}

impl Vm {
    /// Ends the set-up, and starts a guest that was booted.
    ///
    /// # Errors
    /// None, for a guest without saved clocks.
    pub fn start(&mut self, disks_bytes: &[u64]) -> Result<(), BuildError> {
        self.warm.end_set_up(disks_bytes);
        self.resume()?;
        self.warm.timeline.done("running");
        Ok(())
    }
}
