//! The operations that `/openapi.json` describes, with their paths, bodies, answers and error statuses.

/// An operation of the API.
pub(super) struct Operation {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) summary: &'static str,
    pub(super) body: Body,
    /// The schema of the answer; `None` if the answer is not JSON.
    pub(super) answer: Option<&'static str>,
    /// The schema of the events of a streamed answer.
    pub(super) events: Option<&'static str>,
    /// The query parameters.
    pub(super) query: &'static [Query],
    pub(super) errors: &'static [u16],
}

/// The body of an operation.
#[derive(Clone, Copy)]
pub(super) enum Body {
    Nothing,
    /// The operation has an optional body with this schema.
    Optional(&'static str),
    Required(&'static str),
}

/// A query parameter.
#[derive(Clone, Copy)]
pub(super) enum Query {
    Boolean(&'static str),
    /// An integer with its minimum and maximum.
    Integer(&'static str, u32, u32),
    OneOf(&'static str, &'static [&'static str]),
    Text(&'static str),
}

/// The error statuses of each group of operations.
const NONE: &[u16] = &[];
const SERVING: &[u16] = &[503];
const NAMED_MODEL: &[u16] = &[404, 503];
const GENERATING: &[u16] = &[400, 404, 408, 413, 429, 500, 503];
const COMPUTING: &[u16] = &[400, 404, 408, 413, 429, 500, 503];
const STORED: &[u16] = &[400, 404, 429, 500, 503];
const STORING: &[u16] = &[400, 404, 408, 413, 429, 500, 503];
const SLEEPING: &[u16] = &[400, 404, 409, 500, 503];

const fn get(path: &'static str, summary: &'static str, answer: Option<&'static str>) -> Operation {
    let (body, events) = (Body::Nothing, None);
    Operation { method: "get", path, summary, body, answer, events, query: &[], errors: NONE }
}

const fn delete(path: &'static str, summary: &'static str) -> Operation {
    Operation { method: "delete", ..get(path, summary, Some("Object")) }.errors(STORED)
}

const fn post(path: &'static str, summary: &'static str, body: Body) -> Operation {
    Operation { method: "post", body, ..get(path, summary, Some("Object")) }
}

impl Operation {
    const fn answer(self, answer: &'static str) -> Self {
        Self { answer: Some(answer), ..self }
    }

    const fn without_answer(self) -> Self {
        Self { answer: None, ..self }
    }

    const fn events(self, events: &'static str) -> Self {
        Self { events: Some(events), ..self }
    }

    const fn query(self, query: &'static [Query]) -> Self {
        Self { query, ..self }
    }

    const fn errors(self, errors: &'static [u16]) -> Self {
        Self { errors, ..self }
    }
}

const PAGE: &[Query] =
    &[Query::Integer("limit", 1, 100), Query::OneOf("order", &["asc", "desc"]), Query::Text("after")];
const REPLAY: &[Query] = &[Query::Boolean("stream"), Query::Integer("starting_after", 0, u32::MAX)];

const TOKENIZE: Operation = post("/tokenize", "Turn text into tokens.", Body::Required("TokenizeRequest"))
    .answer("Tokenized")
    .errors(COMPUTING);
const DETOKENIZE: Operation =
    post("/detokenize", "Turn tokens into text.", Body::Required("DetokenizeRequest"))
        .answer("Detokenized")
        .errors(COMPUTING);

/// The operations under `/v1` and `/v3`.
pub(super) const API: &[Operation] = &[
    post("/chat/completions", "Continue a conversation.", Body::Required("ChatRequest"))
        .answer("ChatCompletion")
        .events("ChatChunk")
        .errors(GENERATING),
    post("/completions", "Continue a text.", Body::Required("CompletionRequest"))
        .answer("Completion")
        .events("Completion")
        .errors(GENERATING),
    TOKENIZE,
    DETOKENIZE,
    post("/responses", "Answer a conversation, which may be stored.", Body::Required("ResponsesRequest"))
        .answer("Response")
        .events("ResponseEvent")
        .errors(GENERATING),
    post(
        "/responses/input_tokens",
        "Count the tokens of a conversation.",
        Body::Required("ResponsesRequest"),
    )
    .errors(COMPUTING),
    get("/responses/{id}", "Retrieve a stored response.", Some("Response"))
        .events("ResponseEvent")
        .query(REPLAY)
        .errors(STORED),
    delete("/responses/{id}", "Delete a response."),
    post("/responses/{id}/cancel", "Cancel a background response.", Body::Nothing)
        .answer("Response")
        .errors(STORED),
    get("/responses/{id}/input_items", "List the input items of a response.", Some("Object"))
        .query(PAGE)
        .errors(STORED),
    post("/conversations", "Create a stored conversation.", Body::Optional("ConversationRequest"))
        .errors(STORING),
    get("/conversations/{id}", "Retrieve a conversation.", Some("Object")).errors(STORED),
    post(
        "/conversations/{id}",
        "Replace the metadata of a conversation.",
        Body::Required("ConversationUpdate"),
    )
    .errors(STORING),
    delete("/conversations/{id}", "Delete a conversation."),
    get("/conversations/{id}/items", "List the items of a conversation.", Some("Object"))
        .query(PAGE)
        .errors(STORED),
    post("/conversations/{id}/items", "Add items to a conversation.", Body::Required("ItemsRequest"))
        .errors(STORING),
    get("/conversations/{id}/items/{item}", "Retrieve an item of a conversation.", Some("Object"))
        .errors(STORED),
    delete("/conversations/{id}/items/{item}", "Delete an item of a conversation."),
    get("/models", "List the models.", Some("ModelList")).errors(SERVING),
    get("/models/{id}", "Describe a model. Its name may contain slashes.", Some("Model")).errors(NAMED_MODEL),
];

/// The operations without a prefix.
pub(super) const BARE: &[Operation] = &[
    TOKENIZE,
    DETOKENIZE,
    get("/v2/health/live", "Liveness probe.", None),
    get("/v2/health/ready", "Readiness probe.", None).errors(SERVING),
    get("/metrics", "Metrics in OpenMetrics text format.", None),
    get("/openapi.json", "This document.", Some("Object")),
    post("/sleep", "Release memory. Only with `--enable-sleep-mode`.", Body::Nothing)
        .without_answer()
        .query(&[Query::Integer("level", 1, 2)])
        .errors(SLEEPING),
    post("/wake_up", "Wake the engine. Only with `--enable-sleep-mode`.", Body::Nothing)
        .without_answer()
        .errors(SLEEPING),
    get("/is_sleeping", "Whether the server sleeps. Only with `--enable-sleep-mode`.", Some("Object"))
        .errors(NAMED_MODEL),
];
