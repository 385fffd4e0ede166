//! Which virtualisation extension /dev/kvm depends on.

use std::path::Path;

/// `svm`, `vmx`, or the reason why there is neither.
#[must_use]
pub fn vendor() -> String {
    if !Path::new("/dev/kvm").exists() {
        return "no /dev/kvm".to_owned();
    }
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    vendor_of(&flags).unwrap_or("a /dev/kvm without svm or vmx").to_owned()
}

fn vendor_of(cpuinfo: &str) -> Option<&'static str> {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"))?;
    ["svm", "vmx"]
        .into_iter()
        .find(|vendor| flags.split_ascii_whitespace().any(|flag| flag == *vendor))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_vendor_is_a_whole_flag() {
        assert_eq!(super::vendor_of("model: x\nflags\t\t: fpu svm lm\n"), Some("svm"));
        assert_eq!(super::vendor_of("flags : fpu vmx_like\n"), None);
        assert_eq!(super::vendor_of(""), None);
    }
}
