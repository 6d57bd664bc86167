//! `/chat/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ChatRequest,
    FinishReason, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta, Usage,
};

use super::generate::{CallPiece, Head, Shape, WholeCall, WholeChoice, generate};
use super::probabilities;
use crate::app::App;
use crate::error::Error;
use crate::prepare::{self, Prepared, Target};
use crate::respond::TokenText;
use crate::sse::Events;

pub(super) async fn chat(State(app): State<App>, request: Request) -> Response {
    generate::<Chat>(app, request).await
}

/// The shape of the chat endpoint.
enum Chat {}

impl Shape for Chat {
    const ENDPOINT: &'static str = "chat_completions";
    const ID: &'static str = "chatcmpl";
    type Whole = ChatCompletion;

    fn prepare(body: &[u8], target: Target<'_>) -> Result<Prepared, Error> {
        prepare::chat(ChatRequest::read(&prepare::checked(prepare::Endpoint::Chat, body)?)?, target)
    }

    fn begin(head: &Head, index: u32, events: &mut Events) {
        let delta = ChatDelta {
            role: Some("assistant"),
            content: Some(String::new()),
            refusal: Some(None),
            ..ChatDelta::default()
        };
        events.push(&ChatChunk {
            prompt_token_ids: probabilities::prompt_token_ids(head, index),
            ..part(head, index, delta, Vec::new())
        });
    }

    fn text(head: &Head, index: u32, (text, tokens): (String, Vec<TokenText>), events: &mut Events) {
        let content = (!text.is_empty()).then_some(text);
        let delta = ChatDelta { content, ..ChatDelta::default() };
        events.push(&part(head, index, delta, tokens));
    }

    fn reasoning(head: &Head, index: u32, (text, tokens): (String, Vec<TokenText>), events: &mut Events) {
        let both = (!text.is_empty()).then_some(text);
        let delta = ChatDelta { reasoning_content: both.clone(), reasoning: both, ..ChatDelta::default() };
        events.push(&part(head, index, delta, tokens));
    }

    fn call(head: &Head, index: u32, piece: CallPiece, events: &mut Events) {
        if head.reply.calls_functions {
            let (delta, tokens) = function(piece);
            let delta = ChatDelta { function_call: Some(delta), ..ChatDelta::default() };
            events.push(&part(head, index, delta, tokens));
            return;
        }
        let (delta, tokens) = match piece {
            CallPiece::Begin { call, id, name } => {
                let function = FunctionDelta { name: Some(name), arguments: String::new() };
                (ToolCallDelta { index: call, id: Some(id), r#type: Some("function"), function }, Vec::new())
            }
            CallPiece::Arguments { call, text, tokens } => {
                let function = FunctionDelta { name: None, arguments: text };
                (ToolCallDelta { index: call, id: None, r#type: None, function }, tokens)
            }
        };
        let delta = ChatDelta { tool_calls: Some(vec![delta]), ..ChatDelta::default() };
        events.push(&part(head, index, delta, tokens));
    }

    fn end(head: &Head, index: u32, reason: FinishReason, events: &mut Events) {
        let delta = ChatDelta::default();
        let finish_reason = Some(told(head, reason));
        let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason, token_ids: None };
        events.push(&ChatChunk { choices: vec![choice], ..blank(head) });
    }

    fn usage(head: &Head, usage: Usage, events: &mut Events) {
        events.push(&ChatChunk { choices: Vec::new(), usage: Some(Some(usage)), ..blank(head) });
    }

    fn whole(head: Head, choices: Vec<WholeChoice>, usage: Usage) -> ChatCompletion {
        let prompt_token_ids = probabilities::prompt_token_ids(&head, 0);
        let prompt_logprobs = probabilities::prompt_logprobs(&head, 0);
        let choices = (0..)
            .zip(choices)
            .map(|(index, mut choice)| ChatChoice {
                index,
                token_ids: probabilities::token_ids(&head, &choice.tokens),
                logprobs: probabilities::chat(&head, std::mem::take(&mut choice.tokens)),
                finish_reason: told(&head, choice.reason.unwrap_or(FinishReason::Stop)),
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

/// Why a choice ended, as the request has it.
fn told(head: &Head, reason: FinishReason) -> FinishReason {
    match reason {
        FinishReason::ToolCalls if head.reply.calls_functions => FinishReason::FunctionCall,
        reason => reason,
    }
}

/// A piece of the only call, and the tokens that it is of.
fn function(piece: CallPiece) -> (FunctionDelta, Vec<TokenText>) {
    match piece {
        CallPiece::Begin { name, .. } => {
            (FunctionDelta { name: Some(name), arguments: String::new() }, Vec::new())
        }
        CallPiece::Arguments { text, tokens, .. } => (FunctionDelta { name: None, arguments: text }, tokens),
    }
}

fn message(choice: WholeChoice, calls_functions: bool) -> ChatMessage {
    let WholeChoice { text, reasoning, mut calls, tokens: _, reason: _ } = choice;
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
        // As with OpenAI: calls alone have no content, and an empty answer has an empty one.
        content: (!is_call || !text.is_empty()).then_some(text),
        refusal: None,
        reasoning_content: reasoning.clone(),
        reasoning,
        tool_calls: (!calls.is_empty()).then(|| calls.into_iter().map(call).collect()),
        function_call,
    }
}

fn blank(head: &Head) -> ChatChunk {
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

/// A chunk with what is new in a choice, and the tokens that it is of.
fn part(head: &Head, index: u32, delta: ChatDelta, tokens: Vec<TokenText>) -> ChatChunk {
    let token_ids = probabilities::token_ids(head, &tokens).filter(|tokens| !tokens.is_empty());
    let logprobs = probabilities::chat(head, tokens);
    let choice = ChatChunkChoice { index, delta, logprobs, finish_reason: None, token_ids };
    ChatChunk { choices: vec![choice], ..blank(head) }
}
