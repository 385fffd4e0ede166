//! Pages of a list. A list has a stable order, by a key that no item changes. A cursor holds the
//! key of the last item of a page, so that the next page begins behind it: also if that item is
//! gone meanwhile, and whatever was added.

use crate::base::error::{ApiError, Outcome};
use crate::model::filter::{bounded, has_one_of};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use dayfly_api::types::{List, MAX_PAGE_ITEMS};
use dayfly_units::Name;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// JSON of the items of a page, in bytes, from which on the page ends.
const PAGE_BYTES: usize = 4 << 20;
/// The longest cursor, in bytes.
const LONGEST: usize = 1024;

/// Which page of a list a client wants: at most `limit` items with a key greater than `after`.
#[derive(Debug)]
pub struct Paging<K> {
    list: &'static str,
    limit: Option<usize>,
    after: Option<K>,
}

impl<K: Ord + Serialize + DeserializeOwned> Paging<K> {
    /// The page of `list` that the parameters `limit` and `cursor` name.
    ///
    /// # Errors
    /// The limit is out of range, or the cursor is not one of this list.
    pub fn of(list: &'static str, limit: Option<usize>, cursor: Option<&str>) -> Outcome<Self> {
        if let Some(limit) = limit.filter(|limit| !(1..=MAX_PAGE_ITEMS).contains(limit)) {
            return Err(ApiError::invalid(format_args!(
                "limit: expected 1 to {MAX_PAGE_ITEMS}, got {limit}"
            )));
        }
        let after = cursor.map(|cursor| key(list, cursor)).transpose()?;
        Ok(Self { list, limit, after })
    }

    /// The page. `items` have the order of their keys.
    ///
    /// # Errors
    /// An item cannot be serialised.
    pub fn page<T: Serialize>(
        &self,
        items: impl IntoIterator<Item = T>,
        key: impl Fn(&T) -> K,
    ) -> Outcome<List<T>> {
        let after = |item: &T| self.after.as_ref().is_none_or(|after| key(item) > *after);
        let mut items = items.into_iter().filter(after).peekable();
        let Some(limit) = self.limit else {
            return Ok(List { items: items.collect(), next: None });
        };
        let (mut page, mut bytes) = (Vec::new(), 0);
        while page.len() < limit && bytes < PAGE_BYTES {
            let Some(item) = items.next() else { break };
            bytes += serde_json::to_vec(&item).map_err(ApiError::internal)?.len();
            page.push(item);
        }
        let more = items.peek().is_some();
        let next = page.last().filter(|_| more).map(|last| self.cursor(&key(last))).transpose()?;
        Ok(List { items: page, next })
    }

    fn cursor(&self, key: &K) -> Outcome<String> {
        let json = serde_json::to_vec(&(self.list, key)).map_err(ApiError::internal)?;
        Ok(URL_SAFE_NO_PAD.encode(json))
    }
}

/// Which items of a list by name a client wants.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct NameParams {
    /// A part of the name; of several one must match.
    #[serde(default)]
    name: Vec<String>,
    /// The most items of the answer, 1 to 1000. Without it, the answer has all.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// The `next` of the page before.
    cursor: Option<String>,
}

/// A page of a list by name.
#[derive(Debug)]
pub struct ByName {
    paging: Paging<Name>,
    names: Vec<String>,
}

impl NameParams {
    /// The page of `list` that a client wants.
    ///
    /// # Errors
    /// As [`Paging::of`], or too many or too long names.
    pub fn checked(self, list: &'static str) -> Outcome<ByName> {
        let paging = Paging::of(list, self.limit, self.cursor.as_deref())?;
        Ok(ByName { paging, names: bounded("name", self.name)? })
    }
}

impl ByName {
    /// The page, of items in any order.
    ///
    /// # Errors
    /// An item cannot be serialised.
    pub fn page<T: Serialize>(
        &self,
        mut items: Vec<T>,
        name: impl Fn(&T) -> &Name,
    ) -> Outcome<List<T>> {
        items.retain(|item| has_one_of(name(item).as_str(), &self.names));
        items.sort_by(|a, b| name(a).cmp(name(b)));
        self.paging.page(items, |item| name(item).clone())
    }
}

fn key<K: DeserializeOwned>(list: &str, cursor: &str) -> Outcome<K> {
    let decoded = (cursor.len() <= LONGEST).then(|| URL_SAFE_NO_PAD.decode(cursor).ok()).flatten();
    let decoded = decoded.and_then(|json| serde_json::from_slice::<(String, K)>(&json).ok());
    decoded.filter(|(of, _)| of == list).map(|(_, key)| key).ok_or_else(|| {
        ApiError::invalid(format_args!(
            "cursor: expected the `next` of a page of the list of {list}; begin without a cursor"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn paging(limit: usize, cursor: Option<&str>) -> Paging<u32> {
        Paging::of("numbers", Some(limit), cursor).unwrap()
    }

    proptest! {
        #[test]
        fn pages_have_what_stays_once_and_nothing_twice(
            before in proptest::collection::btree_set(0u32..200, 0..60),
            changes in proptest::collection::vec((0u32..200, any::<bool>()), 0..60),
            limit in 1usize..9,
        ) {
            let mut there = before.clone();
            let mut touched = BTreeSet::new();
            let (mut seen, mut cursor): (Vec<u32>, Option<String>) = (Vec::new(), None);
            let mut changes = changes.into_iter();
            loop {
                let page = paging(limit, cursor.as_deref()).page(there.iter().copied(), |n| *n);
                let page = page.unwrap();
                prop_assert!(page.items.len() <= limit);
                seen.extend(&page.items);
                for (number, add) in changes.by_ref().take(3) {
                    touched.insert(number);
                    if add { there.insert(number); } else { there.remove(&number); }
                }
                match page.next {
                    Some(next) => cursor = Some(next),
                    None => break,
                }
            }
            prop_assert!(seen.is_sorted_by(|a, b| a < b), "{:?}", seen);
            for number in before.difference(&touched) {
                prop_assert!(seen.contains(number), "{} of {:?}", number, seen);
            }
        }
    }

    #[test]
    fn a_page_ends_before_its_json_is_too_long() {
        let items = || (0..9).map(|n: u32| (n, "x".repeat(PAGE_BYTES / 3)));
        let first = paging(1000, None).page(items(), |(n, _)| *n).unwrap();
        assert_eq!(first.items.len(), 3);
        let second = paging(1000, first.next.as_deref()).page(items(), |(n, _)| *n).unwrap();
        assert_eq!(second.items.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [3, 4, 5]);
        let all = Paging::of("numbers", None, None).unwrap().page(items(), |(n, _)| *n).unwrap();
        assert_eq!((all.items.len(), all.next), (9, None), "without a limit, the whole list");
    }

    #[test]
    fn a_cursor_of_another_list_or_of_no_list_is_refused() {
        let next = paging(1, None).page([1, 2], |n| *n).unwrap().next.unwrap();
        assert!(Paging::<u32>::of("numbers", None, Some(&next)).is_ok());
        for (list, cursor) in
            [("others", next.as_str()), ("numbers", "x"), ("numbers", "W10"), ("numbers", "%")]
        {
            let error = Paging::<u32>::of(list, None, Some(cursor)).unwrap_err();
            assert!(error.0.message.starts_with("cursor: expected the `next`"), "{error}");
        }
        assert!(Paging::<u32>::of("numbers", None, Some(&"A".repeat(1 << 20))).is_err());
        for limit in [0, MAX_PAGE_ITEMS + 1] {
            let error = Paging::<u32>::of("numbers", Some(limit), None).unwrap_err();
            assert!(error.0.message.contains("1 to 1000"), "{error}");
        }
    }
}
