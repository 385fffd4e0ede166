//! Strips the agent's binary of symbols and debug information, because every initramfs contains it.

fn main() {
    println!("cargo::rustc-link-arg-bins=-Wl,--strip-all");
    println!("cargo::rerun-if-changed=build.rs");
}
