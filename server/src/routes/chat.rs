//! Serves `/chat/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ChatRequest,
    ChoiceFinishReason, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta, Usage,
};

use super::generate::{Head, TextEndpoint, WholeCall, WholeChoice, generate};
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

    fn start(head: &Head, choice: u32, events: &mut Events) {
        let delta = ChatDelta {
            role: Some("assistant"),
            content: Some(String::new()),
            refusal: Some(None),
            ..ChatDelta::default()
        };
        events.push(&ChatChunk {
            prompt_token_ids: probabilities::prompt_token_ids(head, choice),
            ..chunk(head, choice, delta, Vec::new())
        });
    }

    fn delta(head: &Head, delta: ChoiceDelta, events: &mut Events) {
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
                (call_delta(head, call, Some(id), function), Vec::new())
            }
            ChoiceDelta::CallArguments { call, text, tokens, .. } => {
                let function = FunctionDelta { name: None, arguments: text };
                (call_delta(head, call, None, function), tokens)
            }
            // The client learns from the next chunk that the call is complete.
            ChoiceDelta::CallEnd { .. } => return,
            ChoiceDelta::End { reason, tokens, .. } => {
                let (delta, finish_reason) = (ChatDelta::default(), Some(finish_reason(head, reason)));
                let token_ids = probabilities::token_ids(head, &[], &tokens).filter(|ids| !ids.is_empty());
                let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason, token_ids };
                events.push(&ChatChunk { choices: vec![choice], ..empty_chunk(head) });
                return;
            }
        };
        events.push(&chunk(head, index, delta, tokens));
    }

    fn usage(head: &Head, usage: Usage, events: &mut Events) {
        events.push(&ChatChunk { choices: Vec::new(), usage: Some(Some(usage)), ..empty_chunk(head) });
    }

    fn whole(head: Head, choices: Vec<WholeChoice>, usage: Usage) -> ChatCompletion {
        let prompt_token_ids = probabilities::prompt_token_ids(&head, 0);
        let prompt_logprobs = probabilities::prompt_logprobs(&head, 0);
        let choices = (0..)
            .zip(choices)
            .map(|(index, mut choice)| ChatChoice {
                index,
                token_ids: probabilities::token_ids(&head, &choice.tokens, &choice.end_tokens),
                logprobs: probabilities::chat(&head, std::mem::take(&mut choice.tokens)),
                finish_reason: finish_reason(&head, choice.reason.unwrap_or(ChoiceFinishReason::Stop)),
                message: message(choice, head.reply.calls_functions),
            })
            .collect();
        ChatCompletion {
            id: head.id,
            object: "chat.completion",
            created: head.created,
            model: head.reply.model,
            choices,
            usage,
            system_fingerprint: head.fingerprint,
            prompt_token_ids,
            prompt_logprobs,
        }
    }
}

/// Returns the reason in the form that the request uses: `function_call` if the request has functions instead of tools.
fn finish_reason(head: &Head, reason: ChoiceFinishReason) -> ChoiceFinishReason {
    match reason {
        ChoiceFinishReason::ToolCalls if head.reply.calls_functions => ChoiceFinishReason::FunctionCall,
        reason => reason,
    }
}

/// Returns a part of the call with this number, in the form that the request uses. The first part has an ID.
fn call_delta(head: &Head, index: u32, id: Option<String>, function: FunctionDelta) -> ChatDelta {
    if head.reply.calls_functions {
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
        // As in OpenAI's API, calls alone have no content, and an empty answer has empty content.
        content: (!is_call || !text.is_empty()).then_some(text),
        refusal: None,
        reasoning_content: reasoning.clone(),
        reasoning,
        tool_calls: (!calls.is_empty()).then(|| calls.into_iter().map(call).collect()),
        function_call,
    }
}

fn empty_chunk(head: &Head) -> ChatChunk {
    ChatChunk {
        id: head.id.clone(),
        object: "chat.completion.chunk",
        created: head.created,
        model: head.reply.model.clone(),
        choices: Vec::new(),
        usage: head.chunk_usage(),
        system_fingerprint: head.fingerprint.clone(),
        prompt_token_ids: None,
    }
}

/// Returns a chunk with a delta of a choice and its tokens.
fn chunk(head: &Head, index: u32, delta: ChatDelta, tokens: Vec<TokenText>) -> ChatChunk {
    let token_ids = probabilities::token_ids(head, &tokens, &[]).filter(|ids| !ids.is_empty());
    let logprobs = probabilities::chat(head, tokens);
    let choice = ChatChunkChoice { index, delta, logprobs, finish_reason: None, token_ids };
    ChatChunk { choices: vec![choice], ..empty_chunk(head) }
}
