//! Submits prepared requests to the engine.

use std::time::Instant;

use axum::response::Response;

use crate::app::{App, ServedModel};
use crate::error::Error;
use crate::limits::AdmittedRequest;
use crate::prepare::TextOptions;
use crate::request_record::RequestRecord;
use crate::respond::{Answer, SubmittedPrompt};

/// A prepared request.
pub(super) struct Submission<'a> {
    /// The name of the endpoint in metrics and logs.
    pub(super) endpoint: &'static str,
    /// The ID of the answer.
    pub(super) id: String,
    pub(super) arrived: Instant,
    pub(super) admitted: AdmittedRequest,
    pub(super) prompts: Vec<server_engine::Request>,
    pub(super) text: &'a TextOptions,
    /// Number of returned choices for each prompt.
    pub(super) choices: u32,
}

/// Submits all prompts of a request.
///
/// # Errors
/// The engine rejected a prompt. In this case, the other prompts are aborted.
pub(super) fn submit(app: &App, served: &ServedModel, request: Submission<'_>) -> Result<Answer, Error> {
    let Submission { endpoint, id, arrived, admitted, prompts, text, choices } = request;
    let adapter = prompts.first().and_then(|prompt| served.model.adapter(prompt.adapter));
    let submit = |prompt: server_engine::Request| {
        let sequences_param = if prompt.num_sequences > choices { "best_of" } else { "n" };
        let (choices, prompt_tokens) = (prompt.num_results(), prompt.prompt.len());
        let images = prompt.images.clone();
        let image_tokens = images.as_ref().map_or(0, |images| images.prompt.num_tokens());
        let is_scored = prompt.sampling.prompt_logprobs.is_some();
        match served.engine.submit(prompt) {
            Ok(stream) => {
                if let Some(images) = images {
                    app.metrics().count_images(&images);
                }
                Ok(SubmittedPrompt { stream, choices, prompt_tokens, image_tokens, is_scored })
            }
            Err(error) => {
                let retry_after = app.admission().retry_after(Instant::now());
                Err(Error::from_submit(error, retry_after, sequences_param))
            }
        }
    };
    let submitted = prompts.into_iter().map(submit).collect::<Result<_, _>>()?;
    if let Some(adapter) = adapter {
        app.metrics().count_adapter(&adapter.name);
    }
    let record = RequestRecord::new(app.metrics().clone(), endpoint, id, arrived, admitted);
    Ok(Answer::new(submitted, choices, &served.model.text.tokenizer, text, record))
}

/// Adds the header that OpenAI's clients show as the ID of the request.
pub(super) fn with_request_id(mut response: Response, id: &str) -> Response {
    if let Ok(id) = id.parse() {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}
