//! Has the linker begin code and constants of the daemon on the boundary of a huge page, for
//! `dayfly_sys::code`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for option in ["max-page-size=0x200000", "separate-loadable-segments"] {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,{option}");
    }
}
