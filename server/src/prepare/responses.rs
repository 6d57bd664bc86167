//! Prepares requests to the responses endpoint: items become a conversation, and the fields of the response that repeat
//! the request are set. The stored objects that a request refers to have been looked up earlier ([`Context`]).

mod items;
mod messages;
mod tools;

use std::sync::Arc;

use serde_json::{Map, Value, json};
use server_openai::responses::{
    ConversationName, InputItem, Item, Object, ReasoningParameter, Request, Response, Status, TextOrList,
    TextParameter,
};
use server_openai::{Generation, Message};

pub(crate) use super::tools::ToolKind;
pub(crate) use items::{InputElement, read as read_items};
pub(crate) use tools::{CallName, CallNames, custom_input};

use super::chat::{AnswerRequest, prepare_conversation};
use super::conversation::{Conversation, Effort, Reasoning};
use super::fitting::{first_fitting, guess_cut};
use super::parameters;
use super::prepared::{PreparedRequest, Target};
use super::resolved::{ANSWER_SHARE, LimitSource, TokensMax, UndecodedRequest};
use super::tools::{Tool, ToolChoice};
use crate::error::Error;
use crate::store::{Id, ItemIds, Kind, check_ids};
use tools::RequestTools;

/// Number of references to stored items in a request.
///
/// If exceeded: 400, `array_above_max_length`.
const REFERENCES_MAX: usize = 1024;

/// The stored objects that a request refers to.
#[derive(Debug, Default)]
pub(crate) struct References {
    pub(crate) previous: Option<String>,
    pub(crate) conversation: Option<String>,
    pub(crate) items: Vec<ItemReference>,
}

impl References {
    pub(crate) fn is_empty(&self) -> bool {
        self.previous.is_none() && self.conversation.is_none() && self.items.is_empty()
    }
}

/// A reference to a stored item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemReference {
    /// The name of the parameter that contains the reference.
    pub(crate) param: String,
    pub(crate) id: String,
}

impl ItemReference {
    pub(crate) fn not_found(&self) -> Error {
        let Self { param, id } = self;
        let message = format!("{param}: the item {id:?} is not stored; it may have been deleted");
        Error::NotStored { code: "item_not_found", param: Some(param.clone()), message }
    }
}

/// The stored items that a request refers to.
#[derive(Debug, Default)]
pub(crate) struct Context {
    /// The items that precede the request's own items, oldest first.
    pub(crate) history: Vec<Arc<Item>>,
    /// The referenced items, in the order of [`References::items`].
    pub(crate) items: Vec<Arc<Item>>,
}

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

/// Returns the stored objects that a request refers to.
///
/// # Errors
/// The references contradict each other.
pub(crate) fn references(request: &Request) -> Result<References, Error> {
    let conversation = conversation_name(request)?;
    if conversation.is_some() && request.previous_response_id.is_some() {
        let problem = "cannot be combined with previous_response_id";
        return Err(Error::coded("mutually_exclusive_parameters", "conversation", problem));
    }
    let items = match &request.input {
        Some(TextOrList::List(given)) => item_references(given, "input")?,
        _ => Vec::new(),
    };
    Ok(References { previous: request.previous_response_id.clone(), conversation, items })
}

/// Returns the elements of the parameter `at` that refer to stored items.
///
/// # Errors
/// There are too many references.
pub(crate) fn item_references(given: &[InputItem], at: &str) -> Result<Vec<ItemReference>, Error> {
    let references = given.iter().enumerate().filter_map(|(index, item)| {
        let id = items::reference(item)?;
        Some(ItemReference { param: format!("{at}[{index}].id"), id: id.to_owned() })
    });
    let references: Vec<ItemReference> = references.take(REFERENCES_MAX + 1).collect();
    if references.len() > REFERENCES_MAX {
        let problem = format!("has more than {REFERENCES_MAX} references to items");
        return Err(Error::coded("array_above_max_length", at, problem));
    }
    Ok(references)
}

fn conversation_name(request: &Request) -> Result<Option<String>, Error> {
    match &request.conversation {
        None => Ok(None),
        Some(Value::String(id)) => Ok(Some(id.clone())),
        Some(Value::Object(object)) => match object.get("id") {
            Some(Value::String(id)) => Ok(Some(id.clone())),
            Some(_) => Err(Error::coded("invalid_type", "conversation.id", "must be a string")),
            None => Err(Error::missing("conversation.id")),
        },
        Some(_) => Err(Error::coded("invalid_type", "conversation", "must be a string or an object")),
    }
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

/// Prepares a request up to the decoding of its images.
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
    // Check the model first, because the other errors depend on it.
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
    // Other endpoints use these names for `max_output_tokens`. They have no effect here.
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

/// Checks the rules between parameters, which are not in the table of parameters.
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

/// Checks the metadata of a conversation. The table of parameters covers only the metadata of responses.
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

/// Replaces the references among the input elements with `referenced`, whose items are in the order of the references.
///
/// # Errors
/// There are fewer referenced items than references.
pub(crate) fn with_referenced(
    given: Vec<InputElement>,
    referenced: Vec<Arc<Item>>,
) -> Result<Vec<Arc<Item>>, Error> {
    let mut referenced = referenced.into_iter();
    let item = |given| match given {
        InputElement::Item(item) => Ok(Arc::new(item)),
        InputElement::Reference(id) => {
            referenced.next().ok_or_else(|| Error::Internal(format!("{id} was not looked up")))
        }
    };
    given.into_iter().map(item).collect()
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

/// Returns the number of most probable tokens with log probabilities, or `None` for no log probabilities.
fn logprobs(request: &Request) -> Option<u32> {
    let is_included = request.include.iter().flatten().any(|name| name == "message.output_text.logprobs");
    let is_requested =
        is_included || request.logprobs == Some(true) || request.top_logprobs.is_some_and(|top| top > 0);
    is_requested.then(|| request.top_logprobs.unwrap_or(0))
}

/// Prepares the conversation, or the longest end of it that fits if it may be truncated.
fn prepare_fitting(
    request: &Request,
    generation: &Generation,
    model: &str,
    conversation: &Conversation,
    target: Target<'_>,
) -> Result<UndecodedRequest, Error> {
    let limit = |tokens, source| TokensMax { param: "max_output_tokens", tokens, source };
    let tokens_max = request.max_output_tokens.map(|tokens| limit(tokens, LimitSource::Request));
    let prepare = |messages: Vec<Message>, tokens_max: Option<TokensMax>| {
        let conversation = Conversation { messages, ..conversation.clone() };
        let answer = AnswerRequest { model: model.to_owned(), logprobs: logprobs(request), tokens_max };
        prepare_conversation(generation, &conversation, answer, target)
    };
    let too_long = match prepare(conversation.messages.clone(), tokens_max) {
        Err(error) if is_too_long(&error) && request.truncation.as_deref() == Some("auto") => error,
        other => return other,
    };
    let cuts = messages::cuts(&conversation.messages);
    let rest = |cut: usize| messages::without(&conversation.messages, cut);
    let room = target.limits.requests.max_model_len / ANSWER_SHARE;
    let left = tokens_max.unwrap_or(limit(room.max(1), LimitSource::Room));
    let tokens_max_of_prompt = target.limits.requests.max_model_len.saturating_sub(left.tokens);
    let Target { model: served, media, .. } = target;
    let guess = guess_cut(&conversation.messages, &cuts, served, media, tokens_max_of_prompt);
    let fitting = first_fitting(cuts.len(), guess, |at| match prepare(rest(cuts[at]), Some(left)) {
        Ok(prepared) => Ok(Some(prepared)),
        Err(error) if is_too_long(&error) => Ok(None),
        Err(error) => Err(error),
    })?;
    let cut = fitting.as_ref().map_or(cuts.last(), |(at, _)| cuts.get(*at)).copied();
    match (tokens_max, cut) {
        (Some(_), _) | (_, None) => fitting.map(|(_, prepared)| prepared).ok_or(too_long),
        // The answer may fill the context length. The last turn alone may leave less room than the fraction that is
        // otherwise left.
        (None, Some(cut)) => {
            // Release the memory of the images before they are read again.
            drop(fitting);
            prepare(rest(cut), None).map_err(|error| if is_too_long(&error) { too_long } else { error })
        }
    }
}

/// Whether shortening the conversation may avoid the error.
fn is_too_long(error: &Error) -> bool {
    match error {
        Error::ContextLength { .. } => true,
        // There are too many messages or images, or the images have too many pixels.
        Error::Invalid { code, param, .. } => {
            *code == "array_above_max_length" && (param == "input" || param.starts_with("input["))
        }
        _ => false,
    }
}

/// Returns the requested format of the text, converted to the form of this endpoint. OVMS's clients may use the form of
/// the chat endpoint.
fn format(request: &Request) -> Map<String, Value> {
    let plain = || Map::from_iter([("type".to_owned(), json!("text"))]);
    let requested = request.text.as_ref().and_then(|text| text.format.clone());
    requested.or_else(|| request.generation.response_format.clone().map(flat)).unwrap_or_else(plain)
}

/// Converts `{"type": "json_schema", "json_schema": {…}}` to `{"type": "json_schema", …}`. As in chat completions, the
/// inner object may be the schema itself.
fn flat(mut format: Map<String, Value>) -> Map<String, Value> {
    match format.remove("json_schema") {
        Some(Value::Object(named)) if named.contains_key("schema") || named.contains_key("name") => {
            format.extend(named);
        }
        Some(schema) => _ = format.insert("schema".to_owned(), schema),
        None => {}
    }
    format
}

/// Converts a format to the form of the chat endpoint.
fn chat_format(format: &Map<String, Value>) -> Map<String, Value> {
    let is_schema = format.get("type").and_then(Value::as_str) == Some("json_schema");
    if !is_schema || format.contains_key("json_schema") {
        return format.clone();
    }
    let mut schema = format.clone();
    schema.remove("type");
    Map::from_iter([
        ("type".to_owned(), json!("json_schema")),
        ("json_schema".to_owned(), Value::Object(schema)),
    ])
}

/// Renames the parameter of an error to its name at this endpoint.
fn renamed(error: Error) -> Error {
    const NAMES: [(&str, &str); 2] =
        [("response_format.json_schema", "text.format"), ("response_format", "text.format")];
    let Error::Invalid { code, param, message } = error else { return error };
    let renamed = |text: &str| {
        let (from, to) = NAMES.into_iter().find(|(from, _)| text.starts_with(from))?;
        Some(format!("{to}{}", &text[from.len()..]))
    };
    match renamed(&param) {
        Some(param) => Error::Invalid { code, message: renamed(&message).unwrap_or(message), param },
        None => Error::Invalid { code, param, message },
    }
}

fn verbosity(request: &Request) -> Option<String> {
    let requested = request.text.as_ref().and_then(|text| text.verbosity.clone());
    Some(requested.unwrap_or_else(|| "medium".to_owned()))
}

/// Returns the tool choice in the form of this endpoint, in which a function has no nested object.
fn choice(request: &Request) -> Value {
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

/// Returns a response whose fields repeat the request.
fn response(request: &Request, id: Id, prepared: &PreparedRequest) -> Response {
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

#[cfg(test)]
mod tests;
