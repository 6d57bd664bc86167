//! Prepares requests to the responses endpoint: items become a conversation like any other, and what the response
//! tells of its request is settled. What a request refers to was looked up before, see [`Context`].

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
pub(crate) use items::{Given, read as read_items};
pub(crate) use tools::{CallName, CallNames, custom_input};

use super::conversation::{Conversation, Effort, Reasoning};
use super::fitting::{first_fitting, guess_cut};
use super::resolved::TokensMax;
use super::tools::{Tool, ToolChoice};
use super::{Prepared, Target, Wanted, parameters};
use crate::error::Error;
use crate::store::{Id, ItemIds, Kind};
use tools::RequestTools;

/// Number of references to stored items in a request.
///
/// Beyond it: 400, `array_above_max_length`.
const REFERENCES_MAX: usize = 1024;

/// What a request refers to.
#[derive(Debug, Default)]
pub(crate) struct References {
    pub(crate) previous: Option<String>,
    pub(crate) conversation: Option<String>,
    pub(crate) items: Vec<ItemReference>,
}

/// A reference to a stored item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemReference {
    /// The parameter that names the item.
    pub(crate) param: String,
    pub(crate) id: String,
}

impl ItemReference {
    pub(crate) fn not_found(&self) -> Error {
        let Self { param, id } = self;
        let message = format!("{param}: the item {id:?} is not kept here, or no more");
        Error::NotKept { code: "item_not_found", param: Some(param.clone()), message }
    }
}

/// The stored items that a request refers to.
#[derive(Debug, Default)]
pub(crate) struct Context {
    /// What goes before the request's own items, oldest first.
    pub(crate) history: Vec<Arc<Item>>,
    /// In the order of [`References::items`].
    pub(crate) items: Vec<Arc<Item>>,
}

/// A request, resolved.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) prepared: Prepared,
    /// As it begins. When that is, is for the caller to say.
    pub(crate) response: Response,
    /// For the items of the output.
    pub(crate) ids: ItemIds,
    /// What the request adds to the conversation.
    pub(crate) input: Vec<Arc<Item>>,
    /// How calls are reported.
    pub(crate) call_names: CallNames,
}

/// What has to be looked up for a request.
///
/// # Errors
/// What it refers to contradicts itself.
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

/// The elements of parameter `at` that refer to stored items.
///
/// # Errors
/// There are too many.
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
            Some(_) => Err(Error::coded("invalid_type", "conversation.id", "is no string")),
            None => Err(Error::missing("conversation.id")),
        },
        Some(_) => Err(Error::coded("invalid_type", "conversation", "is neither a string nor an object")),
    }
}

/// Prepares a request that is to be answered as `id`.
///
/// # Errors
/// It cannot be served.
pub(crate) fn responses(
    request: &Request,
    context: Context,
    id: Id,
    target: Target<'_>,
) -> Result<Ready, Error> {
    debug_assert_eq!(id.kind(), Kind::Response);
    // Another model's request has errors of another model.
    let model = parameters::model(&request.generation, target.model)?;
    let mut ids = id.items();
    check(request)?;
    let input = input(request, context.items, &mut ids)?;
    if input.is_empty() && context.history.is_empty() {
        return Err(Error::missing("input"));
    }
    let items = context.history.iter().chain(&input).map(Arc::as_ref);
    let messages = messages::messages(request.instructions.as_deref(), items);
    let mut tools = RequestTools::read(request.tools.clone().unwrap_or_default())?;
    let call_names = CallNames::of(&tools.offered);
    let conversation = conversation(request, messages, std::mem::take(&mut tools.offered))?;
    let format = format(request);
    let mut generation = request.generation.clone();
    target.model.api_rules.complete(&mut generation);
    generation.response_format = Some(chat_format(&format));
    // These are other endpoints' names for `max_output_tokens`, and mean nothing here.
    (generation.max_tokens, generation.max_completion_tokens) = (None, None);
    // What these ask for has no place in a response.
    (generation.detokenize, generation.return_token_ids, generation.prompt_logprobs) = (None, None, None);
    let (choice, parallel) = (choice(request), conversation.parallel);
    let prepared = fitting(request, (&generation, model), &conversation, target)
        .map_err(|error| tools.renamed(renamed(error)))?;
    let response = Response {
        parallel_tool_calls: parallel.unwrap_or(true),
        text: TextParameter { format: Some(format), verbosity: verbosity(request) },
        tools: tools.shown,
        warnings: tools.warnings,
        tool_choice: choice,
        ..response(request, id, &prepared)
    };
    Ok(Ready { prepared, response, ids, input, call_names })
}

/// What the table of parameters cannot say.
fn check(request: &Request) -> Result<(), Error> {
    if request.background == Some(true) && request.store == Some(false) {
        let problem = "cannot be combined with store = false: nobody could ask for the response";
        return Err(Error::invalid("background", problem));
    }
    if request.context_management.as_ref().is_some_and(|management| !management.is_empty()) {
        let problem = "conversations are not summed up here; truncation = \"auto\" drops their beginning";
        return Err(Error::coded("unsupported_parameter", "context_management", problem));
    }
    Ok(())
}

/// Checks the metadata of a conversation: the table has that of responses.
///
/// # Errors
/// It has too much of something.
pub(crate) fn check_metadata(metadata: &Map<String, Value>) -> Result<(), Error> {
    super::Kind::Pairs(16, 64, 512).check("metadata", &Value::Object(metadata.clone()))
}

/// The request's own items, with those that it refers to in their places.
fn input(request: &Request, referred: Vec<Arc<Item>>, ids: &mut ItemIds) -> Result<Vec<Arc<Item>>, Error> {
    let given = match request.input.clone() {
        None => return Ok(Vec::new()),
        Some(TextOrList::Text(text)) if text.is_empty() => {
            return Err(Error::coded("empty_string", "input", "is empty"));
        }
        Some(TextOrList::Text(text)) => return Ok(vec![Arc::new(items::said(text, ids))]),
        Some(TextOrList::List(given)) if given.is_empty() => {
            return Err(Error::coded("empty_array", "input", "is empty"));
        }
        Some(TextOrList::List(given)) => items::read(given, "input", ids)?,
    };
    with_referenced(given, referred)
}

/// The items that were given, with `referenced`, which are in the order of the references, in the places of those.
///
/// # Errors
/// There are fewer of them.
pub(crate) fn with_referenced(
    given: Vec<Given>,
    referenced: Vec<Arc<Item>>,
) -> Result<Vec<Arc<Item>>, Error> {
    let mut referenced = referenced.into_iter();
    let item = |given| match given {
        Given::Item(item) => Ok(Arc::new(item)),
        Given::Reference(id) => {
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

/// Of how many of the most probable tokens log probabilities are told, if they are told.
fn logprobs(request: &Request) -> Option<u32> {
    let included = request.include.iter().flatten().any(|wanted| wanted == "message.output_text.logprobs");
    let is_wanted =
        included || request.logprobs == Some(true) || request.top_logprobs.is_some_and(|top| top > 0);
    is_wanted.then(|| request.top_logprobs.unwrap_or(0))
}

/// Of the model's room so much is left for the answer, as a part of it, where a conversation is cut for a request that
/// does not say how long the answer may be.
const ANSWER_SHARE: u32 = 4;

/// Prepares the conversation, or as much of its end as the model has room for if it may be cut.
fn fitting(
    request: &Request,
    (generation, model): (&Generation, String),
    conversation: &Conversation,
    target: Target<'_>,
) -> Result<Prepared, Error> {
    let tokens_max = request.max_output_tokens.map(|tokens| TokensMax { param: "max_output_tokens", tokens });
    let prepare = |messages: Vec<Message>, tokens_max: Option<TokensMax>| {
        let conversation = Conversation { messages, ..conversation.clone() };
        let answer = Wanted { model: model.clone(), logprobs: logprobs(request), tokens_max };
        super::conversation(generation, &conversation, answer, target)
    };
    let refused = match prepare(conversation.messages.clone(), tokens_max) {
        Err(error) if is_too_long(&error) && request.truncation.as_deref() == Some("auto") => error,
        other => return other,
    };
    // The first cut that leaves something that fits.
    let cuts = messages::cuts(&conversation.messages);
    let rest = |cut: usize| messages::without(&conversation.messages, cut);
    let room = target.limits.requests.max_model_len / ANSWER_SHARE;
    let left = tokens_max.unwrap_or(TokensMax { param: "max_output_tokens", tokens: room.max(1) });
    let tokens_max_of_prompt = target.limits.requests.max_model_len.saturating_sub(left.tokens);
    let guess = guess_cut(&conversation.messages, &cuts, target.model, tokens_max_of_prompt);
    let fitting = first_fitting(cuts.len(), guess, |at| match prepare(rest(cuts[at]), Some(left)) {
        Ok(prepared) => Ok(Some(prepared)),
        Err(error) if is_too_long(&error) => Ok(None),
        Err(error) => Err(error),
    })?;
    let cut = fitting.as_ref().map_or(cuts.last(), |(at, _)| cuts.get(*at));
    match (tokens_max, cut) {
        (Some(_), _) | (_, None) => fitting.map(|(_, prepared)| prepared).ok_or(refused),
        // It may go on for as long as there is room; the last turn alone may leave less than was wished for.
        (None, Some(&cut)) => prepare(rest(cut), None).map_err(|_| refused),
    }
}

/// Whether less of the conversation may be taken.
fn is_too_long(error: &Error) -> bool {
    match error {
        Error::ContextLength { .. } => true,
        Error::Invalid { code, param, .. } => *code == "array_above_max_length" && param == "input",
        _ => false,
    }
}

/// The form of the text, as this endpoint has it. OVMS's clients ask for it as chats do.
fn format(request: &Request) -> Map<String, Value> {
    let plain = || Map::from_iter([("type".to_owned(), json!("text"))]);
    let asked = request.text.as_ref().and_then(|text| text.format.clone());
    asked.or_else(|| request.generation.response_format.clone().map(flat)).unwrap_or_else(plain)
}

/// From `{"type": "json_schema", "json_schema": {…}}` to `{"type": "json_schema", …}`.
fn flat(mut format: Map<String, Value>) -> Map<String, Value> {
    if let Some(Value::Object(schema)) = format.remove("json_schema") {
        format.extend(schema);
    }
    format
}

/// The other way: as chats ask for it.
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

/// An error about what chats call otherwise, in this endpoint's words.
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
    let asked = request.text.as_ref().and_then(|text| text.verbosity.clone());
    Some(asked.unwrap_or_else(|| "medium".to_owned()))
}

/// As this endpoint has it: a function is named flat.
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

/// What the response tells of its request.
fn response(request: &Request, id: Id, prepared: &Prepared) -> Response {
    let is_background = request.background.unwrap_or(false);
    let sampling = prepared.prompts.first().map(|prompt| &prompt.sampling);
    let named = |id: String| ConversationName { id };
    let conversation = conversation_name(request).ok().flatten();
    let asked = request.reasoning.clone().unwrap_or_default();
    let summary = asked.summary.or(asked.generate_summary);
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
        model: prepared.reply.model.clone(),
        output: Vec::new(),
        parallel_tool_calls: true,
        previous_response_id: request.previous_response_id.clone(),
        conversation: conversation.map(named),
        prompt_cache_key: request.prompt_cache_key.clone(),
        reasoning: ReasoningParameter { effort: asked.effort, summary, generate_summary: None },
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
