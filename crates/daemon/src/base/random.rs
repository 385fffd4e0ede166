//! Random bytes from the host's kernel.
/// `N` bytes of getrandom(2).
///
/// # Panics
/// Before the kernel's generator is seeded, which it is once a daemon can be started.
#[must_use]
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    #[expect(
        clippy::expect_used,
        reason = "getrandom(2) does not fail on a seeded kernel with a valid buffer"
    )]
    getrandom::fill(&mut bytes)
        .expect("getrandom(2) gives bytes once the kernel's generator is seeded");
    bytes
}
