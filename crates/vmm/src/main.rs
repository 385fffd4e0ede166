//! `dayfly-vmm --config-fd N`: exactly one VM. See the library's page.

fn main() {
    dayfly_vmm::process::main()
}
