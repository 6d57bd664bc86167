//! Tests the rows of the tables of parameters, except for parameters that are refused: a supported parameter changes
//! the answer, and a parameter that is only accepted does not. The test fails for rows without an entry here.

use serde_json::{Value, json};

use crate::harness::{Answer, IM_END, RepeatingRunner, Server, Setup};
use crate::parameters::{ENDPOINTS, parameters};

/// Supported parameters whose effects other tests check, because comparing two answers is not sufficient: the name of
/// the parameter, the source of the test, and the name of the test.
const ELSEWHERE: [(&str, &str, &str); 8] = [
    (
        "previous_response_id",
        include_str!("responses_stored.rs"),
        "a_response_continues_another_with_its_whole_history",
    ),
    (
        "conversation",
        include_str!("responses_stored.rs"),
        "a_conversation_collects_the_items_of_its_responses",
    ),
    ("model", include_str!("routes.rs"), "v3_is_v1_and_answers_have_the_name_that_the_request_has"),
    ("add_special_tokens", include_str!("effects.rs"), "special_tokens_are_added_unless_disabled"),
    ("length_penalty", BEAMS, "the_parameters_of_beam_search_have_their_effects"),
    ("early_stopping", BEAMS, "the_parameters_of_beam_search_have_their_effects"),
    ("num_beam_groups", BEAMS, "the_parameters_of_beam_search_have_their_effects"),
    ("diversity_penalty", BEAMS, "the_parameters_of_beam_search_have_their_effects"),
];
const BEAMS: &str = include_str!("beams.rs");
/// Parameters whose only effect on the answer is that the answer repeats them.
const REPEATED_FIELDS: [&str; 2] = ["metadata", "store"];
/// Members that differ between answers.
const NAMES: [&str; 8] = [
    "id",
    "item_id",
    "call_id",
    "created",
    "created_at",
    "completed_at",
    "system_fingerprint",
    "sequence_number",
];
/// Members that depend on how the text is split into chunks.
const PIECES: [&str; 5] = ["delta", "text", "content", "logprobs", "item"];

const TEMPLATE: &str = "{% for document in documents or [] %}{{ document.text }}{% endfor %}{{ mood or '' }}\
    {% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
    {% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n\
    {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
const ANSWER: &str = "<think>\nHm.\n</think>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";

/// The model with which a row is tested.
#[derive(Clone, Copy)]
enum Model {
    /// The model repeats a text; at temperatures above 0, other tokens can be sampled, too.
    Plain,
    /// The same model, with an end token.
    Ending,
    /// The model reasons, calls two tools, supports fill-in-the-middle, and has a template that renders tools,
    /// documents and additional variables.
    FullFeatured,
}

struct Models {
    plain: Server,
    ending: Server,
    full_featured: Server,
}

impl Models {
    fn start() -> Self {
        const FILLS_IN: [&str; 3] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
        let ending: Vec<u32> = b"abcdefgh".iter().map(|&byte| byte.into()).chain([IM_END]).collect();
        Self {
            plain: Server::repeating("abcdefgh"),
            ending: Setup::new(RepeatingRunner::new(ending)).start(),
            full_featured: Setup::scripted(TEMPLATE, &FILLS_IN, &[ANSWER]).start(),
        }
    }

    fn get(&self, model: Model) -> &Server {
        match model {
            Model::Plain => &self.plain,
            Model::Ending => &self.ending,
            Model::FullFeatured => &self.full_featured,
        }
    }
}

/// Returns the model, the other parameters, and the value for a row.
fn entry(schema: &str, name: &str) -> (Model, Value, Value) {
    let sampled = || json!({"temperature": 2, "seed": 1, "max_tokens": 60, "max_output_tokens": 60});
    let (model, base, value) = match name {
        "temperature" => (Model::Plain, json!({"seed": 1}), json!(2)),
        "top_p" | "assistant_confidence_threshold" => (Model::Plain, sampled(), json!(0.01)),
        "top_k" | "min_p" => (Model::Plain, sampled(), json!(1)),
        "seed"
        | "presence_penalty"
        | "frequency_penalty"
        | "best_of"
        | "n"
        | "num_assistant_tokens"
        | "max_ngram_size" => (Model::Plain, sampled(), json!(2)),
        "repetition_penalty" => (Model::Plain, sampled(), json!(9)),
        "use_beam_search" => (Model::Plain, sampled(), json!(true)),
        "logit_bias" => (Model::Plain, json!({}), json!({"120": 100})),
        "bad_words" => (Model::Plain, json!({}), json!(["e"])),
        "allowed_token_ids" => (Model::Plain, json!({}), json!([122])),
        "guided_json" => (Model::Plain, json!({}), json!({"type": "integer"})),
        "guided_regex" => (Model::Plain, json!({}), json!("[xyz]+")),
        "guided_choice" => (Model::Plain, json!({}), json!(["x", "yz"])),
        "guided_grammar" => (Model::Plain, json!({}), json!("start: \"x\"")),
        "structured_outputs" => (Model::Plain, json!({}), json!({"regex": "[xyz]+"})),
        "response_format" => (Model::Plain, json!({}), json!({"type": "json_object"})),
        "structural_tag" => (Model::Plain, json!({}), json!({"type": "const_string", "value": "x"})),
        "ignore_eos" => (Model::Ending, json!({"max_tokens": 20, "max_output_tokens": 20}), json!(true)),
        "skip_special_tokens" if schema == "DetokenizeRequest" => {
            (Model::Plain, json!({"tokens": [72, 258]}), json!(true))
        }
        "skip_special_tokens" => {
            let base = json!({"max_tokens": 20, "max_output_tokens": 20, "ignore_eos": true});
            (Model::Ending, base, json!(false))
        }
        _ => answer_entry(schema, name),
    };
    (model, base, value)
}

/// Like [`entry`], for parameters that control the length and the form of answers.
fn answer_entry(schema: &str, name: &str) -> (Model, Value, Value) {
    let logprobs = if schema == "CompletionRequest" { json!(1) } else { json!(true) };
    let (base, value) = match name {
        "stream" | "return_token_ids" | "echo" | "background" | "return_token_strs" => {
            (json!({}), json!(true))
        }
        "guided_json_object" | "spaces_between_special_tokens" => (json!({}), json!(true)),
        "detokenize" | "add_generation_prompt" if schema != "TokenizeRequest" => (json!({}), json!(false)),
        "add_generation_prompt" => (messages(), json!(false)),
        "stream_options" => (json!({"stream": true}), json!({"include_usage": true})),
        "max_tokens" | "max_completion_tokens" | "max_output_tokens" | "max_tool_calls" => {
            (json!({}), json!(3))
        }
        "stop" => (json!({}), json!("e")),
        "stop_token_ids" => (json!({}), json!([101])),
        "min_tokens" => (json!({"stop": "e"}), json!(8)),
        "include_stop_str_in_output" => (json!({"stop": "e"}), json!(true)),
        "truncate_prompt_tokens" | "prompt_logprobs" | "max_length" => (json!({}), json!(1)),
        "logprobs" => (json!({}), logprobs),
        "top_logprobs" | "return_tokens_as_token_ids" => {
            let value = if name == "top_logprobs" { json!(2) } else { json!(true) };
            (json!({"logprobs": logprobs}), value)
        }
        "include" => (json!({}), json!(["message.output_text.logprobs"])),
        "messages" => (json!({}), messages()["messages"].take()),
        "prompt" | "input" | "instructions" => (json!({}), json!("Hello")),
        "tokens" => (json!({}), json!([72])),
        "text" if schema == "ResponsesRequest" => (json!({}), json!({"format": {"type": "json_object"}})),
        "text" => (json!({}), json!(["Hello", "you"])),
        "pad_to_max_length" => (json!({"max_length": 9}), json!(true)),
        "padding_side" => (json!({"max_length": 9, "pad_to_max_length": true}), json!("left")),
        "cache_salt" => {
            let text = "x".repeat(40);
            let prompt = match schema {
                "ChatRequest" => json!({"messages": [{"role": "user", "content": text}]}),
                "CompletionRequest" => json!({"prompt": text}),
                _ => json!({"input": text}),
            };
            (prompt, json!("salt"))
        }
        "truncation" => {
            let said = |role: &str| json!({"role": role, "content": "x".repeat(300)});
            (json!({"input": [said("user"), said("assistant"), said("user")]}), json!("auto"))
        }
        "continue_final_message" => {
            let last = json!({"role": "assistant", "content": "Once upon"});
            (json!({"messages": [messages()["messages"][0].take(), last]}), json!(true))
        }
        "metadata" => (json!({}), json!({"a": "b"})),
        "store" => (json!({}), json!(schema != "ResponsesRequest")),
        "context_management" => (json!({}), json!([])),
        "user" | "safety_identifier" | "prompt_cache_key" | "request_id" | "guided_decoding_backend" => {
            (json!({}), json!("x"))
        }
        "service_tier" => (json!({}), json!("flex")),
        "prompt_cache_retention" => (json!({}), json!("24h")),
        "prompt_cache_options" => (json!({}), json!({"mode": "explicit", "ttl": "30m"})),
        "access_programs" => (json!({}), json!({"cyber": "standard"})),
        "image" => (json!({}), json!({"context_compression": "disabled"})),
        "priority" => (json!({}), json!(0)),
        "verbosity" => (json!({}), json!("low")),
        "prediction" => (json!({}), json!({"type": "content", "content": "cdef"})),
        "modalities" => (json!({}), json!(["text"])),
        _ => return full_featured_entry(schema, name),
    };
    (Model::Plain, base, value)
}

fn messages() -> Value {
    json!({"messages": [{"role": "user", "content": "Hello"}]})
}

/// Like [`entry`], for parameters that need a model with tools, reasoning or other features.
fn full_featured_entry(schema: &str, name: &str) -> (Model, Value, Value) {
    let mut base = json!({"max_tokens": 400, "max_output_tokens": 400});
    if schema == "TokenizeRequest" {
        base = messages();
    }
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let value = match name {
        "suffix" => json!("the end"),
        "tools" => tools,
        "functions" => json!([{"name": "f"}]),
        "function_call" => {
            base["functions"] = json!([{"name": "f"}]);
            json!("none")
        }
        "tool_choice" | "parallel_tool_calls" => {
            base["tools"] = tools;
            if name == "tool_choice" { json!("none") } else { json!(false) }
        }
        "documents" => json!([{"text": "x"}]),
        "chat_template_kwargs" => json!({"mood": "x"}),
        "include_reasoning" => json!(false),
        "reasoning_effort" => json!("none"),
        "reasoning" => json!({"effort": "none"}),
        other => panic!("{other} of {schema} has no entry: add a value that has an effect"),
    };
    (Model::FullFeatured, base, value)
}

/// Returns an answer, or the events of a stream without successive duplicates. Members that differ between answers are
/// replaced by `…`; those of events are also replaced if they depend on how the text is split into chunks.
fn plain(answer: &Answer, without: Option<&str>) -> Value {
    if let Ok(mut whole) = serde_json::from_str::<Value>(&answer.body) {
        blank(&mut whole, &NAMES);
        // Ignore `completion_tokens_details`, because its counts of draft tokens depend on timing.
        if let Some(usage) = whole.get_mut("usage").and_then(Value::as_object_mut) {
            usage.remove("completion_tokens_details");
        }
        if let (Some(name), Some(whole)) = (without, whole.as_object_mut()) {
            whole.remove(name);
        }
        return json!([answer.status.as_u16(), whole]);
    }
    let lines = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let mut events: Vec<Value> = lines
        .map(|line| {
            let mut event = serde_json::from_str(line).unwrap_or_else(|_| json!(line));
            blank(&mut event, &NAMES);
            blank(&mut event, &PIECES);
            event
        })
        .collect();
    events.dedup();
    json!(events)
}

fn blank(value: &mut Value, names: &[&str]) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| blank(value, names)),
        Value::Object(members) => members.iter_mut().for_each(|(name, value)| {
            if names.contains(&name.as_str()) {
                *value = json!("…");
            } else {
                blank(value, names);
            }
        }),
        _ => {}
    }
}

#[tokio::test]
async fn working_parameters_change_the_answer_and_accepted_ones_do_not() {
    let models = Models::start();
    let mut tried = 0;
    for (path, schema, body) in ENDPOINTS {
        for (name, property) in parameters(&models.plain, schema).await {
            let here = property["x-ovfleet"].as_str().unwrap();
            let works = here == "works";
            if here == "refused" || works && ELSEWHERE.iter().any(|(elsewhere, ..)| *elsewhere == name) {
                continue;
            }
            let (model, base, value) = match name.as_str() {
                "add_special_tokens" => (Model::Plain, json!({}), json!(true)),
                name => entry(schema, name),
            };
            let server = models.get(model);
            let without = REPEATED_FIELDS.iter().all(|repeated| *repeated != name).then_some(name.as_str());
            // Compare with the second answer, because the changed request may hit the prefix cache too.
            server.post(path, body(base.clone())).await;
            let before = server.post(path, body(base.clone())).await;
            let mut changed = base.clone();
            changed[name.as_str()] = value;
            let after = server.post(path, body(changed.clone())).await;
            assert_eq!(after.status, 200, "{path} {changed}: {}", after.body);
            let same = plain(&before, without) == plain(&after, without);
            assert_eq!(
                same, !works,
                "{path} {name} {here}: {base} has {}, {changed} has {}",
                before.body, after.body
            );
            tried += 1;
        }
    }
    assert!(tried > 180, "{tried}");
}

#[test]
fn tests_elsewhere_exist() {
    for (name, source, test) in ELSEWHERE {
        assert!(source.contains(&format!("async fn {test}()")), "{name}: the test {test} does not exist");
    }
}
