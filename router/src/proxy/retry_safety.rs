//! Determines whether a request is safe to retry after a replica may have received it. See
//! `docs/decisions/0069-retries.md`.

use http::Method;

use super::fields::Fields;

/// Whether a request is safe to retry after a replica may have received it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetrySafety {
    /// The method is idempotent (RFC 9110, 9.2.2): sending the request twice has the same effect as sending it once.
    Idempotent,
    /// The request computes an answer and stores nothing: sending it twice costs only the computation.
    Computation,
    /// The request may store something, or its effect is unknown.
    Unsafe,
}

impl RetrySafety {
    /// Classifies a request by its method, its path and its body.
    pub(super) fn of(method: &Method, path: &str, fields: &Fields<'_>) -> Self {
        if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE) {
            return Self::Idempotent;
        }
        if *method != Method::POST {
            return Self::Unsafe;
        }
        let path = path.trim_start_matches('/');
        let operation = path.strip_prefix("v3/").or_else(|| path.strip_prefix("v1/")).unwrap_or(path);
        match operation {
            "chat/completions"
            | "completions"
            | "tokenize"
            | "detokenize"
            | "embeddings"
            | "rerank"
            | "score"
            | "classify"
            | "pooling"
            | "moderations"
            | "audio/transcriptions"
            | "audio/translations"
            | "audio/speech"
            | "images/generations"
            | "responses/input_tokens" => Self::Computation,
            // Responses are stored unless the client sets `store` to false.
            "responses" if fields.store == Some(false) => Self::Computation,
            _ => Self::Unsafe,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::Endpoint;
    use crate::proxy::fields;

    #[test]
    fn reads_and_computations_are_safe_to_retry_and_stored_writes_are_not() {
        let of = |method: Method, path: &str, body: &str| {
            let fields = fields::read(body.as_bytes(), Endpoint::from_path(path).unwrap()).unwrap();
            RetrySafety::of(&method, path, &fields)
        };
        let post = |path: &str, body: &str| of(Method::POST, path, body);
        for path in ["/v3/chat/completions", "/v1/completions", "/tokenize", "/v3/embeddings"] {
            assert_eq!(post(path, "{}"), RetrySafety::Computation, "{path}");
        }
        for path in
            ["/v3/conversations", "/v3/conversations/conv_1/items", "/v1/responses/resp_1/cancel", "/v3/x"]
        {
            assert_eq!(post(path, r#"{"store":false}"#), RetrySafety::Unsafe, "{path}");
        }
        for body in ["{}", r#"{"store":true}"#, r#"{"store":null}"#, r#"{"store":0}"#] {
            assert_eq!(post("/v3/responses", body), RetrySafety::Unsafe, "{body}");
        }
        assert_eq!(post("/v3/responses", r#"{"store":false}"#), RetrySafety::Computation);
        assert_eq!(of(Method::GET, "/v3/responses/resp_1", "{}"), RetrySafety::Idempotent);
        assert_eq!(of(Method::DELETE, "/v3/responses/resp_1", "{}"), RetrySafety::Idempotent);
        assert_eq!(of(Method::PATCH, "/v3/x", "{}"), RetrySafety::Unsafe);
    }
}
