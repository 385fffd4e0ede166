//! The ACPI tables: hardware-reduced, one I/O APIC, and every device that a stock kernel must find.
//!
//! The guest powers off through the sleep control register and reboots through the reset register
//! (ACPI 6.5, sections 4.8.3.6 and 4.8.3.7). There is no PM timer, SCI, CMOS clock or keyboard
//! controller.

use super::layout;
use acpi_tables::{Aml, aml, fadt, gas, gas::GAS, madt, rsdp::Rsdp, sdt::Sdt, xsdt::XSDT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

const OEM: [u8; 6] = *b"DAYFLY";
const OEM_TABLE: [u8; 8] = *b"DAYFLYVM";

/// A virtio-mmio device as announced to the guest: guest address and length of its registers in
/// bytes, and its interrupt (GSI).
pub type Window = (u64, u64, u32);

/// Why the ACPI tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    /// The tables are longer than the space between [`layout::ACPI`] and [`layout::ACPI_END`].
    #[error("ACPI tables at {start:#x}: {bytes} bytes, room for {room}")]
    TooLong {
        /// Guest address of the table that does not fit.
        start: u64,
        /// Length of this table in bytes.
        bytes: u64,
        /// Bytes left for it.
        room: u64,
    },
    /// Address or length of a device's window does not fit in 32 bits.
    #[error("virtio-mmio window {base:#x}+{size:#x}: expected below 4 GiB")]
    Window {
        /// Guest address of the window.
        base: u64,
        /// Length of the window in bytes.
        size: u64,
    },
    /// Writing to guest memory failed.
    #[error("ACPI tables")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// Writes all tables to guest memory; the RSDP lies at [`layout::ACPI`].
///
/// All `vcpus` are announced as enabled, so that Linux counts them as present, and a file in
/// `/sys/devices/system/cpu` starts each. Processors announced as "online capable" would need
/// hot-plug by ACPI.
///
/// # Errors
/// The tables do not fit, or a window lies above 4 GiB.
pub fn write(memory: &GuestMemoryMmap, vcpus: u8, windows: &[Window]) -> Result<(), AcpiError> {
    let mut tables = Tables { memory, at: layout::ACPI.unchecked_add(64) };
    let dsdt = tables.add(&dsdt(windows)?)?;
    let fadt = tables.add(&fadt(dsdt))?;
    let madt = tables.add(&madt(vcpus))?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, 1);
    xsdt.add_entry(fadt.0);
    xsdt.add_entry(madt.0);
    let xsdt = tables.add(&xsdt)?;
    memory.write_slice(&bytes_of(&Rsdp::new(OEM, xsdt.0)), layout::ACPI)?;
    Ok(())
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

struct Tables<'a> {
    memory: &'a GuestMemoryMmap,
    at: GuestAddress,
}

impl Tables<'_> {
    fn add(&mut self, table: &dyn Aml) -> Result<GuestAddress, AcpiError> {
        let bytes = bytes_of(table);
        let (at, len) = (self.at, bytes.len() as u64);
        if at.0 + len > layout::ACPI_END {
            let (start, room) = (at.0, layout::ACPI_END - at.0);
            return Err(AcpiError::TooLong { start, bytes: len, room });
        }
        self.memory.write_slice(&bytes, at)?;
        self.at = GuestAddress((at.0 + len).next_multiple_of(16));
        Ok(at)
    }
}

fn port(port: u16) -> GAS {
    GAS::new(gas::AddressSpace::SystemIo, 8, 0, gas::AccessSize::ByteAccess, u64::from(port))
}

fn fadt(dsdt: GuestAddress) -> fadt::FADT {
    /// IAPC_BOOT_ARCH: VGA not present, CMOS RTC not present (ACPI 6.5, table 5.11).
    const NO_VGA_NO_RTC: u16 = 1 << 2 | 1 << 5;
    let mut table = fadt::FADTBuilder::new(OEM, OEM_TABLE, 1)
        .dsdt_64(dsdt.0)
        .flag(fadt::Flags::HwReducedAcpi)
        .flag(fadt::Flags::ResetRegSup)
        .flag(fadt::Flags::PwrButton)
        .flag(fadt::Flags::SlpButton);
    table.iapc_boot_arch = NO_VGA_NO_RTC.into();
    table.reset_reg = port(layout::PORT_RESET);
    table.reset_value = layout::RESET_VALUE;
    table.sleep_control_reg = port(layout::PORT_SLEEP_CONTROL);
    table.sleep_status_reg = port(layout::PORT_SLEEP_STATUS);
    table.finalize()
}

fn madt(vcpus: u8) -> madt::MADT {
    let mut table =
        madt::MADT::new(OEM, OEM_TABLE, 1, madt::LocalInterruptController::Address(layout::LAPIC));
    table.add_structure(madt::IoApic::new(0, layout::IOAPIC, 0));
    for id in 0..vcpus {
        table.add_structure(madt::ProcessorLocalApic::new(id, id, madt::EnabledStatus::Enabled));
    }
    table
}

fn edge(gsi: u32) -> aml::Interrupt {
    aml::Interrupt::new(true, true, false, false, gsi)
}

/// The VM generation id, and the event device that raises its interrupt.
fn generation_id(code: &mut Vec<u8>) {
    // Linux's driver binds to VMGENCTR, other guests to the compatible id. The package ADDR holds
    // the address, low half first.
    aml::Device::new(
        "_SB_.VGEN".into(),
        vec![
            &aml::Name::new("_HID".into(), &"VMGENCTR"),
            &aml::Name::new("_CID".into(), &"VM_Gen_Counter"),
            &aml::Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &aml::Name::new(
                "ADDR".into(),
                &aml::Package::new(vec![&layout::GENERATION.0, &aml::ZERO]),
            ),
        ],
    )
    .to_aml_bytes(code);

    aml::Device::new(
        "_SB_.GED_".into(),
        vec![
            &aml::Name::new("_HID".into(), &"ACPI0013"),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&edge(layout::GSI_GENERATION)]),
            ),
            &aml::Method::new(
                "_EVT".into(),
                1,
                true,
                vec![&aml::If::new(
                    &aml::Equal::new(&aml::Arg(0), &layout::GSI_GENERATION),
                    vec![&aml::Notify::new(&aml::Path::new("\\_SB_.VGEN"), &0x80u8)],
                )],
            ),
        ],
    )
    .to_aml_bytes(code);
}

/// One device for each window of registers.
fn virtio_devices(windows: &[Window], code: &mut Vec<u8>) -> Result<(), AcpiError> {
    for (n, &(base, size, gsi)) in windows.iter().enumerate() {
        let (Ok(base32), Ok(size32)) = (u32::try_from(base), u32::try_from(size)) else {
            return Err(AcpiError::Window { base, size });
        };
        let uid = u32::try_from(n).unwrap_or(u32::MAX);
        let (registers, irq) = (aml::Memory32Fixed::new(true, base32, size32), edge(gsi));
        aml::Device::new(
            format!("_SB_.VR{n:02X}").as_str().into(),
            vec![
                &aml::Name::new("_HID".into(), &"LNRO0005"),
                &aml::Name::new("_UID".into(), &uid),
                &aml::Name::new("_CCA".into(), &aml::ONE),
                &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&registers, &irq])),
            ],
        )
        .to_aml_bytes(code);
    }
    Ok(())
}

fn dsdt(windows: &[Window]) -> Result<Sdt, AcpiError> {
    let mut code = Vec::new();
    let one_port = |port, len| aml::IO::new(port, port, 1, len);

    let (com1_io, com1_irq) = (one_port(layout::PORT_COM1, 8), edge(layout::GSI_COM1));
    aml::Device::new(
        "_SB_.COM1".into(),
        vec![
            &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
            &aml::Name::new("_UID".into(), &aml::ZERO),
            &aml::Name::new("_CRS".into(), &aml::ResourceTemplate::new(vec![&com1_io, &com1_irq])),
        ],
    )
    .to_aml_bytes(&mut code);

    aml::Device::new(
        "_SB_.PEVT".into(),
        vec![
            &aml::Name::new("_HID".into(), &"QEMU0001"),
            &aml::Name::new(
                "_CRS".into(),
                &aml::ResourceTemplate::new(vec![&one_port(layout::PORT_PVPANIC, 1)]),
            ),
        ],
    )
    .to_aml_bytes(&mut code);

    generation_id(&mut code);
    virtio_devices(windows, &mut code)?;

    aml::Name::new("_S5_".into(), &aml::Package::new(vec![&layout::SLEEP_TYPE_S5]))
        .to_aml_bytes(&mut code);

    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM, OEM_TABLE, 1);
    table.append_slice(&code);
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vcpu_of_the_guest_is_an_enabled_processor_with_its_apic_id() {
        for vcpus in [1, 4, crate::config::MAX_VCPUS] {
            let bytes = bytes_of(&madt(vcpus));
            // Behind the header (36 bytes) and the fixed fields (8) are structures of type, length.
            let (mut rest, mut found) = (&bytes[44..], Vec::new());
            while let [kind, length, ..] = *rest {
                let (structure, others) = rest.split_at(usize::from(length));
                if kind == 0 {
                    found.push((structure[2], structure[3], structure[4] & 3));
                }
                rest = others;
            }
            // ACPI 6.5, table 5.21: flag 1 is "enabled", 2 "online capable".
            let expected: Vec<_> = (0..vcpus).map(|id| (id, id, 1)).collect();
            assert_eq!(found, expected);
        }
    }
}
