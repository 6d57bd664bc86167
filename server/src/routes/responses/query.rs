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

/// Most items of a page.
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

    /// This part of `all`, which is in order, and whether more comes after it.
    ///
    /// # Errors
    /// There is nothing to begin after.
    pub(in crate::routes) fn take<T>(
        &self,
        mut all: Vec<T>,
        name: impl Fn(&T) -> &str,
    ) -> Result<(Vec<T>, bool), Error> {
        if self.is_descending {
            all.reverse();
        }
        let first = match &self.after {
            None => 0,
            Some(after) => match all.iter().position(|item| name(item) == after) {
                Some(at) => at + 1,
                None => return Err(Error::invalid("after", format!("there is no item {after:?}"))),
            },
        };
        let has_more = all.len() > first + self.limit;
        Ok((all.into_iter().skip(first).take(self.limit).collect(), has_more))
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

    #[test]
    fn pages_follow_each_other_without_gaps_in_either_order() {
        let all: Vec<String> = (0..45).map(|number| number.to_string()).collect();
        for order in ["asc", "desc"] {
            let (mut seen, mut after) = (Vec::new(), String::new());
            loop {
                let page = page(&format!("limit=20&order={order}{after}")).unwrap();
                let (part, has_more) = page.take(all.clone(), |item| item).unwrap();
                after = format!("&after={}", part.last().unwrap());
                seen.extend(part);
                if !has_more {
                    break;
                }
            }
            if order == "desc" {
                seen.reverse();
            }
            assert_eq!(seen, all);
        }
    }

    #[test]
    fn what_is_out_of_range_is_refused_by_name() {
        for (query, param) in [("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order")] {
            let error = page(query).unwrap_err();
            assert!(matches!(&error, Error::Invalid { param: wrong, .. } if wrong == param), "{error}");
        }
        assert!(page("after=x").unwrap().take(vec!["a".to_owned()], |item| item).is_err());
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
