//! Adds bodies to `hyper`'s own error responses, which `hyper` sends without a body if it cannot parse a request.

use server_openai::{ErrorBody, ErrorObject};

/// An upper bound for the size of `hyper`'s error responses. Unlike the server's own answers with the same statuses,
/// they have no body.
const HEAD_BYTES_MAX: usize = 512;

/// An error response that `hyper` generates.
struct ProtocolError {
    /// The first line of the head, without the line terminator.
    status_line: &'static str,
    code: &'static str,
    message: &'static str,
}

const ERRORS: [ProtocolError; 3] = [
    ProtocolError {
        status_line: "HTTP/1.1 400 Bad Request",
        code: "malformed_http",
        message: "the request is not valid HTTP/1.1",
    },
    ProtocolError {
        status_line: "HTTP/1.1 414 URI Too Long",
        code: "uri_too_long",
        message: "the request target is longer than 65534 bytes",
    },
    ProtocolError {
        status_line: "HTTP/1.1 431 Request Header Fields Too Large",
        code: "headers_too_large",
        message: "the request head has more than 100 header fields, is larger than 131072 bytes, or contains a \
                  field name longer than 65535 bytes",
    },
];

/// Returns the answer that replaces `written`, if `written` is an error response of `hyper`.
pub(super) fn replacement(written: &[u8]) -> Option<Vec<u8>> {
    if written.len() > HEAD_BYTES_MAX || !written.ends_with(b"\r\n\r\n") {
        return None;
    }
    let head = std::str::from_utf8(written).ok()?;
    let (status_line, fields) = head.split_once("\r\n")?;
    let is_empty = fields.split("\r\n").any(|field| field.eq_ignore_ascii_case("content-length: 0"));
    let error = ERRORS.iter().find(|error| error.status_line == status_line && is_empty)?;
    let ProtocolError { status_line, code, message } = *error;
    let error = ErrorObject {
        message: message.to_owned(),
        r#type: "invalid_request_error",
        param: None,
        code: Some(code),
    };
    let body = serde_json::to_string(&ErrorBody { error }).ok()?;
    let length = body.len();
    Some(
        format!(
            "{status_line}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        )
        .into_bytes(),
    )
}

#[cfg(test)]
mod tests {
    use super::super::CONNECTION_BUFFER_BYTES_MAX;
    use super::*;

    #[test]
    fn the_error_for_a_large_head_names_the_size_of_the_buffer_that_must_hold_it() {
        let error = ERRORS.iter().find(|error| error.code == "headers_too_large").unwrap();
        assert!(
            error.message.contains(&format!(" {CONNECTION_BUFFER_BYTES_MAX} bytes")),
            "{}",
            error.message
        );
    }

    #[test]
    fn only_errors_without_a_body_are_replaced() {
        let head = |status: &str, length: &str| {
            format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\ndate: x\r\n\r\n")
        };
        for status in ["400 Bad Request", "414 URI Too Long", "431 Request Header Fields Too Large"] {
            let replaced = replacement(head(status, "0").as_bytes()).unwrap();
            let text = String::from_utf8(replaced).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{head}");
            assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{head}");
            assert!(body.contains("\"invalid_request_error\""), "{body}");
        }
        for kept in [
            head("400 Bad Request", "10"),
            head("200 OK", "0"),
            head("400 Bad Request", "0") + "{",
            "x".to_owned() + &head("400 Bad Request", "0"),
            "HTTP/1.1 100 Continue\r\n\r\n".to_owned(),
        ] {
            assert_eq!(replacement(kept.as_bytes()), None, "{kept}");
        }
    }
}
