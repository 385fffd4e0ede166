//! What the host's CPUs can do.

/// The highest level of x86-64 that these CPUs have, 1 to 4 (psABI, "Micro-Architecture Levels").
#[must_use]
pub fn level() -> u8 {
    use std::arch::is_x86_feature_detected as has;
    let levels = [
        has!("sse4.2") && has!("ssse3") && has!("popcnt") && has!("cmpxchg16b"),
        has!("avx2")
            && has!("bmi1")
            && has!("bmi2")
            && has!("f16c")
            && has!("fma")
            && has!("lzcnt")
            && has!("movbe")
            && has!("xsave"),
        has!("avx512f")
            && has!("avx512bw")
            && has!("avx512cd")
            && has!("avx512dq")
            && has!("avx512vl"),
    ];
    levels.into_iter().take_while(|has| *has).fold(1, |level, _| level + 1)
}
