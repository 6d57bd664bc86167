//! Determines the endpoint of a request: the router handles the endpoints differently and counts them separately.

use std::borrow::Cow;

/// Returns the standard spelling of a path. Replicas with `--ovms-compat` ignore a slash at the end of a path and accept
/// `/v3/v1/…` for `/v3/…` (`server/src/compat.rs`). The router handles these spellings alike, and forwards the path
/// unchanged, so that it remains unknown to replicas without the flag.
pub(crate) fn standard_path(path: &str) -> Cow<'_, str> {
    let short = path.strip_suffix('/').filter(|short| !short.is_empty()).unwrap_or(path);
    match short.strip_prefix("/v3/v1").filter(|rest| rest.starts_with('/')) {
        Some(rest) => Cow::Owned(format!("/v3{rest}")),
        None => Cow::Borrowed(short),
    }
}

/// An endpoint of the API, or a group of endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    Responses,
    Conversations,
    Models,
    Other,
}

impl Endpoint {
    pub(crate) const ALL: [Self; 6] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Conversations, Self::Models, Self::Other];

    /// The endpoint that a standard path belongs to, or `None` if the path is not part of the API.
    pub(crate) fn from_path(path: &str) -> Option<Self> {
        // vLLM serves these two endpoints without a prefix.
        if matches!(path, "/tokenize" | "/detokenize") {
            return Some(Self::Other);
        }
        let rest = path.strip_prefix("/v3/").or_else(|| path.strip_prefix("/v1/"))?;
        Some(match rest {
            "chat/completions" => Self::Chat,
            "completions" => Self::Completions,
            "responses" => Self::Responses,
            "conversations" => Self::Conversations,
            "models" => Self::Models,
            rest if rest.starts_with("responses/") => Self::Responses,
            rest if rest.starts_with("conversations/") => Self::Conversations,
            rest if rest.starts_with("models/") => Self::Models,
            _ => Self::Other,
        })
    }

    /// The label of the endpoint in metrics and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Conversations => "conversations",
            Self::Models => "models",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cases are those of the server.
    #[test]
    fn alternative_spellings_map_to_the_path() {
        for (given, path) in [
            ("/v3/v1/chat/completions", "/v3/chat/completions"),
            ("/v3/v1/models/", "/v3/models"),
            ("/v3/responses/resp_1/input_items/", "/v3/responses/resp_1/input_items"),
            ("/tokenize/", "/tokenize"),
            ("/v1/responses//", "/v1/responses/"),
            ("/v3/v1", "/v3/v1"),
            ("/v3/v1x/models", "/v3/v1x/models"),
            ("/v1/models", "/v1/models"),
            ("/", "/"),
        ] {
            assert_eq!(standard_path(given), path);
        }
    }
}
