//! `dayfly-vmm --zygote-fd N --id ------------`: a process that VMMs are forked from; `dayfly-vmm --config-fd N`: one VMM. See the
//! library's page.

fn main() {
    dayfly_vmm::process::main()
}
