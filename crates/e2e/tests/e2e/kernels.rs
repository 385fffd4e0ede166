//! Stock Debian kernels, one vCPU and several, booted, baked and cloned.

use crate::harness::{IMAGE, bake, ok, sh, world};

/// All other tests use 6.12 with one vCPU. `DAYFLY_KERNELS=all` in the environment adds 6.1 with
/// four.
#[test]
fn both_kernels_with_one_and_four_cpus_boot_bake_and_clone() {
    let world = world();
    let mut all = vec![("6.1", "1"), ("6.12", "4")];
    if std::env::var_os("DAYFLY_KERNELS").is_some() {
        all.push(("6.1", "4"));
    }
    for (kernel, cpus) in all {
        let name = format!("e2e-k{}-{cpus}", kernel.replace('.', "-"));
        bake(IMAGE, &name, &["--kernel", kernel, "--cpus", cpus]);
        for clone in 0..2 {
            let vm = format!("{name}-{clone}");
            ok(&["create", "--name", &vm, &name]);
            let got = sh(&vm, "uname -r; nproc; echo sum 3 >/run/ask; cat /run/answer");
            let lines: Vec<&str> = got.lines().collect();
            assert!(lines[0].starts_with(&format!("{kernel}.")), "{got}");
            assert_eq!(lines[1], cpus, "{got}");
            assert!(lines[2].contains(&dayfly_e2e::guest::checksum(3)), "{got}");
            // Every vCPU runs.
            sh(&vm, "for c in $(seq 0 $(($(nproc)-1))); do taskset -c $c true || exit 1; done");
        }
        world.remove_all();
        ok(&["snapshots", "rm", &name]);
    }
    world.clean();
}
