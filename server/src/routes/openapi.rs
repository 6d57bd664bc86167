//! Serves `/openapi.json`, the description of the API. The schemas of most request bodies are generated from the table
//! against which these bodies are checked ([`Endpoint::parameters`]), so that the schemas agree with the checks.
//! `requests.json` describes the other bodies and the array elements that the table does not check; `answers.json`
//! describes the answers. Tests check requests and answers against these files.

mod operations;

use std::sync::LazyLock;

use axum::Json;
use serde_json::{Map, Value, json};

use crate::prepare::{Endpoint, Kind, Parameter, PeerSupport, Support};
use operations::{API, BARE, Body, Operation, Query};

/// The schemas of answers.
const ANSWERS: &str = include_str!("openapi/answers.json");
/// The schemas of request bodies that are not in the table, and of array elements that the table does not check.
const REQUESTS: &str = include_str!("openapi/requests.json");

static DOCUMENT: LazyLock<Value> = LazyLock::new(document);

pub(super) async fn openapi() -> Json<&'static Value> {
    Json(&DOCUMENT)
}

fn document() -> Value {
    let read = |text| {
        serde_json::from_str::<Map<String, Value>>(text).expect("invariant: a test reads the document")
    };
    let mut schemas = read(ANSWERS);
    schemas.extend(read(REQUESTS));
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
            "description": "OpenAI's API. In a request, null is the same as absent, and unknown members are ignored.",
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
    let Operation { method, path, summary, body, answer, events, query, errors } = operation;
    let mut content = Map::new();
    if let Some(answer) = answer {
        content.insert("application/json".to_owned(), json!({"schema": reference(answer)}));
    }
    if let Some(events) = events {
        content.insert("text/event-stream".to_owned(), json!({"schema": reference(events)}));
    }
    let mut responses = Map::new();
    responses.insert("200".to_owned(), json!({"description": "The answer.", "content": content}));
    for status in *errors {
        responses.insert(status.to_string(), problem(*status, answer.is_some() || *method == "post"));
    }
    let mut described = json!({"summary": summary, "responses": responses});
    let body = match body {
        Body::Nothing => None,
        Body::Optional(schema) => Some((schema, false)),
        Body::Required(schema) => Some((schema, true)),
    };
    if let Some((schema, required)) = body {
        let content = json!({"application/json": {"schema": reference(schema)}});
        described["requestBody"] = json!({"required": required, "content": content});
    }
    let in_path = ["id", "item"].into_iter().filter(|name| path.contains(&format!("{{{name}}}")));
    let in_path = in_path
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}));
    let parameters: Vec<Value> = in_path.chain(query.iter().copied().map(query_parameter)).collect();
    if !parameters.is_empty() {
        described["parameters"] = parameters.into();
    }
    let entry = paths.entry(format!("{prefix}{path}")).or_insert_with(|| json!({}));
    entry[*method] = described;
}

fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}

/// Describes an answer with an error status. Answers to probes have no body.
fn problem(status: u16, has_body: bool) -> Value {
    let description = match status {
        400 => "A value is missing, malformed or out of range; `param` names it.",
        404 => "The model or the object does not exist.",
        408 => "The body did not arrive in time.",
        409 => "Requests are in progress.",
        413 => "The body is too large.",
        429 => "Too many requests are in progress or waiting. `Retry-After` says when to retry.",
        503 => "The model is being loaded, the server is shutting down, or a part of the server failed.",
        _ => "The server failed.",
    };
    if !has_body {
        return json!({"description": description});
    }
    json!({"description": description, "content": {"application/json": {"schema": reference("Error")}}})
}

fn query_parameter(query: Query) -> Value {
    let (name, schema) = match query {
        Query::Boolean(name) => (name, json!({"type": "boolean"})),
        Query::Integer(name, min, max) => (name, json!({"type": "integer", "minimum": min, "maximum": max})),
        Query::OneOf(name, words) => (name, json!({"type": "string", "enum": words})),
        Query::Text(name) => (name, json!({"type": "string"})),
    };
    json!({"name": name, "in": "query", "required": false, "schema": schema})
}

fn request(endpoint: Endpoint) -> Value {
    let described = |parameter| property(parameter, elements(endpoint, parameter));
    let properties: Map<String, Value> =
        endpoint.parameters().map(|parameter| (parameter.name.to_owned(), described(parameter))).collect();
    let required: Vec<_> = endpoint
        .parameters()
        .filter(|parameter| parameter.required)
        .map(|parameter| parameter.name)
        .collect();
    json!({"type": "object", "properties": properties, "required": required})
}

/// Returns the schema of a parameter's elements if the table does not check them.
fn elements(endpoint: Endpoint, parameter: &Parameter) -> Option<&'static str> {
    match (endpoint, parameter.name) {
        (_, "messages") => Some("ChatMessage"),
        (Endpoint::Responses, "tools") => Some("ResponsesTool"),
        (_, "tools") => Some("ChatTool"),
        (_, "functions") => Some("FunctionDefinition"),
        (Endpoint::Responses, "input") => Some("InputItem"),
        _ => None,
    }
}

fn property(parameter: &Parameter, elements: Option<&str>) -> Value {
    let peer = |peer: PeerSupport| match peer {
        PeerSupport::Full => "yes",
        PeerSupport::Partial => "partly",
        PeerSupport::None => "no",
    };
    let mut property = schema(parameter.kind);
    if let Some(elements) = elements {
        let is_array = property["type"] == "array";
        let array = if is_array { &mut property } else { &mut property["anyOf"][1] };
        array["items"] = reference(elements);
    }
    property["description"] = json!(parameter.note);
    property["x-words"] = json!(parameter.kind.to_string());
    property["x-default"] = json!(parameter.default);
    property["x-ovms"] = json!(peer(parameter.peers.ovms));
    property["x-openai"] = json!(peer(parameter.peers.openai));
    property["x-vllm"] = json!(peer(parameter.peers.vllm));
    property["x-ovfleet"] = json!(match parameter.support {
        Support::Works => "works",
        Support::Accepted => "accepted",
        Support::Refused => "refused",
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
        Kind::Number(min, max) => json!({"type": "number", "minimum": min, "maximum": max}),
        Kind::Text(usize::MAX) => json!({"type": "string"}),
        // The limit is in bytes. `maxLength` counts characters, but a text never has more characters than bytes.
        Kind::Text(bytes_max) => json!({"type": "string", "maxLength": bytes_max}),
        Kind::Characters(chars_max) => json!({"type": "string", "maxLength": chars_max}),
        Kind::OneOf(words) => json!({"type": "string", "enum": words}),
        Kind::Object => json!({"type": "object"}),
        Kind::Fields(members) => {
            let members: Map<String, Value> =
                members.iter().map(|(name, kind)| ((*name).to_owned(), schema(*kind))).collect();
            json!({"type": "object", "properties": members})
        }
        Kind::Texts(count_max, bytes_max) => array(&schema(Kind::Text(bytes_max)), count_max),
        Kind::Pairs(count_max, _, value_max) => {
            json!({"type": "object", "maxProperties": count_max, "additionalProperties": schema(Kind::Characters(value_max))})
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
