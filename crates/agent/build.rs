//! The agent travels in every initramfs: its binary carries no symbols and no debug information.

fn main() {
    println!("cargo::rustc-link-arg-bins=-Wl,--strip-all");
    println!("cargo::rerun-if-changed=build.rs");
}
