//! Determines the endpoint of a request: the router handles the endpoints differently and counts the requests for each
//! of them separately.

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

    /// The endpoint that a path belongs to, or `None` if the path is not part of the API.
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
