//! Stock Debian kernels, one vCPU and several, booted, baked and cloned.

use crate::harness::{IMAGE, bake, ok, sh, world};

/// All other tests use 6.12 with one vCPU of the host's own model. `DAYFLY_KERNELS=all` in the
/// environment adds 6.1 with four.
#[test]
fn both_kernels_with_one_and_four_cpus_boot_bake_and_clone() {
    let world = world();
    let mut all = vec![("6.1", "1", "x86-64-v2"), ("6.12", "4", "host")];
    if std::env::var_os("DAYFLY_KERNELS").is_some() {
        all.push(("6.1", "4", "x86-64-v3"));
    }
    for (kernel, cpus, model) in all {
        let name = format!("e2e-k{}-{cpus}", kernel.replace('.', "-"));
        bake(IMAGE, &name, &["--kernel", kernel, "--cpus", cpus, "--cpu-model", model]);
        let vm = format!("{name}-clone");
        ok(&["create", "--name", &vm, &name]);
        sees_the_cpu_of(model, &name, &vm);
        let got = sh(&vm, "uname -r; nproc; echo sum 3 >/run/ask; cat /run/answer");
        let lines: Vec<&str> = got.lines().collect();
        assert!(lines[0].starts_with(&format!("{kernel}.")), "{got}");
        assert_eq!(lines[1], cpus, "{got}");
        assert!(lines[2].contains(&dayfly_e2e::guest::checksum(3)), "{got}");
        // Every vCPU runs.
        sh(&vm, "for c in $(seq 0 $(($(nproc)-1))); do taskset -c $c true || exit 1; done");
        world.remove_all();
        ok(&["snapshots", "rm", &name]);
    }
    world.clean();
}

/// Checks what Linux says of a clone's CPU.
fn sees_the_cpu_of(model: &str, snapshot: &str, vm: &str) {
    let info: serde_json::Value =
        serde_json::from_str(&ok(&["snapshots", "inspect", snapshot])).unwrap();
    assert_eq!(info["cpu_model"], model, "{info}");
    let cpu = sh(vm, "grep -m 2 -e '^model name' -e ^flags /proc/cpuinfo");
    let has = |flag: &str| cpu.split_whitespace().any(|word| word == flag);
    assert!(has("sse4_2") && has("popcnt"), "{cpu}");
    assert_eq!(cpu.contains(&format!("dayfly {model}")), model != "host", "{cpu}");
    if model == "x86-64-v2" {
        assert!(!has("avx") && !has("xsave") && !has("bmi1"), "{cpu}");
    }
}
