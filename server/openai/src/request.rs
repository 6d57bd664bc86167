//! Requests to the chat and completions endpoints.

use std::fmt;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::parse::{self, RequestError};
use crate::text_or_list::{TextOrList, text_or_list};

/// A request to `/chat/completions`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ChatRequest {
    /// The parameters that all generating endpoints share.
    #[serde(skip)]
    pub generation: Generation,
    /// The messages of the conversation.
    pub messages: Option<Vec<Message>>,
    /// Whether to report log probabilities.
    pub logprobs: Option<bool>,
    /// The number of most probable tokens to report at each position.
    pub top_logprobs: Option<u32>,
    /// The tools that the model may call.
    pub tools: Option<Vec<Map<String, Value>>>,
    /// Whether the model may, must or must not call tools, or which tool it must call.
    pub tool_choice: Option<Value>,
    /// The deprecated form of `tools`: a list of the objects that the elements of `tools` contain as `function`.
    pub functions: Option<Vec<Map<String, Value>>>,
    /// The deprecated form of `tool_choice`.
    pub function_call: Option<Value>,
    /// Whether a response may contain several tool calls.
    pub parallel_tool_calls: Option<bool>,
    /// The reasoning effort: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`.
    pub reasoning_effort: Option<String>,
    /// Whether the response includes the reasoning.
    pub include_reasoning: Option<bool>,
    /// The documents on which the answer is to be based, as a variable of the chat template.
    pub documents: Option<Vec<Map<String, Value>>>,
    /// Additional variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether the template opens the assistant's turn; true by default, unless the model continues the last message.
    pub add_generation_prompt: Option<bool>,
    /// Whether the model continues the last message instead of answering it.
    pub continue_final_message: Option<bool>,
}

/// A request to `/completions`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct CompletionRequest {
    /// The parameters that all generating endpoints share.
    #[serde(skip)]
    pub generation: Generation,
    /// The prompt or the prompts.
    pub prompt: Option<Prompt>,
    /// Whether to report log probabilities; the value is the number of most probable tokens to include at each
    /// position.
    pub logprobs: Option<u32>,
    /// Whether the text of the response begins with the prompt.
    pub echo: Option<bool>,
    /// The text after the completion, for fill-in-the-middle.
    pub suffix: Option<String>,
}

/// The parameters that all generating endpoints share.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Generation {
    /// The name of the model.
    pub model: Option<String>,
    /// Whether to stream the response in chunks.
    pub stream: Option<bool>,
    /// The options of a streamed response.
    pub stream_options: Option<StreamOptions>,
    /// The largest number of tokens to generate for a choice.
    pub max_tokens: Option<u32>,
    /// The newer name of `max_tokens`. It takes precedence.
    pub max_completion_tokens: Option<u32>,
    /// The number of tokens to generate before an end token, a stop token or a stop string can end a choice.
    pub min_tokens: Option<u32>,
    /// The number of choices to return for each prompt.
    pub n: Option<u32>,
    /// The number of candidates to generate for each prompt, the best of which become the choices; in beam search, the
    /// number of beams.
    pub best_of: Option<u32>,
    /// The strings that end a choice.
    pub stop: Option<Stop>,
    /// The tokens that end a choice.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Whether the stop string or stop token that ended a choice is part of its text.
    pub include_stop_str_in_output: Option<bool>,
    /// Whether to ignore the end tokens of the model.
    pub ignore_eos: Option<bool>,
    /// Whether to leave special tokens out of the text.
    pub skip_special_tokens: Option<bool>,
    /// The seed of the random numbers for sampling.
    pub seed: Option<i64>,
    /// The divisor of the logits; 0 selects greedy sampling.
    pub temperature: Option<f32>,
    /// Sample only from the smallest set of most probable tokens whose probabilities add up to at least this value.
    pub top_p: Option<f32>,
    /// Sample only from this number of most probable tokens; 0 and -1 mean all tokens.
    pub top_k: Option<i32>,
    /// Sample only from tokens whose probability is at least this fraction of that of the most probable token.
    pub min_p: Option<f32>,
    /// The penalty on tokens that occur in the prompt or in the response.
    pub repetition_penalty: Option<f32>,
    /// The penalty on tokens that occur in the response, for each occurrence.
    pub frequency_penalty: Option<f32>,
    /// The penalty on tokens that occur in the response, regardless of how often.
    pub presence_penalty: Option<f32>,
    /// The values to add to the logits, by token ID.
    pub logit_bias: Option<Map<String, Value>>,
    /// The required format of the response.
    pub response_format: Option<Map<String, Value>>,
    /// The constraint on the output, in the format of vLLM.
    pub structured_outputs: Option<Map<String, Value>>,
    /// A JSON schema for the output (an older parameter of vLLM).
    pub guided_json: Option<Value>,
    /// A regular expression for the output (an older parameter of vLLM).
    pub guided_regex: Option<Value>,
    /// The list of allowed outputs (an older parameter of vLLM).
    pub guided_choice: Option<Value>,
    /// A grammar for the output (an older parameter of vLLM).
    pub guided_grammar: Option<Value>,
    /// Whether the output must be a JSON object (an older parameter of vLLM).
    pub guided_json_object: Option<Value>,
    /// A structural tag for the output.
    pub structural_tag: Option<Value>,
    /// The strings that must not be generated.
    pub bad_words: Option<Vec<String>>,
    /// The only tokens that may be generated.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// The number of tokens to retain at the end of the prompt; -1 retains as many as leave room for the response.
    pub truncate_prompt_tokens: Option<i64>,
    /// Whether to report log probabilities of the prompt; the value is the number of most probable tokens to include at
    /// each position.
    pub prompt_logprobs: Option<u32>,
    /// Whether to convert the output tokens to text.
    pub detokenize: Option<bool>,
    /// Whether log probabilities identify tokens by their IDs instead of their texts.
    pub return_tokens_as_token_ids: Option<bool>,
    /// Whether to report the token IDs of the prompt and the output.
    pub return_token_ids: Option<bool>,
    /// Whether to add the special tokens that the model expects around the prompt.
    pub add_special_tokens: Option<bool>,
    /// Restricts prefix cache hits to requests with the same salt.
    pub cache_salt: Option<String>,
    /// The maximum number of draft tokens to propose at a time.
    pub num_assistant_tokens: Option<u32>,
    /// The length, in tokens, of the longest n-gram that prompt lookup searches for. Setting it enables prompt lookup.
    pub max_ngram_size: Option<u32>,
    /// The expected output, from which draft tokens are proposed.
    pub prediction: Option<Prediction>,
    /// The probability below which the draft model stops proposing.
    pub assistant_confidence_threshold: Option<f32>,
    /// Whether to use beam search.
    pub use_beam_search: Option<bool>,
    /// The score of a beam is divided by the length of its sequence to the power of this value.
    pub length_penalty: Option<f32>,
    /// The condition under which beam search ends: `true`, `false` or `"never"`.
    pub early_stopping: Option<Value>,
    /// The penalty on tokens that an earlier group of beams chose at the same step.
    pub diversity_penalty: Option<f32>,
    /// The number of groups of beams.
    pub num_beam_groups: Option<u32>,
}

/// The expected output of a request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Prediction {
    /// The expected text, as a string or a list of parts.
    pub content: Option<Content>,
}

impl Prediction {
    /// Returns all parts of the expected text, joined.
    pub fn text(&self) -> String {
        match &self.content {
            None => String::new(),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => parts.iter().filter_map(|part| part.text.as_deref()).collect(),
        }
    }
}

/// The options of a streamed response.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct StreamOptions {
    /// Whether an additional last chunk reports the usage.
    pub include_usage: Option<bool>,
    /// Whether every chunk reports the usage up to that point; has no effect without `include_usage`.
    pub continuous_usage_stats: Option<bool>,
}

impl ChatRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// [`RequestError`] if the body is not a JSON object, a field has a wrong type, or a required field is missing.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        Self::read(&parse::object(body)?)
    }

    /// Parses a request from a JSON object.
    ///
    /// # Errors
    /// [`RequestError`] if a field has a wrong type or a required field is missing.
    pub fn read(object: &Value) -> Result<Self, RequestError> {
        Ok(Self { generation: parse::fields(object)?, ..parse::fields(object)? })
    }
}

impl CompletionRequest {
    /// Parses a request body.
    ///
    /// # Errors
    /// [`RequestError`] if the body is not a JSON object, a field has a wrong type, or a required field is missing.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        Self::read(&parse::object(body)?)
    }

    /// Parses a request from a JSON object.
    ///
    /// # Errors
    /// [`RequestError`] if a field has a wrong type or a required field is missing.
    pub fn read(object: &Value) -> Result<Self, RequestError> {
        Ok(Self { generation: parse::fields(object)?, ..parse::fields(object)? })
    }
}

/// A message of the conversation. It implements [`Serialize`] for estimates of its number of tokens.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Message {
    /// The role of the author.
    pub role: String,
    /// The content of the message.
    #[serde(default)]
    pub content: Option<Content>,
    /// The refusal of the assistant, which is used as the content if `content` is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// The name of the author, which distinguishes authors with the same role.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The reasoning of the assistant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same as `reasoning_content`, under the name that newer clients use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The tool calls of the assistant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<Map<String, Value>>>,
    /// The deprecated form of a single tool call: the object that a tool call contains as `function`.
    #[serde(default, skip_serializing)]
    pub function_call: Option<Map<String, Value>>,
    /// The identifier of the tool call whose result this message contains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Content {
    /// The content is a string.
    Text(String),
    /// The content is a list of parts, such as text and images.
    Parts(Vec<ContentPart>),
}

/// A part of the content of a message. The server decides which types it supports.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct ContentPart {
    /// The type of the part, such as `text` or `image_url`.
    pub r#type: String,
    /// The text of a part of type `text`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The text of a part of type `refusal`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// The image of a part of type `image_url`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_url: Option<ImageUrl>,
}

/// The location of an image. A request may also contain the URL as a string instead of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageUrl {
    /// The URL, which may contain the image itself (`data:`).
    pub url: String,
    /// The level of detail: `low`, `high` or `auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The parameter of the request that contains the image, if the index of the message does not identify it.
    #[serde(skip)]
    pub param: Option<String>,
}

impl<'de> Deserialize<'de> for ImageUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ImageUrlVisitor)
    }
}

struct ImageUrlVisitor;

impl<'de> Visitor<'de> for ImageUrlVisitor {
    type Value = ImageUrl;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a string or an object with a url")
    }

    fn visit_str<E: de::Error>(self, url: &str) -> Result<ImageUrl, E> {
        Ok(ImageUrl { url: url.to_owned(), detail: None, param: None })
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<ImageUrl, A::Error> {
        #[derive(Deserialize)]
        struct Members {
            url: String,
            #[serde(default)]
            detail: Option<String>,
        }
        let Members { url, detail } = Members::deserialize(de::value::MapAccessDeserializer::new(members))?;
        Ok(ImageUrl { url, detail, param: None })
    }
}

/// The prompts of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Prompts as strings. A single string needs no array.
    Texts(Vec<String>),
    /// Prompts as token IDs. A single list of token IDs needs no outer array.
    Tokens(Vec<Vec<u32>>),
}

/// The strings that end a choice. A single string needs no array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop(pub Vec<String>);

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match text_or_list(deserializer, "a string or an array of content parts")? {
            TextOrList::Text(text) => Self::Text(text),
            TextOrList::List(parts) => Self::Parts(parts),
        })
    }
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match text_or_list(deserializer, "a string or an array of strings")? {
            TextOrList::Text(text) => Self(vec![text]),
            TextOrList::List(texts) => Self(texts),
        })
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptVisitor;
        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = Prompt;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(PROMPT_FORMS)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Texts(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Prompt, A::Error> {
                let Some(first) = elements.next_element::<PromptElement>()? else {
                    return Ok(Prompt::Texts(Vec::new()));
                };
                // All elements must have the same type as the first.
                match first {
                    PromptElement::Text(text) => Ok(Prompt::Texts(list(text, elements)?)),
                    PromptElement::Token(token) => Ok(Prompt::Tokens(vec![list(token, elements)?])),
                    PromptElement::Tokens(tokens) => Ok(Prompt::Tokens(list(tokens, elements)?)),
                }
            }
        }
        deserializer.deserialize_any(PromptVisitor)
    }
}

/// Returns `first` and the other elements of a list.
fn list<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(first: T, mut others: A) -> Result<Vec<T>, A::Error> {
    let mut all = vec![first];
    while let Some(element) = others.next_element()? {
        all.push(element);
    }
    Ok(all)
}

const PROMPT_FORMS: &str =
    "a string, an array of strings, an array of tokens or an array of arrays of tokens";

enum PromptElement {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for PromptElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptElementVisitor;
        impl<'de> Visitor<'de> for PromptElementVisitor {
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
            fn visit_seq<A: SeqAccess<'de>>(self, tokens: A) -> Result<PromptElement, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(tokens)).map(PromptElement::Tokens)
            }
        }
        deserializer.deserialize_any(PromptElementVisitor)
    }
}
