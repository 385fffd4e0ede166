//! `dayfly-vmm --zygote-fd N --id ------------` runs a zygote, from which VMMs are forked.
//! `dayfly-vmm --config-fd N` runs one VMM. See the page of the library `dayfly_vmm`.

#[global_allocator]
static HEAP: dayfly_vmm::heap::WithoutRemap = dayfly_vmm::heap::WithoutRemap;

fn main() {
    dayfly_vmm::process::main()
}
