//! Lists, page after page.

use super::call::{empty_body, query};
use super::{Client, ClientError};
use crate::types::{List, MAX_PAGE_ITEMS, VmState};
use http::Method;
use serde::de::DeserializeOwned;

/// Which VMs a client wants. Of each list but `labels`, one value must match, if there are any. The
/// default is all running VMs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmQuery {
    /// VMs that have ended too.
    pub all: bool,
    /// Starts of ids.
    pub ids: Vec<String>,
    /// Parts of names.
    pub names: Vec<String>,
    /// States.
    pub states: Vec<VmState>,
    /// `KEY` or `KEY=VALUE`; all must match.
    pub labels: Vec<String>,
    /// Names of snapshots or images that the VMs were made from.
    pub ancestors: Vec<String>,
    /// Names of images.
    pub images: Vec<String>,
}

impl VmQuery {
    pub(super) fn path(&self) -> String {
        let states: Vec<String> = self.states.iter().map(|s| s.name().to_owned()).collect();
        let lists = [
            ("id", &self.ids),
            ("name", &self.names),
            ("status", &states),
            ("label", &self.labels),
            ("ancestor", &self.ancestors),
            ("image", &self.images),
        ];
        let one = |(key, values): (&str, &Vec<String>)| -> String {
            values.iter().map(|value| format!("&{key}={}", query(value))).collect()
        };
        format!("/v1/vms?all={}{}", self.all, lists.map(one).concat())
    }
}

impl Client {
    /// The items of all pages of a list. An older daemon answers with the whole list.
    pub(super) async fn list<T: DeserializeOwned>(
        &self,
        path: &str,
    ) -> Result<Vec<T>, ClientError> {
        let join = if path.contains('?') { '&' } else { '?' };
        let first = format!("{path}{join}limit={MAX_PAGE_ITEMS}");
        let mut at = first.clone();
        let mut items = Vec::new();
        loop {
            let page: List<T> = self.json(Method::GET, at.clone(), empty_body()).await?;
            let got = page.items.len();
            items.extend(page.items);
            match page.next {
                None => return Ok(items),
                Some(next) if got > 0 => at = format!("{first}&cursor={}", query(&next)),
                Some(_) => {
                    return Err(ClientError::Foreign {
                        call: format!("GET {at}"),
                        expected: "a page with items, or none behind it",
                        got: "an empty page with another behind it".into(),
                    });
                }
            }
        }
    }
}
