//! Identifiers: [`VmId`] names a VM for programs, [`VmName`] names it for people, and [`Name`]
//! names everything that is stored.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A VM's identifier: 48 random bits, written as 12 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
pub struct VmId([u8; 6]);

/// Why a text is not a [`VmId`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("VM id: expected 12 lower-case hexadecimal digits, got {0:?}")]
pub struct IdError(String);

impl VmId {
    /// A fresh identifier from the kernel's random number generator.
    ///
    /// # Panics
    /// If the kernel gives no random bytes. Linux does so only before its generator is seeded at
    /// boot.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; 6];
        getrandom::fill(&mut bytes)
            .expect("getrandom(2) gives bytes once the kernel's generator is seeded");
        Self(bytes)
    }
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VmId({self})")
    }
}

impl FromStr for VmId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        let bad = || IdError(text.chars().take(64).collect());
        if text.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(bad());
        }
        let mut bytes = [0; 6];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| bad())?;
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for VmId {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<VmId> for String {
    fn from(id: VmId) -> Self {
        id.to_string()
    }
}

/// The name of an image, a kernel, a snapshot or a network: `[a-z0-9][a-z0-9._-]{0,62}`.
///
/// A name is safe as one path component: it has no slash and no leading dot. A VM that an older
/// daemon created may have such a name too; a request names a VM by a [`VmName`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
pub struct Name(String);

/// Why a text is not a [`Name`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("name {0:?}: expected 1 to 63 of a-z, 0-9, '.', '_', '-', starting with a letter or digit")]
pub struct NameError(String);

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let fits = (1..=63).contains(&text.len())
            && text.bytes().all(|b| word(b) || matches!(b, b'.' | b'_' | b'-'))
            && text.bytes().next().is_some_and(word);
        if fits {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError(text.chars().take(80).collect()))
        }
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

/// The name that a request gives a VM: `[a-z0-9][a-z0-9_-]{0,62}`, but not `localhost`.
///
/// The name is one DNS label (RFC 1035, 2.3.4), so it resolves only below `dayfly.internal`. It
/// cannot be taken for an internet name or an address. Every `VmName` is a [`Name`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
pub struct VmName(String);

/// Why a text is not a [`VmName`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VmNameError {
    /// The text is not of the form `[a-z0-9][a-z0-9_-]{0,62}`.
    #[error(
        "VM name {0:?}: expected 1 to 63 of a-z, 0-9, '_', '-', starting with a letter or digit; \
         a VM's name has no dot, choose another"
    )]
    Form(String),
    /// The text has the right form, but every resolver takes the name for the machine itself (RFC
    /// 6761, 6.3).
    #[error("VM name {0:?}: is reserved for the machine itself; choose another")]
    Reserved(String),
}

impl VmName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl AsRef<str> for VmName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for VmName {
    type Err = VmNameError;
    fn from_str(text: &str) -> Result<Self, VmNameError> {
        if text == "localhost" {
            return Err(VmNameError::Reserved(text.to_owned()));
        }
        match text.parse::<Name>() {
            Ok(Name(name)) if !name.contains('.') => Ok(Self(name)),
            _ => Err(VmNameError::Form(text.chars().take(80).collect())),
        }
    }
}

impl TryFrom<String> for VmName {
    type Error = VmNameError;
    fn try_from(text: String) -> Result<Self, VmNameError> {
        text.parse()
    }
}

impl From<VmName> for String {
    fn from(name: VmName) -> Self {
        name.0
    }
}

impl From<VmName> for Name {
    fn from(name: VmName) -> Self {
        Self(name.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_is_a_name_or_an_error_and_a_name_is_one_path_component(text in ".{0,80}") {
            if let Ok(name) = text.parse::<Name>() {
                let path = std::path::Path::new(name.as_str());
                prop_assert_eq!(path.components().count(), 1);
                prop_assert_eq!(path.file_name().and_then(|f| f.to_str()), Some(name.as_str()));
            }
        }

        #[test]
        fn a_vm_name_is_a_name_and_one_label(text in "[a-z0-9._-]{0,70}|.{0,80}") {
            if let Ok(name) = text.parse::<VmName>() {
                prop_assert!((1..=63).contains(&name.as_str().len()));
                prop_assert!(!name.as_str().contains('.'));
                let same = Name::from(name.clone());
                prop_assert_eq!(same.as_str(), name.as_str());
                prop_assert!(name.as_str().parse::<std::net::Ipv4Addr>().is_err());
            }
        }

        #[test]
        fn an_id_reads_back(bytes in any::<[u8; 6]>()) {
            let id = VmId(bytes);
            prop_assert_eq!(id.to_string().parse::<VmId>(), Ok(id));
        }
    }

    #[test]
    fn names_that_would_leave_their_folder_are_refused() {
        for bad in ["", ".", "..", "a/b", "/a", ".hidden", "-x", "Ä", "a\0", "A", &"a".repeat(64)]
        {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_vm_is_not_named_as_something_else() {
        let long = "a".repeat(64);
        for bad in
            ["pypi.org", "www.example.com", "10.88.0.6", "localhost", "a..b", "a.", "", "A", &long]
        {
            let error = bad.parse::<VmName>().unwrap_err().to_string();
            assert!(
                error.contains(&format!("{:?}", bad)) && error.contains("choose another"),
                "{error}"
            );
            // The API decodes a request body with the same check.
            assert!(serde_json::from_value::<VmName>(bad.into()).is_err(), "{bad}");
        }
        for good in ["web", "a", "0", "web-1", "my_vm", "localhost-2", &"a".repeat(63)] {
            assert_eq!(good.parse::<VmName>().unwrap().as_str(), good);
        }
    }
}
