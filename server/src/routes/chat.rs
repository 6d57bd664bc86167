//! Serves `/chat/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ChatRequest,
    ChoiceFinishReason, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta, Usage,
};

use super::generate::{AnswerContext, TextEndpoint, WholeCall, WholeChoice, generate};
use super::probabilities;
use crate::app::App;
use crate::error::Error;
use crate::prepare::{self, PreparedRequest, Target};
use crate::respond::{ChoiceDelta, TokenText};
use crate::sse::Events;

pub(super) async fn chat(State(app): State<App>, request: Request) -> Response {
    generate::<Chat>(app, request).await
}

/// The chat endpoint.
enum Chat {}

impl TextEndpoint for Chat {
    const NAME: &'static str = "chat_completions";
    const ID_PREFIX: &'static str = "chatcmpl";
    type Whole = ChatCompletion;

    fn prepare(body: &[u8], target: Target<'_>) -> Result<PreparedRequest, Error> {
        prepare::chat(ChatRequest::read(&prepare::checked(prepare::Endpoint::Chat, body)?)?, target)
    }

    fn start(context: &AnswerContext, choice: u32, events: &mut Events) {
        let delta = ChatDelta {
            role: Some("assistant"),
            content: Some(String::new()),
            refusal: Some(None),
            ..ChatDelta::default()
        };
        events.push(&ChatChunk {
            prompt_token_ids: probabilities::prompt_token_ids(context, choice),
            ..chunk(context, choice, delta, Vec::new())
        });
    }

    fn delta(context: &AnswerContext, delta: ChoiceDelta, events: &mut Events) {
        let index = delta.choice();
        let (delta, tokens) = match delta {
            ChoiceDelta::Text { text, tokens, .. } => {
                let content = (!text.is_empty()).then_some(text);
                (ChatDelta { content, ..ChatDelta::default() }, tokens)
            }
            ChoiceDelta::Reasoning { text, tokens, .. } => {
                let text = (!text.is_empty()).then_some(text);
                let delta =
                    ChatDelta { reasoning_content: text.clone(), reasoning: text, ..ChatDelta::default() };
                (delta, tokens)
            }
            ChoiceDelta::CallBegin { call, id, name, .. } => {
                let function = FunctionDelta { name: Some(name), arguments: String::new() };
                (call_delta(context, call, Some(id), function), Vec::new())
            }
            ChoiceDelta::CallArguments { call, text, tokens, .. } => {
                let function = FunctionDelta { name: None, arguments: text };
                (call_delta(context, call, None, function), tokens)
            }
            // The client learns from the next chunk that the call is complete.
            ChoiceDelta::CallEnd { .. } => return,
            ChoiceDelta::End { reason, tokens, .. } => {
                let (delta, finish_reason) = (ChatDelta::default(), Some(finish_reason(context, reason)));
                let token_ids = probabilities::token_ids(context, &[], &tokens).filter(|ids| !ids.is_empty());
                let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason, token_ids };
                events.push(&ChatChunk { choices: vec![choice], ..empty_chunk(context) });
                return;
            }
        };
        events.push(&chunk(context, index, delta, tokens));
    }

    fn usage(context: &AnswerContext, usage: Usage, events: &mut Events) {
        events.push(&ChatChunk { choices: Vec::new(), usage: Some(Some(usage)), ..empty_chunk(context) });
    }

    fn whole(context: AnswerContext, choices: Vec<WholeChoice>, usage: Usage) -> ChatCompletion {
        let prompt_token_ids = probabilities::prompt_token_ids(&context, 0);
        let prompt_logprobs = probabilities::prompt_logprobs(&context, 0);
        let choices = (0..)
            .zip(choices)
            .map(|(index, mut choice)| ChatChoice {
                index,
                token_ids: probabilities::token_ids(&context, &choice.tokens, &choice.end_tokens),
                logprobs: probabilities::chat(&context, std::mem::take(&mut choice.tokens)),
                finish_reason: finish_reason(&context, choice.reason.unwrap_or(ChoiceFinishReason::Stop)),
                message: message(choice, context.answer_options.calls_functions),
            })
            .collect();
        ChatCompletion {
            id: context.id,
            object: "chat.completion",
            created: context.created,
            model: context.answer_options.model,
            choices,
            usage,
            system_fingerprint: context.fingerprint,
            prompt_token_ids,
            prompt_logprobs,
        }
    }
}

/// Returns the reason in the form that the request uses: `function_call` instead of `tool_calls` if the request has
/// functions instead of tools.
fn finish_reason(context: &AnswerContext, reason: ChoiceFinishReason) -> ChoiceFinishReason {
    match reason {
        ChoiceFinishReason::ToolCalls if context.answer_options.calls_functions => {
            ChoiceFinishReason::FunctionCall
        }
        reason => reason,
    }
}

/// Returns a delta with a part of a call: as `function_call` if the request has functions, and otherwise as the item of
/// `tool_calls` with this index. Only the first part has an ID.
fn call_delta(context: &AnswerContext, index: u32, id: Option<String>, function: FunctionDelta) -> ChatDelta {
    if context.answer_options.calls_functions {
        return ChatDelta { function_call: Some(function), ..ChatDelta::default() };
    }
    let r#type = id.as_ref().map(|_| "function");
    ChatDelta {
        tool_calls: Some(vec![ToolCallDelta { index, id, r#type, function }]),
        ..ChatDelta::default()
    }
}

fn message(choice: WholeChoice, calls_functions: bool) -> ChatMessage {
    let WholeChoice { text, reasoning, mut calls, tokens: _, end_tokens: _, reason: _ } = choice;
    let is_call = !calls.is_empty();
    let function = if calls_functions { calls.drain(..).next() } else { None };
    let function_call = function.map(|call| FunctionCall { name: call.name, arguments: call.arguments });
    let reasoning = (!reasoning.is_empty()).then_some(reasoning);
    let call = |call: WholeCall| ToolCall {
        id: call.id,
        r#type: "function",
        function: FunctionCall { name: call.name, arguments: call.arguments },
    };
    ChatMessage {
        role: "assistant",
        // As in OpenAI's API, an answer that consists only of calls has no content, and an empty answer has empty
        // content.
        content: (!is_call || !text.is_empty()).then_some(text),
        refusal: None,
        reasoning_content: reasoning.clone(),
        reasoning,
        tool_calls: (!calls.is_empty()).then(|| calls.into_iter().map(call).collect()),
        function_call,
    }
}

fn empty_chunk(context: &AnswerContext) -> ChatChunk {
    ChatChunk {
        id: context.id.clone(),
        object: "chat.completion.chunk",
        created: context.created,
        model: context.answer_options.model.clone(),
        choices: Vec::new(),
        usage: context.chunk_usage(),
        system_fingerprint: context.fingerprint.clone(),
        prompt_token_ids: None,
    }
}

/// Returns a chunk with a delta of a choice and the tokens of the delta.
fn chunk(context: &AnswerContext, index: u32, delta: ChatDelta, tokens: Vec<TokenText>) -> ChatChunk {
    let token_ids = probabilities::token_ids(context, &tokens, &[]).filter(|ids| !ids.is_empty());
    let logprobs = probabilities::chat(context, tokens);
    let choice = ChatChunkChoice { index, delta, logprobs, finish_reason: None, token_ids };
    ChatChunk { choices: vec![choice], ..empty_chunk(context) }
}
