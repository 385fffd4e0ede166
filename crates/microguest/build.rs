//! Builds the guest in `guest/` with gcc: no libc, no SSE, no start files.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
        .join("microguest.elf");
    println!("cargo::rerun-if-changed=guest");
    let status = Command::new("gcc")
        .args([
            "-m64",
            "-Os",
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-ffreestanding",
            "-nostdlib",
        ])
        .args(["-static", "-fno-pie", "-no-pie", "-fno-stack-protector", "-mgeneral-regs-only"])
        .args(["-mno-red-zone", "-fcf-protection=none", "-fno-asynchronous-unwind-tables"])
        .args(["-Wl,--build-id=none", "-Wl,-z,max-page-size=4096", "-Wl,--no-warn-rwx-segments"])
        .args([
            "-T",
            "guest/guest.ld",
            "guest/start.S",
            "guest/guest.c",
            "guest/aps.c",
            "guest/balloon.c",
            "guest/disk.c",
            "guest/grow.c",
            "guest/rings.c",
            "guest/flood.c",
            "-o",
        ])
        .arg(&out)
        .status()
        .expect("gcc is needed to build the microguest (Debian package gcc)");
    assert!(status.success(), "gcc could not build the microguest: {status}");
}
