//! What a VM reaches outside its network: its egress policy.
//!
//! ```text
//! POLICY   = "none" | "internet" | RULE *("," RULE)
//! RULE     = TARGET [":" PROTOCOL] [":" PORTS]
//! TARGET   = IPv4 address | IPv4 range in CIDR form | NAME | "*." NAME | "*"
//! PROTOCOL = "tcp" | "udp" | "icmp"
//! PORTS    = PORT | FIRST "-" LAST                 of TCP and UDP, if no protocol is given
//! ```
//!
//! `*.example.org` means every name below `example.org`, and not that name. `*` means every name.
//! A rule without protocol and ports permits every protocol. The text of a policy is canonical:
//! rules are sorted, each once, so equal policies have equal texts.

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;
use std::sync::Arc;

/// The most rules of a policy.
pub const MAX_RULES: usize = 64;
/// The most bytes of a policy's text.
pub const MAX_TEXT_BYTES: usize = 8192;
/// The most bytes of a name without its final dot (RFC 1035, 2.3.4).
const MAX_NAME_BYTES: usize = 253;
/// The most bytes of a label.
const MAX_LABEL_BYTES: usize = 63;

/// An egress policy. Cloning it copies a pointer.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(value_type = String))]
pub struct Egress(Policy);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Policy {
    Internet,
    None,
    Rules(Arc<[Rule]>),
}

/// One rule: a target, and how it is reached.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    /// The target.
    pub target: Target,
    /// Protocol and ports.
    pub service: Service,
}

/// What a rule permits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The addresses of a range.
    Range(Ipv4Net),
    /// The addresses of a name, or of names.
    Name(Pattern),
}

/// One name, or all names below one: in lower case, without a final dot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pattern(String);

/// Protocol and ports of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Service {
    /// The protocol; `None`: every protocol, or TCP and UDP if there are ports.
    pub protocol: Option<Protocol>,
    /// The first and the last port; `None`: all.
    pub ports: Option<(u16, u16)>,
}

/// A protocol above IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP.
    Icmp,
}

/// Why a text is no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
    /// A rule is wrong.
    #[error("egress rule {rule:?}: expected {expected}")]
    Rule {
        /// The rule, at most 80 characters of it.
        rule: String,
        /// What a rule must have.
        expected: &'static str,
    },
    /// `none` or `internet` is one of several rules.
    #[error("egress: {0:?} is a whole policy; expected it alone, or rules alone")]
    NotAlone(&'static str),
    /// The text is too long, or has too many rules.
    #[error("egress: expected at most {MAX_RULES} rules in {MAX_TEXT_BYTES} bytes, got {0}")]
    Long(String),
}

impl Egress {
    /// The policy `internet`: no restriction by the policy.
    #[must_use]
    pub const fn internet() -> Self {
        Self(Policy::Internet)
    }

    /// The policy `none`: nothing outside the VM's network.
    #[must_use]
    pub const fn none() -> Self {
        Self(Policy::None)
    }

    /// Whether the policy is `internet`.
    #[must_use]
    pub const fn is_internet(&self) -> bool {
        matches!(self.0, Policy::Internet)
    }

    /// Whether the policy is `none`.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        matches!(self.0, Policy::None)
    }

    /// The rules, sorted; empty for `none` and `internet`.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        match &self.0 {
            Policy::Rules(rules) => rules,
            Policy::Internet | Policy::None => &[],
        }
    }

    /// The services of rules with names, sorted, each once.
    #[must_use]
    pub fn services_of_names(&self) -> Vec<Service> {
        let named = self.rules().iter().filter(|rule| matches!(rule.target, Target::Name(_)));
        named.map(|rule| rule.service).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The services at which a name may be reached. `labels` are the name's, from the root, in
    /// lower case.
    #[must_use]
    pub fn services_of(&self, labels: &[&[u8]]) -> Vec<Service> {
        let of_name = |rule: &&Rule| match &rule.target {
            Target::Name(pattern) => pattern.matches(labels),
            Target::Range(_) => false,
        };
        let services = self.rules().iter().filter(of_name).map(|rule| rule.service);
        services.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Whether the VM may resolve this name; labels as for [`Self::services_of`].
    #[must_use]
    pub fn resolves(&self, labels: &[&[u8]]) -> bool {
        self.is_internet() || !self.services_of(labels).is_empty()
    }
}

impl Default for Egress {
    fn default() -> Self {
        Self::internet()
    }
}

impl Service {
    /// Whether a packet of this protocol, by its number, to this port belongs to the service.
    /// Protocols other than TCP and UDP have no port.
    #[must_use]
    pub fn has(&self, protocol: u8, port: u16) -> bool {
        const TCP: u8 = Protocol::Tcp.number();
        const UDP: u8 = Protocol::Udp.number();
        let ports = || self.ports.is_none_or(|(first, last)| (first..=last).contains(&port));
        match (self.protocol, self.ports) {
            (None, None) => true,
            (None, Some(_)) => [TCP, UDP].contains(&protocol) && ports(),
            (Some(of), _) => of.number() == protocol && ports(),
        }
    }
}

impl Protocol {
    /// The number in an IPv4 header.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Icmp => 1,
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }
}

impl Pattern {
    /// Whether a name matches; its labels are given from the root, in lower case.
    #[must_use]
    pub fn matches(&self, labels: &[&[u8]]) -> bool {
        let mut own = self.0.split('.').rev();
        let mut given = labels.iter();
        loop {
            match (own.next(), given.next()) {
                (Some("*"), Some(_)) => return true,
                (Some(own), Some(given)) if own.as_bytes() == *given => {}
                (None, None) => return true,
                _ => return false,
            }
        }
    }

    fn parse(text: &str) -> Result<Self, &'static str> {
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        if name == "*" {
            return Ok(Self(name));
        }
        let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_');
        let is_label =
            |label: &str| (1..=MAX_LABEL_BYTES).contains(&label.len()) && label.bytes().all(word);
        let below = name.strip_prefix("*.");
        let labels: Vec<&str> = below.unwrap_or(&name).split('.').collect();
        if name.len() > MAX_NAME_BYTES || !labels.iter().all(|label| is_label(label)) {
            return Err("an IPv4 address, a range such as 10.0.0.0/8, or a name such as \
                example.org, *.example.org or *; other alphabets as xn--…");
        }
        let last = labels.last().copied().unwrap_or_default();
        if last.bytes().all(|b| b.is_ascii_digit()) {
            return Err("an IPv4 address with four numbers, or a name whose last label is a word");
        }
        if below.is_none() && labels.len() < 2 {
            return Err("a name with a dot: a single label is never a host of the internet");
        }
        Ok(Self(name))
    }
}

impl Target {
    fn parse(text: &str) -> Result<Self, &'static str> {
        if text.starts_with('[') {
            return Err("an IPv4 address or a name: VMs have no IPv6");
        }
        if let Ok(address) = text.parse::<Ipv4Addr>() {
            return Ok(Self::Range(address.into()));
        }
        if text.contains('/') {
            let range: Ipv4Net = text.parse().map_err(|_| "an IPv4 range such as 10.0.0.0/8")?;
            let whole = range.trunc() == range;
            let expected = "the first address of the range, such as 10.0.0.0/8 and not 10.0.0.1/8";
            return whole.then_some(Self::Range(range)).ok_or(expected);
        }
        Pattern::parse(text).map(Self::Name)
    }
}

const FORM: &str = "TARGET[:tcp|udp|icmp][:PORT or FIRST-LAST], such as example.org:443, \
    10.0.0.0/8:tcp:1-1023 or 192.0.2.7:icmp";

fn ports(text: &str) -> Result<(u16, u16), &'static str> {
    let port = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<u16>().ok().filter(|port| digits && *port > 0)
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok((first, last)),
        _ => Err(FORM),
    }
}

fn rule(text: &str) -> Result<Rule, &'static str> {
    if text.matches(':').count() > 2 || text.contains("::") {
        return Err("an IPv4 address or a name, then at most a protocol and ports: VMs have no \
            IPv6");
    }
    let mut parts = text.split(':');
    let target = Target::parse(parts.next().unwrap_or_default())?;
    let mut service = Service { protocol: None, ports: None };
    for part in parts {
        let protocol = match part {
            "tcp" => Some(Protocol::Tcp),
            "udp" => Some(Protocol::Udp),
            "icmp" => Some(Protocol::Icmp),
            _ => None,
        };
        if service.ports.is_some() || protocol.is_some() && service.protocol.is_some() {
            return Err(FORM);
        }
        match protocol {
            Some(_) => service.protocol = protocol,
            None => service.ports = Some(ports(part)?),
        }
    }
    if service.protocol == Some(Protocol::Icmp) && service.ports.is_some() {
        return Err("no port after icmp, which has none");
    }
    Ok(Rule { target, service })
}

impl FromStr for Egress {
    type Err = EgressError;

    fn from_str(text: &str) -> Result<Self, EgressError> {
        match text {
            "internet" => return Ok(Self::internet()),
            "none" => return Ok(Self::none()),
            _ => {}
        }
        if text.len() > MAX_TEXT_BYTES {
            return Err(EgressError::Long(format!("{} bytes", text.len())));
        }
        let count = text.split(',').count();
        if count > MAX_RULES {
            return Err(EgressError::Long(format!("{count} rules")));
        }
        let mut rules = BTreeSet::new();
        for one in text.split(',') {
            if let Some(whole) = ["none", "internet"].into_iter().find(|whole| *whole == one) {
                return Err(EgressError::NotAlone(whole));
            }
            let wrong =
                |expected| EgressError::Rule { rule: one.chars().take(80).collect(), expected };
            rules.insert(rule(one).map_err(wrong)?);
        }
        Ok(Self(Policy::Rules(rules.into_iter().collect())))
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
        })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Target::Range(range) if range.prefix_len() == 32 => write!(f, "{}", range.addr())?,
            Target::Range(range) => write!(f, "{range}")?,
            Target::Name(Pattern(name)) => f.write_str(name)?,
        }
        if let Some(protocol) = self.service.protocol {
            write!(f, ":{protocol}")?;
        }
        match self.service.ports {
            None => Ok(()),
            Some((first, last)) if first == last => write!(f, ":{first}"),
            Some((first, last)) => write!(f, ":{first}-{last}"),
        }
    }
}

impl fmt::Display for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Policy::Internet => f.write_str("internet"),
            Policy::None => f.write_str("none"),
            Policy::Rules(rules) => rules.iter().enumerate().try_for_each(|(place, rule)| {
                if place > 0 {
                    f.write_str(",")?;
                }
                write!(f, "{rule}")
            }),
        }
    }
}

impl fmt::Debug for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Egress({self})")
    }
}

impl TryFrom<String> for Egress {
    type Error = EgressError;
    fn try_from(text: String) -> Result<Self, EgressError> {
        text.parse()
    }
}

impl From<Egress> for String {
    fn from(egress: Egress) -> Self {
        egress.to_string()
    }
}

#[cfg(test)]
#[path = "egress_tests.rs"]
mod tests;
