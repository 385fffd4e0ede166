//! The model of a VM's CPUs: which features of the host's CPU its guest sees.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The model of a VM's CPUs, chosen when the VM boots. Its snapshots and clones have the same.
///
/// The levels are those of the System V ABI for x86-64 (its section 3.1.1). Besides them, a guest
/// sees some features that the host has, such as mitigations. A snapshot of a level can be cloned
/// on hosts of the same vendor that have these too, and no fewer bits of physical addresses.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum CpuModel {
    /// Every feature of the host's CPU that KVM supports. A snapshot can be cloned where the CPU
    /// has all of them.
    #[default]
    #[serde(rename = "host")]
    Host,
    /// x86-64-v2: up to SSE 4.2 and POPCNT, with AES and PCLMULQDQ (servers since 2010).
    #[serde(rename = "x86-64-v2")]
    V2,
    /// x86-64-v3: AVX2, BMI, FMA, F16C, LZCNT and MOVBE, with SMEP and SMAP (servers since 2015).
    #[serde(rename = "x86-64-v3")]
    V3,
}

impl CpuModel {
    /// All models, the one with the fewest features last.
    pub const ALL: [Self; 3] = [Self::Host, Self::V3, Self::V2];

    /// The model's name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
        }
    }

    /// Whether this is [`Self::Host`], the model of VMs for which none was chosen.
    #[must_use]
    pub const fn is_host(&self) -> bool {
        matches!(self, Self::Host)
    }
}

impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no CPU model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("CPU model: expected host, x86-64-v2 or x86-64-v3, got {0:?}")]
pub struct CpuModelError(String);

impl FromStr for CpuModel {
    type Err = CpuModelError;

    fn from_str(text: &str) -> Result<Self, CpuModelError> {
        let named = Self::ALL.into_iter().find(|model| model.name() == text);
        named.ok_or_else(|| CpuModelError(text.chars().take(64).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_others_are_refused_by_name() {
        for model in CpuModel::ALL {
            assert_eq!(model.to_string().parse(), Ok(model));
            let json = serde_json::to_string(&model).unwrap();
            assert_eq!(json, format!("\"{model}\""), "users and the API write the same");
            assert_eq!(serde_json::from_str::<CpuModel>(&json).unwrap(), model);
        }
        let error = "x86-64-v4".parse::<CpuModel>().unwrap_err().to_string();
        assert_eq!(error, "CPU model: expected host, x86-64-v2 or x86-64-v3, got \"x86-64-v4\"");
        assert!("Host".parse::<CpuModel>().is_err());
        assert!(CpuModel::default().is_host() && !CpuModel::V2.is_host());
    }
}
