//! How an image's program is started, as the API shows it and as manifests store it.

use crate::GuestPort;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
#[cfg(feature = "openapi")]
use utoipa::ToSchema;

/// How the source of an image begins that holds the modules of a kernel, and no root disk.
pub const MODULES_SOURCE: &str = "modules of kernel ";

/// How to start an image's program (OCI image config).
///
/// Missing fields are empty, and unknown fields are ignored, because a client may be older than its
/// daemon. A manifest is stricter: [`known`], [`whole`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
#[serde(default)]
pub struct ImageConfig {
    /// Program and first arguments.
    pub entrypoint: Vec<String>,
    /// Further arguments.
    pub cmd: Vec<String>,
    /// Environment, as `NAME=value`.
    pub env: Vec<String>,
    /// Working folder of programs.
    pub workdir: String,
    /// User that programs run as.
    pub user: String,
    /// Ports that the program listens on, such as `80/tcp` (EXPOSE). Manifests of earlier versions
    /// have no such field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exposed: Vec<String>,
}

impl ImageConfig {
    /// The ports of `exposed`, without repetitions. What is no port is left out.
    #[must_use]
    pub fn exposed_ports(&self) -> BTreeSet<GuestPort> {
        self.exposed.iter().filter_map(|port| port.parse().ok()).collect()
    }
}

/// A decoder of an [`ImageConfig`] by the rules of the given serde attributes.
macro_rules! decoder {
    ($(#[$doc:meta])* $name:ident, $(#[$rule:meta])*) => {
        $(#[$doc])*
        pub fn $name<'de, D: serde::Deserializer<'de>>(from: D) -> Result<ImageConfig, D::Error> {
            #[derive(Default, Deserialize)]
            $(#[$rule])*
            struct Strict {
                entrypoint: Vec<String>,
                cmd: Vec<String>,
                env: Vec<String>,
                workdir: String,
                user: String,
                #[serde(default)]
                exposed: Vec<String>,
            }
            let Strict { entrypoint, cmd, env, workdir, user, exposed } =
                Strict::deserialize(from)?;
            Ok(ImageConfig { entrypoint, cmd, env, workdir, user, exposed })
        }
    };
}

decoder! {
    /// Decodes a config in which fields may be missing. For `deserialize_with`.
    ///
    /// # Errors
    /// The config has an unknown field, or a field of another type.
    known, #[serde(default, deny_unknown_fields)]
}

decoder! {
    /// Decodes a config that has all fields. For `deserialize_with`.
    ///
    /// # Errors
    /// A field is missing, unknown, or of another type.
    whole, #[serde(deny_unknown_fields)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Known(#[serde(deserialize_with = "known")] ImageConfig);
    #[derive(Deserialize)]
    struct Whole(#[serde(deserialize_with = "whole")] ImageConfig);

    #[test]
    fn manifests_refuse_what_an_answer_may_have() {
        let full = r#"{"entrypoint":["/a"],"cmd":["b"],"env":["C=d"],"workdir":"/e","user":"f"}"#;
        let more = r#"{"entrypoint":[],"cmd":[],"env":[],"workdir":"","user":"","new":1}"#;
        let less = r#"{"cmd":["b"]}"#;
        let config: ImageConfig = serde_json::from_str(full).unwrap();
        assert_eq!(serde_json::from_str::<Known>(full).unwrap().0, config);
        assert_eq!(serde_json::from_str::<Whole>(full).unwrap().0, config);
        assert!(serde_json::from_str::<ImageConfig>(more).is_ok());
        assert!(serde_json::from_str::<Known>(more).is_err());
        assert!(serde_json::from_str::<Whole>(more).is_err());
        assert_eq!(serde_json::from_str::<Known>(less).unwrap().0.cmd, ["b"]);
        assert!(serde_json::from_str::<Whole>(less).is_err());
        // As earlier versions wrote it, which had no exposed ports.
        assert_eq!(serde_json::to_string(&config).unwrap(), full);
    }

    #[test]
    fn exposed_ports_are_those_that_are_ports() {
        let exposed = ["80/tcp", "53/udp", "80", "9/sctp", "x"].map(str::to_owned).to_vec();
        let config = ImageConfig { exposed, ..ImageConfig::default() };
        let ports: Vec<String> = config.exposed_ports().iter().map(ToString::to_string).collect();
        assert_eq!(ports, ["53/udp", "80/tcp"]);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Whole>(&text).unwrap().0, config);
    }
}
