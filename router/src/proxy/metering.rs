//! Obtains the usage of streams for token quotas. A stream reports its usage only on request. If the client did not
//! request the usage, the router requests it, and removes it from the events before the client receives them.

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value};

use super::fields::{Fields, members};
use super::request_body::RequestBody;
use super::usage::may_have_usage;

/// Size in bytes of a `stream_options` object to which the router adds `include_usage`. The parsed options take many
/// times as much memory.
///
/// If exceeded: the router leaves the object unchanged, and estimates the usage of the stream unless the object already
/// requests it.
const STREAM_OPTIONS_MAX: usize = 4096;

/// The body of a request for a stream, changed to request the usage. `None` if the client's body already requests the
/// usage, or if its `stream_options` are too long or invalid. The replica rejects invalid options with a better error
/// message than the router could.
pub(super) fn request_usage(body: &Bytes, fields: &Fields<'_>) -> Option<RequestBody> {
    const OPTIONS: &[u8] = b"{\"include_usage\":true}";
    let Some(given) = fields.stream_options else {
        // The body has at least the member `stream`, so a comma must precede the new member.
        let end = memchr::memrchr(b'}', body)?;
        let member = Bytes::from_static(b",\"stream_options\":{\"include_usage\":true}");
        return Some(RequestBody::replaced(body, end..end, member));
    };
    let start = given.as_ptr().addr() - body.as_ptr().addr();
    let range = start..start + given.len();
    if given == b"null" {
        return Some(RequestBody::replaced(body, range, Bytes::from_static(OPTIONS)));
    }
    if given.len() > STREAM_OPTIONS_MAX {
        return None;
    }
    let mut options: Map<String, Value> = serde_json::from_slice(given).ok()?;
    match options.insert("include_usage".to_owned(), true.into()) {
        None | Some(Value::Null | Value::Bool(false)) => {}
        Some(_) => return None,
    }
    // Without `include_usage`, this option has no effect. With both options, every event would contain the usage, which
    // the client did not request.
    if options.get("continuous_usage_stats").is_some_and(Value::is_boolean) {
        options.remove("continuous_usage_stats");
    }
    Some(RequestBody::replaced(body, range, serde_json::to_vec(&options).ok()?.into()))
}

/// Removes the usage, which the client did not request, from whole events.
pub(super) fn without_usage(events: Bytes) -> Bytes {
    if !may_have_usage(&events) {
        return events;
    }
    let mut rest = BytesMut::with_capacity(events.len());
    for event in events_of(&events) {
        match data(event).map(|json| (json, usage_of(json))) {
            Some((_, UsageMember::OnlyMember)) => {}
            Some((json, UsageMember::Member(start, end))) => {
                let offset = json.as_ptr().addr() - event.as_ptr().addr();
                rest.extend_from_slice(&event[..offset + start]);
                rest.extend_from_slice(&event[offset + end..]);
            }
            Some((_, UsageMember::Absent)) | None => rest.extend_from_slice(event),
        }
    }
    rest.freeze()
}

/// The position of the usage in the data of an event.
#[derive(Debug, PartialEq, Eq)]
enum UsageMember {
    /// The data has no usage.
    Absent,
    /// The byte range of the member, including the comma that separates it.
    Member(usize, usize),
    /// The data has a usage object and an empty list of choices, so the event was sent only to report the usage.
    OnlyMember,
}

fn usage_of(json: &[u8]) -> UsageMember {
    let mut usage = None;
    let mut has_choices = true;
    let read = members(json, |name, value| match name {
        b"usage" => usage = Some((name, value)),
        b"choices" => has_choices = value.iter().any(|byte| !b"[] \t\r\n".contains(byte)),
        _ => {}
    });
    let (Ok(()), Some((name, value))) = (read, usage) else { return UsageMember::Absent };
    if !has_choices && value.starts_with(b"{") {
        return UsageMember::OnlyMember;
    }
    let position = |part: &[u8]| part.as_ptr().addr() - json.as_ptr().addr();
    // `name` begins after its quotation mark.
    let (mut start, mut end) = (position(name) - 1, position(value) + value.len());
    let blanks_before = json[..start].iter().rev().take_while(|byte| byte.is_ascii_whitespace()).count();
    let blanks_after = json[end..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    if json[..start - blanks_before].ends_with(b",") {
        start -= blanks_before + 1;
    } else if json[end + blanks_after..].starts_with(b",") {
        end += blanks_after + 1;
    }
    UsageMember::Member(start, end)
}

/// The events in `bytes`, each with the blank line that ends it. The last event may lack the blank line.
fn events_of(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let (event, after) =
            rest.split_at_checked(event_bytes(rest)).filter(|(event, _)| !event.is_empty())?;
        rest = after;
        Some(event)
    })
}

/// The length of the first event, including its blank line.
fn event_bytes(bytes: &[u8]) -> usize {
    for line_end in memchr::memchr_iter(b'\n', bytes) {
        let next = line_end + 1;
        if bytes[next..].starts_with(b"\n") {
            return next + 1;
        }
        if bytes[next..].starts_with(b"\r\n") {
            return next + 2;
        }
    }
    bytes.len()
}

/// The data of an event, if it is a single line.
fn data(event: &[u8]) -> Option<&[u8]> {
    let mut lines = event.split(|&byte| byte == b'\n').filter_map(|line| line.strip_prefix(b"data:"));
    let data = lines.next()?.trim_ascii();
    lines.next().is_none().then_some(data)
}

#[cfg(test)]
mod tests {
    use super::super::fields;
    use super::*;
    use crate::endpoint::Endpoint;

    fn requested(body: &str) -> Option<String> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let changed = request_usage(&body, &fields::read(&body, Endpoint::Chat).unwrap())?;
        Some(String::from_utf8(changed.concat()).unwrap())
    }

    #[test]
    fn the_usage_is_requested_if_the_client_did_not_and_nothing_else_is_changed() {
        let same =
            |body: &str, expected: &str| assert_eq!(requested(body).as_deref(), Some(expected), "{body}");
        same(r#"{"stream":true} "#, r#"{"stream":true,"stream_options":{"include_usage":true}} "#);
        same(
            r#"{"stream_options":null,"a":1.0e5}"#,
            r#"{"stream_options":{"include_usage":true},"a":1.0e5}"#,
        );
        same(
            r#"{ "stream_options" : {"x":1,"include_usage":false,"continuous_usage_stats":true} ,"b":"\u00e9"}"#,
            r#"{ "stream_options" : {"x":1,"include_usage":true} ,"b":"\u00e9"}"#,
        );
        for kept in [r#"{"include_usage":true}"#, r#"{"include_usage":"yes"}"#, "7", "[]", "\"x\""] {
            assert_eq!(requested(&format!("{{\"stream_options\":{kept}}}")), None, "{kept}");
        }
        let blanks = " ".repeat(STREAM_OPTIONS_MAX);
        assert_eq!(requested(&format!("{{\"stream_options\":{{{blanks}}}}}")), None);
    }

    #[test]
    fn bytes_are_split_into_events_without_loss() {
        let events = ["data: 1\n\n", "event: x\r\ndata: 2\r\n\r\n", ": c\n\n", "\n\n", "data: 3"];
        let joined = events.concat();
        let split: Vec<&str> =
            events_of(joined.as_bytes()).map(|event| std::str::from_utf8(event).unwrap()).collect();
        assert_eq!(split, events);
        assert_eq!(events_of(b"").count(), 0);
    }

    #[test]
    fn the_usage_is_removed_from_events_and_nothing_else_is() {
        let cases = [
            // OpenAI and ovfleet's server send `null` as the usage in each event, and then a separate event with the
            // usage.
            ("data: {\"choices\":[{}],\"usage\":null}\n\n", "data: {\"choices\":[{}]}\n\n"),
            ("data: {\"usage\":null , \"choices\":[{}]}\n\n", "data: { \"choices\":[{}]}\n\n"),
            ("data: {\"usage\":{\"prompt_tokens\":1},\"choices\":[{}]}\n\n", "data: {\"choices\":[{}]}\n\n"),
            ("data: {\"usage\":null}\r\n\r\n", "data: {}\r\n\r\n"),
            (
                "data: {\"choices\":[ ],\"usage\":{\"prompt_tokens\":1}}\n\ndata: [DONE]\n\n",
                "data: [DONE]\n\n",
            ),
            (
                "data: {\"choices\":[{}]}\n\ndata: {\"choices\":[],\"usage\":{}}\n\n: c\n\n",
                "data: {\"choices\":[{}]}\n\n: c\n\n",
            ),
        ];
        for (given, expected) in cases {
            let kept = without_usage(Bytes::from_static(given.as_bytes()));
            assert_eq!(std::str::from_utf8(&kept).unwrap(), expected);
        }
        for kept in [
            "data: {\"choices\":[{\"delta\":{\"usage\":1}}]}\n\n",
            "data: {\"text\":\"\\\"usage\\\":null\"}\n\n",
            "data: \"usage\"\n\n",
            "data: {\"usage\":\n\n",
            "data: {\ndata: \"usage\":null}\n\n",
            "event: \"usage\"\n\n",
        ] {
            let given = Bytes::from_static(kept.as_bytes());
            assert_eq!(without_usage(given.clone()), given);
        }
    }
}
