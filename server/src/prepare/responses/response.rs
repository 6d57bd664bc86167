//! A new response, which has no output yet and repeats the parameters of the request.

use serde_json::{Value, json};
use server_openai::responses::{
    ConversationName, Object, ReasoningParameter, Request, Response, Status, TextParameter,
};

use super::references::conversation_name;
use crate::prepare::prepared::PreparedRequest;
use crate::store::Id;

/// Returns a response without output that repeats most parameters of the request. The caller sets the tools, the tool
/// choice and the text format.
pub(super) fn response(request: &Request, id: Id, prepared: &PreparedRequest) -> Response {
    let is_background = request.background.unwrap_or(false);
    let sampling = prepared.prompts.first().map(|prompt| &prompt.sampling);
    let conversation = conversation_name(request).ok().flatten();
    let reasoning = request.reasoning.clone().unwrap_or_default();
    let summary = reasoning.summary.or(reasoning.generate_summary);
    Response {
        id: id.to_string(),
        object: Object::Response,
        created_at: 0,
        status: if is_background { Status::Queued } else { Status::InProgress },
        background: is_background,
        completed_at: None,
        error: None,
        incomplete_details: None,
        instructions: request.instructions.clone(),
        max_output_tokens: request.max_output_tokens,
        max_tool_calls: request.max_tool_calls,
        model: prepared.answer_options.model.clone(),
        output: Vec::new(),
        parallel_tool_calls: true,
        previous_response_id: request.previous_response_id.clone(),
        conversation: conversation.map(|id| ConversationName { id }),
        prompt_cache_key: request.prompt_cache_key.clone(),
        reasoning: ReasoningParameter { effort: reasoning.effort, summary, generate_summary: None },
        safety_identifier: request.safety_identifier.clone(),
        service_tier: "default".to_owned(),
        store: request.store.unwrap_or(true),
        temperature: sampling.map_or(1.0, |sampling| sampling.temperature),
        text: TextParameter::default(),
        tool_choice: Value::Null,
        tools: Vec::new(),
        top_logprobs: request.top_logprobs.unwrap_or(0),
        top_p: sampling.map_or(1.0, |sampling| sampling.top_p),
        truncation: request.truncation.clone().unwrap_or_else(|| "disabled".to_owned()),
        usage: None,
        user: request.user.clone(),
        metadata: request.metadata.clone().unwrap_or_default(),
        warnings: Vec::new(),
    }
}

/// Returns the requested verbosity, otherwise the default.
pub(super) fn verbosity(request: &Request) -> Option<String> {
    let requested = request.text.as_ref().and_then(|text| text.verbosity.clone());
    Some(requested.unwrap_or_else(|| "medium".to_owned()))
}

/// Returns the tool choice in the form of this endpoint, in which the name of a function is not in a nested object.
pub(super) fn choice(request: &Request) -> Value {
    match &request.tool_choice {
        None => json!("auto"),
        Some(Value::Object(choice)) => match choice.get("function").and_then(|function| function.get("name"))
        {
            Some(name) => json!({"type": "function", "name": name}),
            None => Value::Object(choice.clone()),
        },
        Some(choice) => choice.clone(),
    }
}
