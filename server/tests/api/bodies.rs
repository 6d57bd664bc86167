//! Checks that a request with an arbitrary body is answered, or rejected in OpenAI's format. `mutated.rs` runs this
//! check for seconds, and `make fuzz` runs it for a configurable time.

use crate::harness::{Answer, Server, Setup};

/// The paths to which bodies are sent. The first byte of an input selects one.
const PATHS: [&str; 4] = ["/v3/chat/completions", "/v3/completions", "/v3/responses", "/v3/tokenize"];

/// A server that answers immediately and reads images.
pub(crate) fn server() -> Server {
    Setup::reading_images().start()
}

/// Sends a body to the path that `which`, the first byte of the input, selects.
pub(crate) async fn post(server: &Server, which: u8, body: &[u8]) -> Answer {
    server.post(path(which), body.to_vec()).await
}

fn path(which: u8) -> &'static str {
    PATHS[usize::from(which) % PATHS.len()]
}

/// Sends the body in `input`, and panics if the answer is neither a success nor an error in OpenAI's format.
pub(crate) async fn check(server: &Server, input: &[u8]) {
    let Some((which, body)) = input.split_first() else { return };
    let path = path(*which);
    let answer = post(server, *which, body).await;
    let shown = || format!("{} to {path} {}: {}", answer.status, String::from_utf8_lossy(body), answer.body);
    match answer.status.as_u16() {
        200 => {}
        // The status is 429 if background responses to earlier bodies have reached the limit of concurrent requests.
        400 | 404 | 413 | 429 => {
            let error = &answer.json()["error"];
            assert!(error["message"].is_string() && error["type"].is_string(), "{}", shown());
        }
        _ => panic!("{}", shown()),
    }
}
