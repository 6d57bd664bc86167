//! `/chat/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatMessage,
    ChatRequest, ChatTokenLogprob, FinishReason, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta,
    TopLogprob, Usage,
};
use server_text::Tokenizer;

use super::generate::{CallPiece, Head, Shape, WholeCall, WholeChoice, generate};
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
        prepare::chat(&ChatRequest::parse(body)?, target)
    }

    fn begin(head: &Head, index: u32, events: &mut Events) {
        let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()), refusal: Some(None), ..ChatDelta::default() };
        events.push(&chunk(head, ChatChunkChoice { index, delta, logprobs: None, finish_reason: None }));
    }

    fn text(head: &Head, index: u32, (text, tokens): (String, Vec<TokenText>), events: &mut Events) {
        let delta = ChatDelta { content: Some(text), ..ChatDelta::default() };
        let logprobs = logprobs(head, tokens);
        events.push(&chunk(head, ChatChunkChoice { index, delta, logprobs, finish_reason: None }));
    }

    fn reasoning(head: &Head, index: u32, (text, tokens): (String, Vec<TokenText>), events: &mut Events) {
        let both = (!text.is_empty()).then_some(text);
        let delta = ChatDelta { reasoning_content: both.clone(), reasoning: both, ..ChatDelta::default() };
        let logprobs = logprobs(head, tokens);
        events.push(&chunk(head, ChatChunkChoice { index, delta, logprobs, finish_reason: None }));
    }

    fn call(head: &Head, index: u32, piece: CallPiece, events: &mut Events) {
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
        let logprobs = logprobs(head, tokens);
        events.push(&chunk(head, ChatChunkChoice { index, delta, logprobs, finish_reason: None }));
    }

    fn end(head: &Head, index: u32, reason: FinishReason, events: &mut Events) {
        let delta = ChatDelta::default();
        let finish_reason = Some(reason);
        events.push(&chunk(head, ChatChunkChoice { index, delta, logprobs: None, finish_reason }));
    }

    fn usage(head: &Head, usage: Usage, events: &mut Events) {
        events.push(&ChatChunk { choices: Vec::new(), usage: Some(Some(usage)), ..blank(head) });
    }

    fn whole(head: Head, choices: Vec<WholeChoice>, usage: Usage) -> ChatCompletion {
        let choices = (0..)
            .zip(choices)
            .map(|(index, mut choice)| ChatChoice {
                index,
                logprobs: logprobs(&head, std::mem::take(&mut choice.tokens)),
                finish_reason: choice.reason.unwrap_or(FinishReason::Stop),
                message: message(choice),
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
        }
    }
}

fn message(choice: WholeChoice) -> ChatMessage {
    let WholeChoice { text, reasoning, calls, tokens: _, reason: _ } = choice;
    let reasoning = (!reasoning.is_empty()).then_some(reasoning);
    let call = |call: WholeCall| ToolCall {
        id: call.id,
        r#type: "function",
        function: FunctionCall { name: call.name, arguments: call.arguments },
    };
    ChatMessage {
        role: "assistant",
        // As with OpenAI: calls alone have no content, and an empty answer has an empty one.
        content: (calls.is_empty() || !text.is_empty()).then_some(text),
        refusal: None,
        reasoning_content: reasoning.clone(),
        reasoning,
        tool_calls: (!calls.is_empty()).then(|| calls.into_iter().map(call).collect()),
    }
}

fn blank(head: &Head) -> ChatChunk {
    ChatChunk {
        id: head.id.clone(),
        object: "chat.completion.chunk",
        created: head.created,
        model: head.reply.model.clone(),
        choices: Vec::new(),
        usage: head.no_usage(),
        system_fingerprint: head.fingerprint.clone(),
    }
}

fn chunk(head: &Head, choice: ChatChunkChoice) -> ChatChunk {
    ChatChunk { choices: vec![choice], ..blank(head) }
}

fn logprobs(head: &Head, tokens: Vec<TokenText>) -> Option<ChatLogprobs> {
    head.reply.logprobs?;
    let tokenizer: &Tokenizer = &head.tokenizer;
    let content = tokens
        .into_iter()
        .map(|TokenText { token, logprob, top, .. }| ChatTokenLogprob {
            token: tokenizer.token_text(token),
            logprob,
            bytes: tokenizer.token_bytes(token).to_vec(),
            top_logprobs: top
                .into_iter()
                .map(|top| TopLogprob {
                    token: tokenizer.token_text(top.token),
                    logprob: top.logprob,
                    bytes: tokenizer.token_bytes(top.token).to_vec(),
                })
                .collect(),
        })
        .collect();
    Some(ChatLogprobs { content, refusal: None })
}
