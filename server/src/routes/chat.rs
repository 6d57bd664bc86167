//! `/chat/completions`.

use axum::extract::{Request, State};
use axum::response::Response;
use server_openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatMessage,
    ChatRequest, ChatTokenLogprob, FinishReason, TopLogprob, Usage,
};
use server_text::Tokenizer;

use super::generate::{Head, Shape, WholeChoice, generate};
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
        let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()), refusal: Some(None) };
        events.push(&chunk(head, ChatChunkChoice { index, delta, logprobs: None, finish_reason: None }));
    }

    fn text(head: &Head, index: u32, (text, tokens): (String, Vec<TokenText>), events: &mut Events) {
        let delta = ChatDelta { content: Some(text), ..ChatDelta::default() };
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
            .map(|(index, choice)| ChatChoice {
                index,
                logprobs: logprobs(&head, choice.tokens),
                message: ChatMessage { role: "assistant", content: Some(choice.text), refusal: None },
                finish_reason: choice.reason.unwrap_or(FinishReason::Stop),
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
