//! Parses query parameters, and selects the items of a page.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};

use axum::extract::Query;
use axum::http::Uri;
use serde_json::{Value, json};

use crate::error::Error;
use crate::prepare::Endpoint;

/// The part of a list that a client requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// The maximum number of items.
    limit: usize,
    /// Whether the items are ordered from the last to the first.
    is_descending: bool,
    /// The ID of the item that precedes the page.
    after: Option<String>,
}

/// Number of items in a page (`limit`).
///
/// If exceeded: 400, `invalid_value`.
const LIMIT_MAX: usize = 100;
const LIMIT_DEFAULT: usize = 20;

impl Page {
    /// Parses the parameters of a page.
    ///
    /// # Errors
    /// A parameter is invalid.
    pub(crate) fn of(uri: &Uri) -> Result<Self, Error> {
        let mut page = Self { limit: LIMIT_DEFAULT, is_descending: true, after: None };
        for (name, value) in pairs(uri)? {
            match name.as_str() {
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    let wrong = || {
                        Error::invalid(
                            "limit",
                            format!("must be an integer from 1 to {LIMIT_MAX}, not {value:?}"),
                        )
                    };
                    page.limit = limit.ok_or_else(wrong)?;
                }
                "order" => {
                    page.is_descending = match value.as_str() {
                        "asc" => false,
                        "desc" => true,
                        other => {
                            let problem = format!("must be \"asc\" or \"desc\", not {other:?}");
                            return Err(Error::invalid("order", problem));
                        }
                    };
                }
                "after" => page.after = Some(value),
                _ => {}
            }
        }
        Ok(page)
    }

    pub(crate) fn is_descending(&self) -> bool {
        self.is_descending
    }
}

/// Size, as JSON, of a page that has more than one item.
///
/// If exceeded: the page has fewer items than `limit`, and `has_more` is true.
const PAGE_BYTES_MAX: u64 = 1 << 20;

/// Selects the items of a page. The items of the list must be added to the selection in the order of the page, starting
/// with the first, until [`PagePosition::After`] is returned.
///
/// The IDs of new items are unique, but earlier versions stored items with duplicate IDs. A page begins after the first
/// item whose ID is `after`. If an item that repeats an ID ended a page, the next page would begin before the end of
/// that page, and a client would request pages forever. Therefore, items that repeat an ID are omitted.
pub(crate) struct Selection<'a> {
    page: &'a Page,
    /// The hashes of the IDs of all items added so far. The IDs themselves would take too much memory for a long chain
    /// of responses.
    ids: HashSet<u64>,
    hasher: RandomState,
    has_begun: bool,
    items: usize,
    bytes: u64,
    has_more: bool,
}

/// The position of an item of a [`Selection`] with respect to the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PagePosition {
    /// The item precedes the page, or repeats the ID of an item before it.
    Skipped,
    /// The item is on the page.
    OnPage,
    /// The item and all following ones come after the page.
    After,
}

impl<'a> Selection<'a> {
    pub(crate) fn new(page: &'a Page) -> Self {
        Self {
            page,
            ids: HashSet::new(),
            hasher: RandomState::new(),
            has_begun: page.after.is_none(),
            items: 0,
            bytes: 0,
            has_more: false,
        }
    }

    /// Adds an item of `bytes` bytes to the page if it belongs there. Returns its position.
    pub(crate) fn add(&mut self, id: &str, bytes: u64) -> PagePosition {
        if !self.ids.insert(self.hasher.hash_one(id)) {
            return PagePosition::Skipped;
        }
        if !self.has_begun {
            self.has_begun = self.page.after.as_deref() == Some(id);
            return PagePosition::Skipped;
        }
        let is_full = self.items == self.page.limit
            || (self.items > 0 && self.bytes.saturating_add(bytes) > PAGE_BYTES_MAX);
        if is_full {
            self.has_more = true;
            return PagePosition::After;
        }
        self.items += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        PagePosition::OnPage
    }

    /// Whether more items come after the page.
    ///
    /// # Errors
    /// The list has no item with the ID `after`.
    pub(crate) fn finish(self) -> Result<bool, Error> {
        match &self.page.after {
            Some(after) if !self.has_begun => {
                Err(Error::invalid("after", format!("the list has no item {after:?}")))
            }
            _ => Ok(self.has_more),
        }
    }
}

/// Returns the sequence number of the first requested event of a response, or `None` if no events are requested.
///
/// # Errors
/// A parameter is invalid.
pub(super) fn events_from(uri: &Uri) -> Result<Option<usize>, Error> {
    let (mut stream, mut from) = (false, 0);
    for (name, value) in pairs(uri)? {
        match name.as_str() {
            "stream" => {
                stream = value.parse().map_err(|_| {
                    Error::coded("invalid_type", "stream", format!("must be true or false, not {value:?}"))
                })?;
            }
            "starting_after" => {
                let wrong = |_| {
                    Error::coded(
                        "invalid_type",
                        "starting_after",
                        format!("must be a sequence number from 0 to {}, not {value:?}", u32::MAX),
                    )
                };
                from = value.parse::<u32>().map_err(wrong)? as usize + 1;
            }
            _ => {}
        }
    }
    Ok(stream.then_some(from))
}

/// Checks the values of `include`. The values have no effect: the request that created a response determines its
/// content.
///
/// # Errors
/// A value is unknown.
pub(super) fn check_include(uri: &Uri) -> Result<(), Error> {
    let pairs = pairs(uri)?.into_iter().filter(|(name, _)| matches!(name.as_str(), "include" | "include[]"));
    let values: Value = pairs.map(|(_, value)| json!(value)).collect();
    let parameter = Endpoint::Responses.parameters().find(|parameter| parameter.name == "include");
    parameter.map_or(Ok(()), |parameter| parameter.kind.check("include", &values))
}

fn pairs(uri: &Uri) -> Result<Vec<(String, String)>, Error> {
    let pairs = Query::<Vec<(String, String)>>::try_from_uri(uri);
    pairs.map(|Query(pairs)| pairs).map_err(|error| Error::invalid("query", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(query: &str) -> Result<Page, Error> {
        Page::of(&format!("/v1/x?{query}").parse().unwrap())
    }

    /// Returns the IDs of the items that are on a page, and whether more items follow. Each item has an ID and a size
    /// in bytes.
    fn select(page: &Page, items: &[(String, u64)]) -> Result<(Vec<String>, bool), Error> {
        let (mut selection, mut selected) = (Selection::new(page), Vec::new());
        let mut items: Vec<_> = items.iter().collect();
        if page.is_descending() {
            items.reverse();
        }
        for (id, bytes) in items {
            match selection.add(id, *bytes) {
                PagePosition::Skipped => {}
                PagePosition::OnPage => selected.push(id.clone()),
                PagePosition::After => break,
            }
        }
        Ok((selected, selection.finish()?))
    }

    #[test]
    fn pages_follow_each_other_without_gaps_in_either_order() {
        for bytes in [1, PAGE_BYTES_MAX / 7, PAGE_BYTES_MAX, 3 * PAGE_BYTES_MAX] {
            let all: Vec<(String, u64)> = (0..45).map(|number| (number.to_string(), bytes)).collect();
            for order in ["asc", "desc"] {
                let (mut seen, mut after) = (Vec::new(), String::new());
                loop {
                    let page = page(&format!("limit=20&order={order}{after}")).unwrap();
                    let (part, has_more) = select(&page, &all).unwrap();
                    assert!(part.len() == 1 || part.len() as u64 * bytes <= PAGE_BYTES_MAX);
                    after = format!("&after={}", part.last().unwrap());
                    seen.extend(part);
                    if !has_more {
                        break;
                    }
                }
                if order == "desc" {
                    seen.reverse();
                }
                assert_eq!(seen, all.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn pages_of_a_list_that_repeats_ids_have_each_id_once_and_end() {
        let all: Vec<(String, u64)> = "abacbabad".chars().map(|id| (id.to_string(), 1)).collect();
        for (order, expected) in [("asc", "abcd"), ("desc", "dabc")] {
            for limit in 1..=5 {
                let (mut seen, mut after, mut has_more) = (String::new(), String::new(), true);
                while has_more {
                    let page = page(&format!("limit={limit}&order={order}{after}")).unwrap();
                    let (part, more) = select(&page, &all).unwrap();
                    after = format!("&after={}", part.last().unwrap());
                    seen.extend(part);
                    assert!(seen.len() <= expected.len(), "{order} {limit}: {seen}");
                    has_more = more;
                }
                assert_eq!(seen, expected, "{order} {limit}");
            }
        }
    }

    #[test]
    fn values_out_of_range_are_rejected_with_their_names() {
        for (query, param) in [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order")] {
            let error = page(query).unwrap_err();
            assert!(matches!(&error, Error::Invalid { param: wrong, .. } if wrong == param), "{error}");
        }
        assert!(select(&page("after=x").unwrap(), &[("a".to_owned(), 1)]).is_err());
        assert_eq!(select(&page("after=a").unwrap(), &[("a".to_owned(), 1)]), Ok((Vec::new(), false)));
        assert!(page("include[]=a&include[]=b&else=1").is_ok());
    }

    #[test]
    fn the_values_of_include_are_accepted_for_stored_responses() {
        let check = |query: &str| check_include(&format!("/v1/x?{query}").parse().unwrap());
        assert_eq!(
            check("include[]=message.output_text.logprobs&include=reasoning.encrypted_content"),
            Ok(())
        );
        assert_eq!(check("order=asc"), Ok(()));
        let error = check("include[]=message.output_text.logprobs&include[]=everything").unwrap_err();
        assert!(error.to_string().starts_with("include[1]: \"everything\" is not "), "{error}");
    }

    #[test]
    fn events_are_requested_with_stream_and_a_starting_number() {
        let from = |query: &str| events_from(&format!("/v1/x?{query}").parse().unwrap());
        assert_eq!(from("").unwrap(), None);
        assert_eq!(from("starting_after=3").unwrap(), None);
        assert_eq!(from("stream=true").unwrap(), Some(0));
        assert_eq!(from("stream=true&starting_after=0").unwrap(), Some(1));
        assert!(from("stream=yes").is_err() && from("stream=true&starting_after=-1").is_err());
    }
}
