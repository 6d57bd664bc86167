//! `/openapi.json`: what there is, what it takes and what it answers. What it takes is written from the table that
//! requests are checked against ([`Endpoint::parameters`]), so it cannot differ from it; what it answers is in
//! `answers.json`, and a test holds answers against that.

use std::sync::LazyLock;

use axum::Json;
use serde_json::{Map, Value, json};

use crate::prepare::{Endpoint, Here, Kind, Parameter, Peer};

/// Schemas of answers, and of the bodies that are not in the table.
const ANSWERS: &str = include_str!("openapi/answers.json");

static DOCUMENT: LazyLock<Value> = LazyLock::new(document);

pub(super) async fn openapi() -> Json<&'static Value> {
    Json(&DOCUMENT)
}

/// An operation.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    /// The schema of its body, if it takes one.
    body: Option<&'static str>,
    /// The schema of its answer; none if that is no JSON.
    answer: Option<&'static str>,
    /// Of the events of a streamed one.
    events: Option<&'static str>,
}

const fn get(path: &'static str, summary: &'static str, answer: Option<&'static str>) -> Operation {
    Operation { method: "get", path, summary, body: None, answer, events: None }
}

const fn delete(path: &'static str, summary: &'static str) -> Operation {
    Operation { method: "delete", path, summary, body: None, answer: Some("Object"), events: None }
}

const fn post(path: &'static str, summary: &'static str, schemas: [&'static str; 2]) -> Operation {
    let [body, answer] = schemas;
    Operation { method: "post", path, summary, body: Some(body), answer: Some(answer), events: None }
}

impl Operation {
    const fn events(self, events: &'static str) -> Self {
        Self { events: Some(events), ..self }
    }
}

/// What there is under `/v1` and `/v3`.
const API: &[Operation] = &[
    post("/chat/completions", "Continue a conversation.", ["ChatRequest", "ChatCompletion"])
        .events("ChatChunk"),
    post("/completions", "Continue a text.", ["CompletionRequest", "Completion"]).events("Completion"),
    post("/tokenize", "Turn text into tokens.", ["TokenizeRequest", "Tokenized"]),
    post("/detokenize", "Turn tokens into text.", ["DetokenizeRequest", "Detokenized"]),
    post("/responses", "Answer a conversation that may be kept.", ["ResponsesRequest", "Response"])
        .events("ResponseEvent"),
    post("/responses/input_tokens", "Count the tokens of a conversation.", ["ResponsesRequest", "Object"]),
    get("/responses/{id}", "A response that is kept.", Some("Response")),
    delete("/responses/{id}", "Forget a response."),
    post("/responses/{id}/cancel", "Cancel a response in the background.", ["Object", "Response"]),
    get("/responses/{id}/input_items", "What a response answers to.", Some("Object")),
    post("/conversations", "Begin a conversation that is kept.", ["Object", "Object"]),
    get("/conversations/{id}", "A conversation.", Some("Object")),
    post("/conversations/{id}", "Change what is noted of a conversation.", ["Object", "Object"]),
    delete("/conversations/{id}", "Forget a conversation."),
    get("/conversations/{id}/items", "What is in a conversation.", Some("Object")),
    post("/conversations/{id}/items", "Add to a conversation.", ["Object", "Object"]),
    get("/conversations/{id}/items/{item}", "One item of a conversation.", Some("Object")),
    delete("/conversations/{id}/items/{item}", "Take an item out of a conversation."),
    get("/models", "List the models.", Some("ModelList")),
    get("/models/{id}", "Describe a model. Its name may have slashes in it.", Some("Model")),
];

/// What there is besides.
const BARE: &[Operation] = &[
    post("/tokenize", "Turn text into tokens.", ["TokenizeRequest", "Tokenized"]),
    post("/detokenize", "Turn tokens into text.", ["DetokenizeRequest", "Detokenized"]),
    get("/v2/health/live", "Whether the process is there.", None),
    get("/v2/health/ready", "Whether requests should be sent here.", None),
    get("/metrics", "Metrics, in OpenMetrics' text format.", None),
    get("/openapi.json", "This document.", Some("Object")),
];

fn document() -> Value {
    let mut schemas: Map<String, Value> =
        serde_json::from_str(ANSWERS).expect("invariant: a test reads the document");
    for endpoint in Endpoint::ALL {
        schemas.insert(schema_name(endpoint).to_owned(), request(endpoint));
    }
    let mut paths = Map::new();
    for prefix in ["/v1", "/v3"] {
        API.iter().for_each(|operation| add(&mut paths, prefix, operation));
    }
    BARE.iter().for_each(|operation| add(&mut paths, "", operation));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "ovfleet",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI's API. In a request, null is the same as absent, and what is not known is ignored.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

fn schema_name(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Chat => "ChatRequest",
        Endpoint::Completions => "CompletionRequest",
        Endpoint::Responses => "ResponsesRequest",
        Endpoint::Tokenize => "TokenizeRequest",
        Endpoint::Detokenize => "DetokenizeRequest",
    }
}

fn add(paths: &mut Map<String, Value>, prefix: &str, operation: &Operation) {
    let Operation { method, path, summary, body, answer, events } = operation;
    let reference = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let mut content = Map::new();
    if let Some(answer) = answer {
        content.insert("application/json".to_owned(), json!({"schema": reference(answer)}));
    }
    if let Some(events) = events {
        content.insert("text/event-stream".to_owned(), json!({"schema": reference(events)}));
    }
    let problem = json!({"description": "What is wrong.", "content": {"application/json": {"schema": reference("Error")}}});
    let mut described = json!({
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}, "default": problem},
    });
    if let Some(body) = body {
        let content = json!({"application/json": {"schema": reference(body)}});
        described["requestBody"] = json!({"required": true, "content": content});
    }
    let names: Vec<_> =
        ["id", "item"].into_iter().filter(|name| path.contains(&format!("{{{name}}}"))).collect();
    if !names.is_empty() {
        let parameter =
            |name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
        described["parameters"] = names.into_iter().map(parameter).collect();
    }
    let entry = paths.entry(format!("{prefix}{path}")).or_insert_with(|| json!({}));
    entry[*method] = described;
}

fn request(endpoint: Endpoint) -> Value {
    let properties: Map<String, Value> =
        endpoint.parameters().map(|parameter| (parameter.name.to_owned(), property(parameter))).collect();
    let required: Vec<_> = endpoint
        .parameters()
        .filter(|parameter| parameter.required)
        .map(|parameter| parameter.name)
        .collect();
    json!({"type": "object", "properties": properties, "required": required})
}

fn property(parameter: &Parameter) -> Value {
    let peer = |peer: Peer| match peer {
        Peer::Has => "yes",
        Peer::Partly => "partly",
        Peer::Lacks => "no",
    };
    let mut property = schema(parameter.kind);
    property["description"] = json!(parameter.note);
    property["x-words"] = json!(parameter.kind.to_string());
    property["x-default"] = json!(parameter.default);
    property["x-ovms"] = json!(peer(parameter.peers.ovms));
    property["x-openai"] = json!(peer(parameter.peers.openai));
    property["x-vllm"] = json!(peer(parameter.peers.vllm));
    property["x-ovfleet"] = json!(match parameter.here {
        Here::Works => "works",
        Here::Accepted => "accepted",
        Here::Refused => "refused",
    });
    property
}

fn schema(kind: Kind) -> Value {
    match kind {
        Kind::Boolean => json!({"type": "boolean"}),
        Kind::Integer(min, max) => {
            let mut schema = json!({"type": "integer"});
            if min > i64::MIN {
                schema["minimum"] = json!(min);
            }
            if max < i64::MAX {
                schema["maximum"] = json!(max);
            }
            schema
        }
        Kind::Number(min, max) if (min, max) == (f64::MIN, f64::MAX) => json!({"type": "number"}),
        Kind::Number(min, max) => json!({"type": "number", "minimum": min, "maximum": max}),
        Kind::NumberAbove(min) => json!({"type": "number", "exclusiveMinimum": min}),
        Kind::Text(usize::MAX) => json!({"type": "string"}),
        // In bytes, which are no fewer than the characters that this counts.
        Kind::Text(bytes_max) => json!({"type": "string", "maxLength": bytes_max}),
        Kind::OneOf(words) => json!({"type": "string", "enum": words}),
        Kind::Object => json!({"type": "object"}),
        Kind::Fields(members) => {
            let members: Map<String, Value> =
                members.iter().map(|(name, kind)| ((*name).to_owned(), schema(*kind))).collect();
            json!({"type": "object", "properties": members})
        }
        Kind::Texts(count_max, bytes_max) => array(&schema(Kind::Text(bytes_max)), count_max),
        Kind::Pairs(count_max, _, value_max) => {
            json!({"type": "object", "maxProperties": count_max, "additionalProperties": schema(Kind::Text(value_max))})
        }
        Kind::Array(kind, count_max) => array(&schema(*kind), count_max),
        Kind::Either(kinds) => json!({"anyOf": kinds.iter().copied().map(schema).collect::<Vec<_>>()}),
        Kind::Any => json!({}),
    }
}

fn array(items: &Value, count_max: usize) -> Value {
    match count_max {
        usize::MAX => json!({"type": "array", "items": items}),
        count_max => json!({"type": "array", "items": items, "maxItems": count_max}),
    }
}
