//! Sends randomly mutated bodies. They must be answered, or rejected in OpenAI's format, and the server must continue
//! to serve. `server/fuzz` runs `check` for hours.

use crate::harness::{Server, Setup};

/// The paths to which bodies are sent. The first byte of an input selects one.
const PATHS: [&str; 4] = ["/v3/chat/completions", "/v3/completions", "/v3/responses", "/v3/tokenize"];

/// A server that answers immediately.
pub(crate) fn server() -> Server {
    Setup::new(crate::harness::faulty(Vec::new())).start()
}

/// Panics if the server violates its contract.
pub(crate) async fn check(server: &Server, input: &[u8]) {
    let Some((which, body)) = input.split_first() else { return };
    let path = PATHS[usize::from(*which) % PATHS.len()];
    let answer = server.post(path, body.to_vec()).await;
    let shown = || format!("{} to {path} {}: {}", answer.status, String::from_utf8_lossy(body), answer.body);
    match answer.status.as_u16() {
        200 => {}
        // The limit of background responses may be reached.
        400 | 404 | 413 | 429 => {
            let error = &answer.json()["error"];
            assert!(error["message"].is_string() && error["type"].is_string(), "{}", shown());
        }
        _ => panic!("{}", shown()),
    }
}
