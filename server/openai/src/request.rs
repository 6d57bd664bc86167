//! What requests look like.

use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::parse::{self, Malformed};

/// A request to `/chat/completions`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChatRequest {
    /// The parameters that the endpoints share.
    #[serde(skip)]
    pub generation: Generation,
    /// The conversation.
    pub messages: Option<Vec<Message>>,
    /// Whether to report log probabilities.
    pub logprobs: Option<bool>,
    /// Of how many of the most probable tokens.
    pub top_logprobs: Option<u32>,
    /// The tools the model may call, for the chat template.
    pub tools: Option<Vec<Map<String, Value>>>,
    /// Which of them.
    pub tool_choice: Option<Value>,
    /// The former name of `tools`: what stands under `function` there.
    pub functions: Option<Vec<Map<String, Value>>>,
    /// The former name of `tool_choice`.
    pub function_call: Option<Value>,
    /// Whether there may be several calls in one answer.
    pub parallel_tool_calls: Option<bool>,
    /// How much the model is to think: `none` to `xhigh`.
    pub reasoning_effort: Option<String>,
    /// Whether the answer tells what the model thought.
    pub include_reasoning: Option<bool>,
    /// The documents to answer from, for the chat template.
    pub documents: Option<Vec<Map<String, Value>>>,
    /// More variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether the template opens the assistant's turn. Default true.
    pub add_generation_prompt: Option<bool>,
    /// Whether the last message is gone on with in place of being answered.
    pub continue_final_message: Option<bool>,
}

/// A request to `/completions`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct CompletionRequest {
    /// The parameters that the endpoints share.
    #[serde(skip)]
    pub generation: Generation,
    /// The prompt or prompts.
    pub prompt: Option<Prompt>,
    /// `Some(k)`: report log probabilities, of the `k` most probable tokens too.
    pub logprobs: Option<u32>,
    /// Whether the answer's text begins with the prompt.
    pub echo: Option<bool>,
    /// What is to come after the completion.
    pub suffix: Option<String>,
}

/// The parameters that the endpoints share.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Generation {
    /// The model's name.
    pub model: Option<String>,
    /// Whether to answer in chunks.
    pub stream: Option<bool>,
    /// How.
    pub stream_options: Option<StreamOptions>,
    /// Most tokens to generate for a choice.
    pub max_tokens: Option<u32>,
    /// The same, under its later name, which goes first.
    pub max_completion_tokens: Option<u32>,
    /// Tokens to generate before the end may come.
    pub min_tokens: Option<u32>,
    /// How many choices.
    pub n: Option<u32>,
    /// How many to choose the choices from.
    pub best_of: Option<u32>,
    /// Texts that end a choice.
    pub stop: Option<Stop>,
    /// Tokens that end a choice.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Whether the text that ended a choice is part of it.
    pub include_stop_str_in_output: Option<bool>,
    /// Whether the model's end tokens do not end a choice.
    pub ignore_eos: Option<bool>,
    /// Whether special tokens have no text.
    pub skip_special_tokens: Option<bool>,
    /// Where the random numbers come from.
    pub seed: Option<i64>,
    /// Divides the logits; 0 is greedy.
    pub temperature: Option<f32>,
    /// Keep the most probable tokens that add up to this.
    pub top_p: Option<f32>,
    /// Keep this many; 0 and -1 keep all.
    pub top_k: Option<i32>,
    /// Keep those at least this times as probable as the most probable.
    pub min_p: Option<f32>,
    /// Makes tokens of prompt and answer less probable.
    pub repetition_penalty: Option<f32>,
    /// Makes tokens of the answer less probable, for each time.
    pub frequency_penalty: Option<f32>,
    /// Makes tokens of the answer less probable, once.
    pub presence_penalty: Option<f32>,
    /// Added to logits, by token.
    pub logit_bias: Option<Map<String, Value>>,
    /// The form of the answer.
    pub response_format: Option<Map<String, Value>>,
    /// The form of the answer as vLLM has it: one of several ways, by name.
    pub structured_outputs: Option<Map<String, Value>>,
    /// As vLLM had it before: a JSON schema.
    pub guided_json: Option<Value>,
    /// A regular expression.
    pub guided_regex: Option<Value>,
    /// Some texts.
    pub guided_choice: Option<Value>,
    /// A grammar.
    pub guided_grammar: Option<Value>,
    /// Any JSON object.
    pub guided_json_object: Option<Value>,
    /// A structural tag.
    pub structural_tag: Option<Value>,
    /// Texts that are not generated.
    pub bad_words: Option<Vec<String>>,
    /// The only tokens that are generated.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Keep this many of the prompt's last tokens; -1 keeps as many as there is room for.
    pub truncate_prompt_tokens: Option<i64>,
    /// `Some(k)`: report log probabilities of the prompt, of the `k` most probable tokens too.
    pub prompt_logprobs: Option<u32>,
    /// Whether tokens become text.
    pub detokenize: Option<bool>,
    /// Whether log probabilities name tokens by their numbers.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Whether the tokens themselves are reported.
    pub return_token_ids: Option<bool>,
    /// Whether the prompt gets the tokens that the model wants around every text.
    pub add_special_tokens: Option<bool>,
    /// Keeps what is cached of this prompt from requests with another salt.
    pub cache_salt: Option<String>,
    /// Tokens that a draft proposes at a time.
    pub num_assistant_tokens: Option<u32>,
    /// How many of the last tokens are looked for in what was there before.
    pub max_ngram_size: Option<u32>,
    /// What the answer is expected to be.
    pub prediction: Option<Prediction>,
    /// The probability below which a draft ends.
    pub assistant_confidence_threshold: Option<f32>,
    /// Whether the choices are to be the best beams.
    pub use_beam_search: Option<bool>,
    /// A beam's score is divided by its length to the power of this.
    pub length_penalty: Option<f32>,
    /// When beams end: `true`, `false` or `"never"`.
    pub early_stopping: Option<Value>,
    /// Makes tokens of a group of beams less probable in the next.
    pub diversity_penalty: Option<f32>,
    /// Groups of beams.
    pub num_beam_groups: Option<u32>,
}

/// What an answer is expected to be.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Prediction {
    /// In one piece or several.
    pub content: Option<Content>,
}

impl Prediction {
    /// All of it.
    pub fn text(&self) -> String {
        match &self.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => parts.iter().filter_map(|part| part.text.as_deref()).collect(),
        }
    }
}

/// How to answer in chunks.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    /// Whether a last chunk tells the usage.
    pub include_usage: Option<bool>,
    /// Whether every chunk tells the usage so far.
    pub continuous_usage_stats: Option<bool>,
}

impl ChatRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// It is no JSON object, or a field has a wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Malformed> {
        Self::read(&parse::object(body)?)
    }

    /// Reads a request from a JSON object.
    ///
    /// # Errors
    /// A field has a wrong type.
    pub fn read(object: &Value) -> Result<Self, Malformed> {
        Ok(Self { generation: parse::fields(object)?, ..parse::fields(object)? })
    }
}

impl CompletionRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// It is no JSON object, or a field has a wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Malformed> {
        Self::read(&parse::object(body)?)
    }

    /// Reads a request from a JSON object.
    ///
    /// # Errors
    /// A field has a wrong type.
    pub fn read(object: &Value) -> Result<Self, Malformed> {
        Ok(Self { generation: parse::fields(object)?, ..parse::fields(object)? })
    }
}

/// A message of the conversation. Also what a chat template sees, hence [`Serialize`].
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Message {
    /// Who speaks.
    pub role: String,
    /// What they say.
    #[serde(default)]
    pub content: Option<Content>,
    /// What the assistant said in place of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// Who speaks, more closely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the assistant thought.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls the assistant made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<Map<String, Value>>>,
    /// The former name of a single call: what stands under `function` there.
    #[serde(default, skip_serializing)]
    pub function_call: Option<Map<String, Value>>,
    /// The call that this is the answer to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Content {
    /// A text.
    Text(String),
    /// Texts, images and so on.
    Parts(Vec<ContentPart>),
}

/// A part of what a message says. Which kinds can be served is for the server to say.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct ContentPart {
    /// The kind: `text`, `image_url` and so on.
    pub r#type: String,
    /// The text of a part of kind `text`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The text of a part of kind `refusal`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

/// A prompt or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Texts. A single one may stand without the array.
    Texts(Vec<String>),
    /// Tokens. A single list may stand without the outer array.
    Tokens(Vec<Vec<u32>>),
}

/// Texts that end a choice. A single one may stand without the array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop(pub Vec<String>);

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Content;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or an array of content parts")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut read = Vec::new();
                while let Some(part) = parts.next_element()? {
                    read.push(part);
                }
                Ok(Content::Parts(read))
            }
        }
        deserializer.deserialize_any(Read)
    }
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Stop;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or an array of strings")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut texts: A) -> Result<Stop, A::Error> {
                let mut read = Vec::new();
                while let Some(text) = texts.next_element()? {
                    read.push(text);
                }
                Ok(Stop(read))
            }
        }
        deserializer.deserialize_any(Read)
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Prompt;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(PROMPT)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Texts(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Prompt, A::Error> {
                let Some(first) = elements.next_element::<PromptElement>()? else {
                    return Ok(Prompt::Texts(Vec::new()));
                };
                // What the first element is, all must be.
                match first {
                    PromptElement::Text(text) => {
                        let mut texts = vec![text];
                        while let Some(text) = elements.next_element::<String>()? {
                            texts.push(text);
                        }
                        Ok(Prompt::Texts(texts))
                    }
                    PromptElement::Token(token) => {
                        let mut tokens = vec![token];
                        while let Some(token) = elements.next_element::<u32>()? {
                            tokens.push(token);
                        }
                        Ok(Prompt::Tokens(vec![tokens]))
                    }
                    PromptElement::Tokens(tokens) => {
                        let mut prompts = vec![tokens];
                        while let Some(tokens) = elements.next_element::<Vec<u32>>()? {
                            prompts.push(tokens);
                        }
                        Ok(Prompt::Tokens(prompts))
                    }
                }
            }
        }
        deserializer.deserialize_any(Read)
    }
}

const PROMPT: &str = "a string, an array of strings, an array of tokens or an array of arrays of tokens";

enum PromptElement {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for PromptElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = PromptElement;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a token or an array of tokens")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<PromptElement, E> {
                Ok(PromptElement::Text(text.to_owned()))
            }
            fn visit_u64<E: de::Error>(self, token: u64) -> Result<PromptElement, E> {
                let token = u32::try_from(token)
                    .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(token), &"a token"))?;
                Ok(PromptElement::Token(token))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut tokens: A) -> Result<PromptElement, A::Error> {
                let mut read = Vec::new();
                while let Some(token) = tokens.next_element::<u32>()? {
                    read.push(token);
                }
                Ok(PromptElement::Tokens(read))
            }
        }
        deserializer.deserialize_any(Read)
    }
}
