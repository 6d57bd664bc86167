//! Tests the effects of parameters that have no test file of their own.

use serde_json::{Value, json};
use server::Model;
use server_engine::sim::{SimFault, SimFaultKind};
use server_text::ModelText;

use crate::harness::{Answer, RepeatingRunner, Server, Setup, VOCABULARY, chat, completion, faulty, merged};

const PATH: &str = "/v3/completions";

/// The text that the model repeats: the token at position `p` is `TEXT[p % TEXT.len()]`. The prompt is `Hi`.
const TEXT: &str = "abcdefgh";

async fn answer(server: &Server, parameters: Value) -> Value {
    let answer = server.post(PATH, completion(parameters)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

async fn text(server: &Server, parameters: Value) -> String {
    answer(server, parameters).await["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// A server whose answers depend on the seed.
fn gibberish() -> Server {
    Setup::new(faulty(Vec::new())).start()
}

#[tokio::test]
async fn bad_words_are_excluded_and_their_parts_are_not() {
    let server = Server::repeating(TEXT);
    assert_eq!(text(&server, json!({})).await, "cdefghab");
    // The remaining tokens are equally probable, so the first of them, `\0`, is generated in place of an excluded
    // token.
    assert_eq!(text(&server, json!({"bad_words": ["e"]})).await, "cd\0fghab");
    assert_eq!(text(&server, json!({"bad_words": ["fg", "ha"]})).await, "cdef\0h\0b");
    assert_eq!(text(&server, json!({"bad_words": ["xg"]})).await, "cdefghab");
}

#[tokio::test]
async fn only_allowed_tokens_are_generated() {
    let server = Server::repeating(TEXT);
    assert_eq!(text(&server, json!({"allowed_token_ids": [122, 101, 100]})).await, "ddeddddd");
}

#[tokio::test]
async fn top_k_is_forty_by_default() {
    let server = gibberish();
    let sampled = json!({"temperature": 2, "seed": 5, "max_tokens": 40});
    let with = async |top_k: Value| {
        let mut parameters = sampled.clone();
        parameters["top_k"] = top_k;
        answer(&server, parameters).await["choices"].clone()
    };
    assert_eq!(with(Value::Null).await, with(json!(40)).await);
    assert_ne!(with(Value::Null).await, with(json!(-1)).await);
    assert_eq!(with(json!(0)).await, with(json!(-1)).await);
}

#[tokio::test]
async fn truncation_retains_the_end_of_the_prompt() {
    let server = Server::repeating(TEXT);
    let whole = answer(&server, json!({"prompt": "xyzHi", "truncate_prompt_tokens": 2, "echo": true})).await;
    assert_eq!(whole["usage"]["prompt_tokens"], 2);
    assert_eq!(whole["choices"][0]["text"], "Hicdefghab");
    let prompt = vec![97; 600];
    let long = json!({"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": 12});
    assert_eq!(answer(&server, long).await["usage"]["prompt_tokens"], 500);
    let none = answer(&server, json!({"truncate_prompt_tokens": 9, "echo": true})).await;
    assert_eq!(none["choices"][0]["text"], "Hicdefghab");
    let refused = server.post(PATH, completion(json!({"truncate_prompt_tokens": 0}))).await.json();
    assert_eq!(refused["error"]["param"], "truncate_prompt_tokens");
}

#[tokio::test]
async fn token_ids_are_returned_with_and_without_text() {
    let server = Server::repeating(TEXT);
    let plain = answer(&server, json!({"return_token_ids": true})).await["choices"][0].clone();
    assert_eq!(plain["token_ids"], json!([99, 100, 101, 102, 103, 104, 97, 98]));
    assert_eq!((&plain["prompt_token_ids"], &plain["logprobs"]), (&json!([72, 105]), &Value::Null));
    let bare = answer(&server, json!({"detokenize": false})).await["choices"][0].clone();
    assert_eq!((&bare["text"], &bare["token_ids"]), (&json!(""), &plain["token_ids"]));
    assert_eq!(bare["finish_reason"], "length");
    let refused = server.post(PATH, completion(json!({"detokenize": false, "stop": "a"}))).await.json();
    assert_eq!(refused["error"]["param"], "stop");

    let streamed = json!({"return_token_ids": true, "stream": true});
    let streamed = server.post(PATH, completion(streamed)).await;
    assert_eq!(streamed_token_ids(&streamed), plain["token_ids"]);

    let whole = server.post("/v3/chat/completions", chat(json!({"return_token_ids": true}))).await.json();
    assert_eq!(whole["choices"][0]["token_ids"].as_array().unwrap().len(), 8);
    assert_eq!(whole["prompt_token_ids"].as_array().unwrap().len() as u64, whole["usage"]["prompt_tokens"]);
}

/// This is vLLM's format: a whole chat completion has the token IDs of the prompt once, and a stream has them in the
/// first chunk of each choice.
#[tokio::test]
async fn every_choice_has_the_token_ids_of_the_prompt() {
    let server = Server::repeating(TEXT);
    let two = answer(&server, json!({"return_token_ids": true, "n": 2, "prompt": ["Hi", "Ho"]})).await;
    let ids: Vec<&Value> =
        two["choices"].as_array().unwrap().iter().map(|choice| &choice["prompt_token_ids"]).collect();
    let (first, second) = (json!([72, 105]), json!([72, 111]));
    assert_eq!(ids, [&first, &first, &second, &second]);

    let parameters = json!({"return_token_ids": true, "n": 2});
    let whole = server.post("/v3/chat/completions", chat(parameters.clone())).await.json();
    assert!(whole["choices"][1].get("prompt_token_ids").is_none(), "{whole}");
    let mut streamed = parameters;
    streamed["stream"] = json!(true);
    let streamed = server.post("/v3/chat/completions", chat(streamed)).await;
    for (index, event) in streamed.events().into_iter().take(2).enumerate() {
        let chunk: Value = serde_json::from_str(event).unwrap();
        assert_eq!(
            (&chunk["choices"][0]["index"], &chunk["prompt_token_ids"]),
            (&json!(index), &whole["prompt_token_ids"])
        );
    }
}

/// Returns the token IDs of all chunks of a stream with one choice.
fn streamed_token_ids(streamed: &Answer) -> Value {
    let chunks = streamed.events().into_iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    chunks
        .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .collect()
}

#[tokio::test]
async fn token_ids_include_stop_tokens_and_those_of_stop_strings() {
    let server = Server::repeating(TEXT);
    let ids = json!([99, 100, 101, 102]);
    for (stop, text) in [(json!({"stop_token_ids": [102]}), "cde"), (json!({"stop": "ef"}), "cd")] {
        let mut parameters = stop;
        (parameters["return_token_ids"], parameters["logprobs"]) = (json!(true), json!(0));
        let whole = answer(&server, parameters.clone()).await;
        let choice = &whole["choices"][0];
        assert_eq!((&choice["text"], &choice["token_ids"]), (&json!(text), &ids));
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), text.len());
        assert_eq!(
            (&choice["finish_reason"], &whole["usage"]["completion_tokens"]),
            (&json!("stop"), &json!(4))
        );
        parameters["stream"] = json!(true);
        assert_eq!(streamed_token_ids(&server.post(PATH, completion(parameters)).await), ids);
    }
    // The same applies to beam search, and to answers without text.
    for more in [json!({"use_beam_search": true}), json!({"detokenize": false})] {
        let mut parameters = more;
        (parameters["return_token_ids"], parameters["stop_token_ids"]) = (json!(true), json!([102]));
        assert_eq!(answer(&server, parameters).await["choices"][0]["token_ids"], ids);
    }
}

#[tokio::test]
async fn log_probabilities_name_tokens_by_id_if_requested() {
    let server = Server::repeating(TEXT);
    let by_number = json!({"logprobs": 1, "return_tokens_as_token_ids": true, "max_tokens": 1});
    let logprobs = answer(&server, by_number).await["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"], json!(["token_id:99"]));
    assert!(logprobs["top_logprobs"][0]["token_id:99"].is_number());
    let chat = chat(json!({"logprobs": true, "return_tokens_as_token_ids": true, "max_tokens": 1}));
    let logprobs = server.post("/v3/chat/completions", chat).await.json()["choices"][0]["logprobs"].clone();
    assert!(logprobs["content"][0]["token"].as_str().unwrap().starts_with("token_id:"), "{logprobs}");
}

#[tokio::test]
async fn best_of_returns_the_best_choices() {
    let server = gibberish();
    let parameters = |n: u32, best_of: u32| json!({"n": n, "best_of": best_of, "temperature": 2, "top_k": 0, "seed": 3, "logprobs": 0, "ignore_eos": true});
    let all = answer(&server, parameters(6, 6)).await["choices"].as_array().unwrap().clone();
    let mean = |choice: &Value| {
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap().clone();
        logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum::<f64>() / logprobs.len() as f64
    };
    let mut means: Vec<f64> = all.iter().map(mean).collect();
    means.sort_by(|a, b| b.total_cmp(a));
    assert!(means[0] > means[5], "the choices have different scores");
    let best = answer(&server, parameters(2, 6)).await;
    let best_scores: Vec<f64> = best["choices"].as_array().unwrap().iter().map(mean).collect();
    assert_eq!(best_scores, means[..2]);
    assert_eq!(best["choices"][1]["index"], 1);
    assert_eq!(best["usage"]["completion_tokens"], 48, "all generated tokens count");
    // The best choice is selected separately for each prompt.
    let mut two = parameters(1, 3);
    two["prompt"] = json!(["Hi", "Ho"]);
    let two = answer(&server, two).await["choices"].as_array().unwrap().clone();
    assert_eq!(two.len(), 2);
    // The best choice is also selected if the answer has no log probabilities.
    let mut plain = parameters(2, 6);
    plain["logprobs"] = Value::Null;
    let plain = answer(&server, plain).await;
    assert_eq!(plain["choices"][0]["text"], best["choices"][0]["text"]);
    assert!(plain["choices"][0]["logprobs"].is_null());
    for (parameters, code) in [
        (json!({"n": 3, "best_of": 2}), "integer_below_min_value"),
        (json!({"best_of": 2, "stream": true}), "invalid_value"),
        // The server runs at most 32 sequences at the same time.
        (json!({"n": 2, "best_of": 33}), "integer_above_max_value"),
    ] {
        let refused = server.post(PATH, completion(parameters)).await.json();
        assert_eq!(
            (&refused["error"]["param"], &refused["error"]["code"]),
            (&json!("best_of"), &json!(code))
        );
    }
}

#[tokio::test]
async fn an_echoed_prompt_has_its_own_log_probabilities() {
    let server = gibberish();
    let letters: Vec<u32> = (97..123).collect();
    let generated =
        answer(&server, json!({"logprobs": 2, "max_tokens": 6, "allowed_token_ids": letters})).await;
    let tokens = generated["choices"][0]["logprobs"].clone();
    // Append the generated tokens to the prompt.
    let ids =
        answer(&server, json!({"max_tokens": 6, "allowed_token_ids": letters, "return_token_ids": true}))
            .await;
    let mut prompt = vec![json!(72), json!(105)];
    prompt.extend(ids["choices"][0]["token_ids"].as_array().unwrap().iter().cloned());
    let echoed = json!({"prompt": prompt, "echo": true, "logprobs": 2, "max_tokens": 0});
    let echoed = answer(&server, echoed).await;
    let choice = &echoed["choices"][0];
    assert_eq!(choice["text"], format!("Hi{}", generated["choices"][0]["text"].as_str().unwrap()));
    assert_eq!(
        (&choice["finish_reason"], &echoed["usage"]["completion_tokens"]),
        (&json!("length"), &json!(0))
    );
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 8);
    assert_eq!((&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
    for index in 0..6 {
        for list in ["tokens", "token_logprobs", "top_logprobs"] {
            assert_eq!(logprobs[list][index + 2], tokens[list][index], "{list} at {index}");
        }
        let offset = tokens["text_offset"][index].as_u64().unwrap() + 2;
        assert_eq!(logprobs["text_offset"][index + 2], offset);
    }
}

#[tokio::test]
async fn an_echo_with_log_probabilities_is_the_same_streamed() {
    let server = gibberish();
    // The chunk with the log probabilities of the long prompt is encoded on another thread.
    let prompts = ["Hello ".repeat(20), "Hi".to_owned()];
    let parameters = json!({"prompt": prompts, "echo": true, "logprobs": 1, "max_tokens": 4, "n": 2});
    let whole = answer(&server, parameters.clone()).await;
    let mut streamed = parameters;
    streamed["stream"] = json!(true);
    let streamed = server.post(PATH, completion(streamed)).await;
    for choice in whole["choices"].as_array().unwrap() {
        let (mut text, mut joined) = (String::new(), json!({}));
        for chunk in streamed.events().iter().filter_map(|event| serde_json::from_str::<Value>(event).ok()) {
            let part = &chunk["choices"][0];
            if part["index"] != choice["index"] {
                continue;
            }
            text += part["text"].as_str().unwrap();
            for (list, values) in part["logprobs"].as_object().into_iter().flatten() {
                let mut all = joined[list].as_array().cloned().unwrap_or_default();
                all.extend(values.as_array().unwrap().iter().cloned());
                joined[list] = json!(all);
            }
        }
        assert_eq!(text, choice["text"].as_str().unwrap());
        assert_eq!(joined, choice["logprobs"]);
        // Offsets refer to the whole text, including the prompt.
        let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
        assert!(offsets.is_sorted_by_key(|offset| offset.as_u64()) && offsets[0] == 0, "{offsets:?}");
    }
}

#[tokio::test]
async fn a_prompt_is_scored_on_both_endpoints() {
    let server = Server::repeating(TEXT);
    // At position 1, the model predicts `b`, but the prompt has `i`.
    let scored = answer(&server, json!({"prompt": "Hi", "prompt_logprobs": 1})).await;
    let scores = scored["choices"][0]["prompt_logprobs"].clone();
    assert_eq!((scores.as_array().unwrap().len(), &scores[0]), (2, &Value::Null));
    assert_eq!((&scores[1]["98"]["rank"], &scores[1]["98"]["decoded_token"]), (&json!(1), &json!("b")));
    // All other tokens are equally probable, so their ranks follow their IDs.
    assert_eq!((&scores[1]["105"]["rank"], &scores[1]["105"]["decoded_token"]), (&json!(106), &json!("i")));
    let one = answer(&server, json!({"prompt": "H", "prompt_logprobs": 0})).await;
    assert_eq!(one["choices"][0]["prompt_logprobs"], json!([null]));
    let whole = server.post("/v3/chat/completions", chat(json!({"prompt_logprobs": 0, "n": 2}))).await.json();
    let scores = whole["prompt_logprobs"].as_array().unwrap();
    assert_eq!(scores.len() as u64, whole["usage"]["prompt_tokens"]);
    assert!(scores[1..].iter().all(|score| score.as_object().unwrap().len() == 1), "{scores:?}");
    let refused = server.post(PATH, completion(json!({"prompt_logprobs": 1, "stream": true}))).await.json();
    assert_eq!(refused["error"]["param"], "prompt_logprobs");
}

#[tokio::test]
async fn cached_prompts_are_shared_only_with_the_same_salt() {
    let server = Server::repeating(TEXT);
    let cached = async |salt: Value| {
        let parameters = json!({"prompt": "x".repeat(40), "cache_salt": salt});
        answer(&server, parameters).await["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!((cached(Value::Null).await, cached(Value::Null).await), (json!(0), json!(32)));
    assert_eq!((cached(json!("a")).await, cached(json!("a")).await), (json!(0), json!(32)));
    assert_eq!(cached(json!("b")).await, 0);
    let refused = server.post(PATH, completion(json!({"cache_salt": ""}))).await.json();
    assert_eq!(refused["error"]["param"], "cache_salt");
}

#[tokio::test]
async fn every_chunk_has_the_usage_if_requested() {
    let server = Server::repeating(TEXT);
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    for (path, body) in [
        (PATH, completion(json!({"stream": true, "stream_options": options}))),
        ("/v3/chat/completions", chat(json!({"stream": true, "stream_options": options}))),
    ] {
        let streamed = server.post(path, body).await;
        let chunks: Vec<Value> =
            streamed.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
        let counts: Vec<u64> =
            chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(counts.is_sorted() && counts.last() == Some(&8), "{counts:?}");
    }
}

#[tokio::test]
async fn contradictory_parameters_are_rejected() {
    let server = Server::repeating(TEXT);
    for (parameters, param) in [
        (
            json!({"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.5}),
            "assistant_confidence_threshold",
        ),
        (json!({"suffix": "end"}), "suffix"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"use_beam_search": true, "stream": true}), "use_beam_search"),
        (json!({"use_beam_search": true, "best_of": 4, "num_beam_groups": 3}), "num_beam_groups"),
        (json!({"use_beam_search": true, "best_of": 2, "n": 3}), "best_of"),
        (json!({"bad_words": [" "]}), "bad_words[0]"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"allowed_token_ids": [VOCABULARY]}), "allowed_token_ids[0]"),
    ] {
        let refused = server.post(PATH, completion(parameters)).await;
        assert_eq!(refused.status, 400, "{}", refused.body);
        assert_eq!(refused.json()["error"]["param"], param);
    }
}

#[tokio::test]
async fn no_stop_string_ends_a_choice_before_min_tokens() {
    let server = Server::repeating(TEXT);
    let with = async |parameters: Value| {
        let choice = answer(&server, parameters).await["choices"][0].clone();
        (choice["text"].as_str().unwrap().to_owned(), choice["finish_reason"].as_str().unwrap().to_owned())
    };
    let text_and_reason = |text: &str, reason: &str| (text.to_owned(), reason.to_owned());
    assert_eq!(with(json!({"stop": "e"})).await, text_and_reason("cd", "stop"));
    assert_eq!(with(json!({"stop": "e", "min_tokens": 2})).await, text_and_reason("cd", "stop"));
    // The third token completes the stop string too early, so the string remains in the text. The next occurrence ends
    // the choice.
    let later = json!({"stop": "e", "min_tokens": 3, "max_tokens": 20});
    assert_eq!(with(later).await, text_and_reason("cdefghabcd", "stop"));
    assert_eq!(with(json!({"stop": "e", "min_tokens": 3})).await, text_and_reason("cdefghab", "length"));
    // The stop string may begin before `min_tokens` is reached.
    assert_eq!(with(json!({"stop": "def", "min_tokens": 3})).await, text_and_reason("c", "stop"));
    let streamed =
        server.post(PATH, completion(json!({"stop": "de", "min_tokens": 4, "stream": true}))).await;
    let texts = streamed.events().into_iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let text: String =
        texts.filter_map(|chunk| Some(chunk["choices"][0]["text"].as_str()?.to_owned())).collect();
    assert_eq!(text, "cdefghab");
}

#[tokio::test]
async fn special_tokens_are_added_unless_disabled() {
    let around =
        json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": level,
        "decoder": level,
        "added_tokens": [{
            "id": 2, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "post_processor": {
            "type": "TemplateProcessing", "single": around, "pair": around,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": {"a": 0, "b": 1, "<s>": 2}, "merges": [],
        },
    });
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(directory.path().join("tokenizer_config.json"), r#"{"bos_token": "<s>"}"#).unwrap();
    let text = ModelText::load(directory.path()).unwrap();
    let model = Some(Model::new(vec!["test-model".to_owned()], text, "test"));
    let server = Setup { model, ..Setup::new(RepeatingRunner::new([0, 1])) }.start();
    let prompt = async |parameters: Value| {
        let all = json!({"prompt": "ab", "return_token_ids": true});
        answer(&server, merged(all, parameters)).await["choices"][0]["prompt_token_ids"].clone()
    };
    assert_eq!(prompt(json!({})).await, json!([2, 0, 1]));
    assert_eq!(prompt(json!({"add_special_tokens": false})).await, json!([0, 1]));
    for (path, body, tokens) in [
        ("/tokenize", json!({"model": "test-model", "text": "ab"}), json!([2, 0, 1])),
        (
            "/tokenize",
            json!({"model": "test-model", "text": "ab", "add_special_tokens": false}),
            json!([0, 1]),
        ),
    ] {
        assert_eq!(server.post(path, body.to_string()).await.json()["tokens"], tokens);
    }
}

#[tokio::test]
async fn errors_are_strings_with_ovms_rules() {
    let server = Setup::new(RepeatingRunner::new([120])).start();
    let server = Server { router: server::ovms_api(server.router, server.app.clone()), ..server };
    let refused = server.post(PATH, completion(json!({"temperature": 3}))).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json(), json!({"error": "temperature: 3 is not a number from 0 to 2"}));
    let nowhere = server.get("/v3/nowhere").await;
    assert_eq!(
        (nowhere.status.as_u16(), nowhere.json()),
        (404, json!({"error": "the path /v3/nowhere does not exist"}))
    );
    assert_eq!(server.post(PATH, completion(json!({}))).await.json()["object"], "text_completion");
    // Errors in streams have the same form.
    for (path, body) in [
        (PATH, completion(json!({"stream": true, "ignore_eos": true}))),
        ("/v3/chat/completions", chat(json!({"stream": true, "ignore_eos": true}))),
    ] {
        let fault = SimFault { step: 3, kind: SimFaultKind::Step };
        let server = Setup::new(faulty(vec![fault])).start();
        let server = Server { router: server::ovms_api(server.router, server.app.clone()), ..server };
        let answer = server.post(path, body).await;
        let last: Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
        assert!(last["error"].as_str().is_some_and(|message| !message.is_empty()), "{}", answer.body);
    }
}
