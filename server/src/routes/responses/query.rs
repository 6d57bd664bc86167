//! The parameters in a path's query, checked.

use axum::extract::Query;
use axum::http::Uri;
use serde_json::{Value, json};

use crate::error::Error;
use crate::prepare::Endpoint;

/// Which part of a list is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::routes) struct Page {
    /// Most items.
    limit: usize,
    /// From the last to the first.
    is_descending: bool,
    /// The item after which it begins.
    after: Option<String>,
}

/// Number of items in a page (`limit`).
///
/// Beyond it: 400, `invalid_value`.
const LIMIT_MAX: usize = 100;
/// Without a limit.
const LIMIT_DEFAULT: usize = 20;

impl Page {
    /// # Errors
    /// A parameter is out of range.
    pub(in crate::routes) fn of(uri: &Uri) -> Result<Self, Error> {
        let mut page = Self { limit: LIMIT_DEFAULT, is_descending: true, after: None };
        for (name, value) in pairs(uri)? {
            match name.as_str() {
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    let wrong = || Error::invalid("limit", format!("{value:?} is not from 1 to {LIMIT_MAX}"));
                    page.limit = limit.ok_or_else(wrong)?;
                }
                "order" => {
                    page.is_descending = match value.as_str() {
                        "asc" => false,
                        "desc" => true,
                        other => {
                            let problem = format!("{other:?} is neither \"asc\" nor \"desc\"");
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

    pub(in crate::routes) fn is_descending(&self) -> bool {
        self.is_descending
    }
}

/// Size of a page of items as JSON, unless it has a single item.
///
/// Beyond it: the page is shorter, with `has_more`.
const PAGE_BYTES_MAX: u64 = 1 << 20;

/// Chooses the items of a page from all of them, which are offered in the page's order.
pub(in crate::routes) struct Selection<'a> {
    page: &'a Page,
    has_begun: bool,
    items: usize,
    bytes: u64,
    has_more: bool,
}

/// What becomes of an item that is offered to a [`Selection`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::routes) enum Offer {
    /// It is before the page.
    Skip,
    /// It is on the page.
    Take,
    /// It is after the page, as all that follow.
    End,
}

impl<'a> Selection<'a> {
    pub(in crate::routes) fn new(page: &'a Page) -> Self {
        Self { page, has_begun: page.after.is_none(), items: 0, bytes: 0, has_more: false }
    }

    /// Offers an item of so many `bytes`.
    pub(in crate::routes) fn offer(&mut self, id: &str, bytes: u64) -> Offer {
        if !self.has_begun {
            self.has_begun = self.page.after.as_deref() == Some(id);
            return Offer::Skip;
        }
        let is_full = self.items == self.page.limit
            || (self.items > 0 && self.bytes.saturating_add(bytes) > PAGE_BYTES_MAX);
        if is_full {
            self.has_more = true;
            return Offer::End;
        }
        self.items += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        Offer::Take
    }

    /// Whether more items come after the page.
    ///
    /// # Errors
    /// The item after which the page begins was not offered.
    pub(in crate::routes) fn finish(self) -> Result<bool, Error> {
        match &self.page.after {
            Some(after) if !self.has_begun => {
                Err(Error::invalid("after", format!("there is no item {after:?}")))
            }
            _ => Ok(self.has_more),
        }
    }
}

/// From where the events of a response are wanted; `None` if they are not.
///
/// # Errors
/// A parameter has a wrong type.
pub(super) fn events_from(uri: &Uri) -> Result<Option<usize>, Error> {
    let (mut stream, mut from) = (false, 0);
    for (name, value) in pairs(uri)? {
        match name.as_str() {
            "stream" => {
                stream = value.parse().map_err(|_| {
                    Error::coded("invalid_type", "stream", format!("{value:?} is neither true nor false"))
                })?;
            }
            "starting_after" => {
                let wrong = |_| {
                    Error::coded("invalid_type", "starting_after", format!("{value:?} is no sequence number"))
                };
                from = value.parse::<u32>().map_err(wrong)? as usize + 1;
            }
            _ => {}
        }
    }
    Ok(stream.then_some(from))
}

/// Checks what `include` asks for. What a response has beside the usual was asked for when it was made.
///
/// # Errors
/// There is no such thing.
pub(super) fn check_include(uri: &Uri) -> Result<(), Error> {
    let wanted = pairs(uri)?.into_iter().filter(|(name, _)| matches!(name.as_str(), "include" | "include[]"));
    let wanted: Value = wanted.map(|(_, value)| json!(value)).collect();
    let known = Endpoint::Responses.parameters().find(|parameter| parameter.name == "include");
    known.map_or(Ok(()), |parameter| parameter.kind.check("include", &wanted))
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

    /// The items of a page from these, each of so many bytes, and whether more come after it.
    fn select(page: &Page, items: &[(String, u64)]) -> Result<(Vec<String>, bool), Error> {
        let (mut selection, mut selected) = (Selection::new(page), Vec::new());
        let mut items: Vec<_> = items.iter().collect();
        if page.is_descending() {
            items.reverse();
        }
        for (id, bytes) in items {
            match selection.offer(id, *bytes) {
                Offer::Skip => {}
                Offer::Take => selected.push(id.clone()),
                Offer::End => break,
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
    fn what_is_out_of_range_is_refused_by_name() {
        for (query, param) in [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order")] {
            let error = page(query).unwrap_err();
            assert!(matches!(&error, Error::Invalid { param: wrong, .. } if wrong == param), "{error}");
        }
        assert!(select(&page("after=x").unwrap(), &[("a".to_owned(), 1)]).is_err());
        assert_eq!(select(&page("after=a").unwrap(), &[("a".to_owned(), 1)]), Ok((Vec::new(), false)));
        assert!(page("include[]=a&include[]=b&else=1").is_ok());
    }

    #[test]
    fn what_may_be_included_when_a_response_is_made_may_be_asked_for_again() {
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
    fn events_are_wanted_after_a_number_if_at_all() {
        let from = |query: &str| events_from(&format!("/v1/x?{query}").parse().unwrap());
        assert_eq!(from("").unwrap(), None);
        assert_eq!(from("starting_after=3").unwrap(), None);
        assert_eq!(from("stream=true").unwrap(), Some(0));
        assert_eq!(from("stream=true&starting_after=0").unwrap(), Some(1));
        assert!(from("stream=yes").is_err() && from("stream=true&starting_after=-1").is_err());
    }
}
