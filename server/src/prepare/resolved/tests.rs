use serde_json::{Value, json};
use server_engine::{EngineLimits, RequestLimits};
use server_openai::{ChatRequest, CompletionRequest};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::model::Model;
use crate::prepare::responses::{Context, responses};
use crate::prepare::{Media, chat, completion};
use crate::store::{Kind, Store, StoreConfig};

/// Number of tokens that a prompt and its completion can have.
const CONTEXT_LENGTH: u32 = 131_072;

/// The preparation of requests to the built-in model with a long context.
struct Preparation {
    model: Model,
    media: Media,
    canceled: CancellationToken,
}

impl Preparation {
    fn new() -> Self {
        let text = crate::backend::built_in_text().unwrap();
        let model = Model::new(vec!["m".to_owned()], text, "test");
        Self { model, media: Media::default(), canceled: CancellationToken::new() }
    }

    fn target(&self) -> Target<'_> {
        let requests = RequestLimits {
            block_tokens: 16,
            blocks_total: CONTEXT_LENGTH,
            max_model_len: CONTEXT_LENGTH,
            max_num_seqs: 256,
            max_queue: 1024,
        };
        let limits = EngineLimits { requests, vocabulary: 259, adapters: 0, reads_images: false };
        Target { model: &self.model, limits, media: &self.media, canceled: &self.canceled, seed: 1 }
    }

    /// Returns the number of tokens that a chat request with these parameters can generate in each choice.
    fn chat(&self, parameters: Value) -> Result<u32, Error> {
        let messages = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}]});
        let request = ChatRequest::read(&with(messages, parameters)).unwrap();
        chat(request, self.target()).map(|prepared| prepared.prompts[0].stop.max_tokens)
    }

    /// Returns the number of tokens that a completion request with these parameters can generate in each choice.
    fn completion(&self, parameters: Value) -> Result<u32, Error> {
        let prompt = json!({"model": "m", "prompt": "Hi"});
        let request = CompletionRequest::read(&with(prompt, parameters)).unwrap();
        completion(request, self.target()).map(|prepared| prepared.prompts[0].stop.max_tokens)
    }
}

fn with(mut request: Value, parameters: Value) -> Value {
    let Value::Object(parameters) = parameters else { panic!("the parameters must be an object") };
    request.as_object_mut().unwrap().extend(parameters);
    request
}

/// Asserts that a request is rejected because of the number of log probabilities.
fn assert_rejected(result: &Result<u32, Error>, param: &str) {
    assert_rejected_with(result, param, "exceed the limit of 2097152 log probabilities over all choices");
}

/// Asserts that a request is rejected with a message that contains `problem`.
fn assert_rejected_with(result: &Result<u32, Error>, param: &str, problem: &str) {
    let Err(Error::Invalid { code, param: named, message }) = result else { panic!("{result:?}") };
    assert_eq!((*code, named.as_str()), ("integer_above_max_value", param));
    assert!(message.contains(problem), "{message}");
}

#[test]
fn a_requested_length_with_too_many_log_probabilities_is_rejected() {
    let preparation = Preparation::new();
    let chat = |n: u32, top: u32, name: &str, tokens: u32| {
        preparation.chat(json!({"n": n, "logprobs": true, "top_logprobs": top, name: tokens}))
    };
    assert_eq!(chat(1, 20, "max_tokens", 99_864), Ok(99_864));
    assert_rejected(&chat(1, 20, "max_tokens", 99_865), "max_tokens");
    assert_eq!(chat(2, 20, "max_completion_tokens", 49_932), Ok(49_932));
    assert_rejected(&chat(2, 20, "max_completion_tokens", 49_933), "max_completion_tokens");
    assert_eq!(chat(128, 0, "max_tokens", 16_384), Ok(16_384));
    assert_rejected(&chat(128, 0, "max_tokens", 16_385), "max_tokens");
    // Without log probabilities, only the context length limits the answer.
    assert_eq!(preparation.chat(json!({"n": 128, "max_tokens": 100_000})), Ok(100_000));
    // The prompts of a request share the limit.
    let prompts = |tokens: u32| {
        preparation.completion(json!({"prompt": ["a", "b"], "logprobs": 20, "max_tokens": tokens}))
    };
    assert_eq!(prompts(49_932), Ok(49_932));
    assert_rejected(&prompts(49_933), "max_tokens");
}

/// The engine also reports log probabilities to rank the candidates of `best_of`, and together with token IDs, even if
/// the request does not ask for log probabilities.
#[test]
fn an_error_about_the_number_of_tokens_names_the_parameter_that_limits_it() {
    let preparation = Preparation::new();
    for (parameters, cause) in [
        (json!({"best_of": 128}), "best_of"),
        (json!({"n": 128, "return_token_ids": true}), "return_token_ids"),
        (json!({"n": 128, "detokenize": false}), "detokenize = false"),
    ] {
        let chat = |tokens: u32| preparation.chat(with(json!({"max_tokens": tokens}), parameters.clone()));
        assert_eq!(chat(16_384), Ok(16_384), "{cause}");
        let problem = format!(
            "with {cause}, 16385 tokens per choice exceed the limit of 2097152 tokens over all choices"
        );
        assert_rejected_with(&chat(16_385), "max_tokens", &problem);
    }
}

#[test]
fn a_default_length_is_reduced_to_the_limit_of_log_probabilities() {
    let preparation = Preparation::new();
    let room = preparation.chat(json!({})).unwrap();
    let chat =
        |n: u32, top: u32| preparation.chat(json!({"n": n, "logprobs": true, "top_logprobs": top})).unwrap();
    assert_eq!(chat(1, 5), room);
    assert_eq!(chat(8, 0), room);
    assert_eq!(chat(1, 20), 99_864);
    assert_eq!(chat(128, 20), 780);
    assert_eq!(preparation.completion(json!({"logprobs": 20})), Ok(16));
    let minimum = json!({"n": 128, "logprobs": true, "top_logprobs": 20, "min_tokens": 781});
    let rejected = preparation.chat(minimum);
    let Err(Error::Invalid { param, .. }) = &rejected else { panic!("{rejected:?}") };
    assert_eq!(param, "min_tokens");
}

/// While a conversation is truncated, a quarter of the context length must be left for the answer. An answer with log
/// probabilities can be shorter.
#[test]
fn a_truncated_conversation_can_have_an_answer_with_log_probabilities() {
    let preparation = Preparation::new();
    let turn = json!({"role": "user", "content": "x".repeat(20_000)});
    let request = json!({
        "model": "m", "input": vec![turn; 8], "truncation": "auto", "n": 4, "top_logprobs": 20,
    });
    let id = Store::open(&StoreConfig::default()).unwrap().new_id(Kind::Response);
    let request = server_openai::responses::Request::read(&request).unwrap();
    let prepared = responses(&request, Context::default(), id, preparation.target()).unwrap().prepared;
    let prompt = &prepared.prompts[0];
    assert!(prompt.prompt.len() > 80_000, "{} tokens", prompt.prompt.len());
    assert_eq!(prompt.stop.max_tokens, 24_966);
}
