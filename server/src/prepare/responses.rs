//! Prepares requests to the responses endpoint: items become a conversation, and the fields of the response that repeat
//! the request are set. The stored objects that a request refers to have been looked up earlier ([`Context`]).

mod format;
mod items;
mod messages;
mod references;
mod response;
mod tools;
mod truncation;

use std::sync::Arc;

use serde_json::{Map, Value};
use server_openai::Message;
use server_openai::responses::{Item, Request, Response, TextOrList, TextParameter};

pub(crate) use super::tools::ToolKind;
pub(crate) use items::read as read_items;
pub(crate) use references::{
    Context, ItemReference, References, item_references, references, with_referenced,
};
pub(crate) use tools::{CallName, CallNames, custom_input};

use super::conversation::{Conversation, Effort, Reasoning};
use super::parameters;
use super::prepared::{PreparedRequest, Target};
use super::resolved::UndecodedRequest;
use super::tools::{Tool, ToolChoice};
use crate::error::Error;
use crate::store::{Id, ItemIds, Kind, check_ids};
use format::{chat_format, format, renamed};
use response::{choice, response, verbosity};
use tools::RequestTools;
use truncation::prepare_fitting;

/// A prepared request and the beginning of its response.
#[derive(Debug)]
pub(crate) struct PreparedResponse {
    pub(crate) prepared: PreparedRequest,
    /// The response without output. The caller sets the time.
    pub(crate) response: Response,
    /// The IDs for the items of the output.
    pub(crate) ids: ItemIds,
    /// The items that the request adds to the conversation.
    pub(crate) input: Vec<Arc<Item>>,
    /// The names under which calls are reported.
    pub(crate) call_names: CallNames,
}

/// A prepared request whose images have not been decoded, and the beginning of its response.
struct UndecodedResponse {
    undecoded: UndecodedRequest,
    response: Response,
    ids: ItemIds,
    input: Vec<Arc<Item>>,
    call_names: CallNames,
}

/// Prepares a request whose response gets the ID `id`.
///
/// # Errors
/// The request is invalid.
pub(crate) fn responses(
    request: &Request,
    context: Context,
    id: Id,
    target: Target<'_>,
) -> Result<PreparedResponse, Error> {
    let UndecodedResponse { undecoded, response, ids, input, call_names } =
        prepare_undecoded(request, context, id, target)?;
    let prepared = undecoded.decode_images(target)?;
    Ok(PreparedResponse { prepared, response, ids, input, call_names })
}

/// Counts the tokens of the prompt. The images are not decoded, because their headers suffice.
///
/// # Errors
/// The request is invalid.
pub(crate) fn count_input_tokens(
    request: &Request,
    context: Context,
    id: Id,
    target: Target<'_>,
) -> Result<u64, Error> {
    let UndecodedResponse { undecoded, .. } = prepare_undecoded(request, context, id, target)?;
    Ok(undecoded.num_prompt_tokens())
}

/// Prepares a request without decoding its images.
///
/// # Errors
/// The request is invalid.
fn prepare_undecoded(
    request: &Request,
    context: Context,
    id: Id,
    target: Target<'_>,
) -> Result<UndecodedResponse, Error> {
    debug_assert_eq!(id.kind(), Kind::Response);
    // Check the model before the parameters whose limits depend on it.
    let model = parameters::model(&request.generation, target.model)?;
    let mut ids = id.items();
    check(request)?;
    let input = input(request, context.items, &mut ids)?;
    let history = context.history.iter().map(|item| item.id());
    check_ids(history, &input).map_err(|error| Error::invalid("input", error))?;
    if input.is_empty() && context.history.is_empty() {
        return Err(Error::missing("input"));
    }
    let messages = messages::messages(request.instructions.as_deref(), &context.history, &input);
    let tools = RequestTools::read(request.tools.clone().unwrap_or_default())?;
    let call_names = CallNames::of(&tools.offered);
    let conversation = conversation(request, messages, tools.offered)?;
    let format = format(request);
    let mut generation = request.generation.clone();
    target.model.api_rules.complete(&mut generation);
    generation.response_format = Some(chat_format(&format));
    // Other endpoints accept these names instead of `max_output_tokens`. This endpoint ignores them.
    (generation.max_tokens, generation.max_completion_tokens) = (None, None);
    // A response object has no fields for the results of these parameters.
    (generation.detokenize, generation.return_token_ids, generation.prompt_logprobs) = (None, None, None);
    let (choice, parallel) = (choice(request), conversation.parallel);
    let undecoded = prepare_fitting(request, &generation, &model, &conversation, target).map_err(renamed)?;
    let response = Response {
        parallel_tool_calls: parallel.unwrap_or(true),
        text: TextParameter { format: Some(format), verbosity: verbosity(request) },
        tools: tools.shown,
        warnings: tools.warnings,
        tool_choice: choice,
        ..response(request, id, undecoded.request())
    };
    Ok(UndecodedResponse { undecoded, response, ids, input, call_names })
}

/// Checks the rules that are not in the table of parameters.
fn check(request: &Request) -> Result<(), Error> {
    if request.background == Some(true) && request.store == Some(false) {
        let problem = "cannot be combined with store = false, because the response could not be retrieved";
        return Err(Error::invalid("background", problem));
    }
    if request.context_management.as_ref().is_some_and(|management| !management.is_empty()) {
        let problem =
            "this server does not summarize conversations; truncation = \"auto\" removes their beginning";
        return Err(Error::coded("unsupported_parameter", "context_management", problem));
    }
    Ok(())
}

/// Checks the metadata of a conversation. The table of parameters does not cover requests to `/conversations`.
///
/// # Errors
/// The metadata has too many pairs, or a name or a value is too long.
pub(crate) fn check_metadata(metadata: &Map<String, Value>) -> Result<(), Error> {
    parameters::Kind::Pairs(16, 64, 512).check("metadata", &Value::Object(metadata.clone()))
}

/// Returns the request's own items, in which references are replaced with the referenced items.
fn input(request: &Request, referred: Vec<Arc<Item>>, ids: &mut ItemIds) -> Result<Vec<Arc<Item>>, Error> {
    let given = match request.input.clone() {
        None => return Ok(Vec::new()),
        Some(TextOrList::Text(text)) if text.is_empty() => {
            return Err(Error::coded("empty_string", "input", "is empty"));
        }
        Some(TextOrList::Text(text)) => return Ok(vec![Arc::new(items::user_message(text, ids))]),
        Some(TextOrList::List(given)) if given.is_empty() => {
            return Err(Error::coded("empty_array", "input", "is empty"));
        }
        Some(TextOrList::List(given)) => items::read(given, "input", ids)?,
    };
    with_referenced(given, referred)
}

fn conversation(request: &Request, messages: Vec<Message>, tools: Vec<Tool>) -> Result<Conversation, Error> {
    let choice = ToolChoice::read(request.tool_choice.as_ref(), &tools)?;
    let effort = request.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_deref());
    let effort = effort.map(|effort| Effort::read(effort, "reasoning.effort")).transpose()?;
    let documents = request.documents.clone();
    Ok(Conversation {
        param: "input",
        messages,
        tools,
        choice,
        parallel: request.parallel_tool_calls,
        calls_functions: false,
        reasoning: Reasoning { effort, ..Reasoning::default() },
        documents: documents.map(|documents| documents.into_iter().map(Value::Object).collect()),
        variables: request.chat_template_kwargs.clone().unwrap_or_default(),
        add_generation_prompt: true,
        continues: false,
    })
}

#[cfg(test)]
mod tests;
