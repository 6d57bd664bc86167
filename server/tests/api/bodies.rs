//! Bodies that were changed at random, as text: whatever they are, they are answered or refused as OpenAI refuses, and
//! the server goes on. `server/fuzz` feeds `check` for hours.

use crate::harness::{Server, Setup};

/// Where bodies go; the first byte of an input says which.
const PATHS: [&str; 4] = ["/v3/chat/completions", "/v3/completions", "/v3/responses", "/v3/tokenize"];

/// A server that answers at once.
pub(crate) fn server() -> Server {
    Setup::new(crate::harness::faulty(Vec::new())).start()
}

/// Panics if a promise is broken.
pub(crate) async fn check(server: &Server, input: &[u8]) {
    let Some((which, body)) = input.split_first() else { return };
    let path = PATHS[usize::from(*which) % PATHS.len()];
    let answer = server.post(path, body.to_vec()).await;
    let shown = || format!("{} to {path} {}: {}", answer.status, String::from_utf8_lossy(body), answer.body);
    match answer.status.as_u16() {
        200 => {}
        // Responses in the background are as many as may be.
        400 | 404 | 413 | 429 => {
            let error = &answer.json()["error"];
            assert!(error["message"].is_string() && error["type"].is_string(), "{}", shown());
        }
        _ => panic!("{}", shown()),
    }
}
