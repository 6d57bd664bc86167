//! Assembles a response from deltas, and reports its events. This module is pure: it passes each change to a sink, and
//! a response that is not streamed is the result of the same changes.
//!
//! ```text
//! create ─► begin ─► push … push ─► complete ─► conclude        fail, cancel: at any time instead of complete
//! ```

use server_openai::responses::{
    Call, CustomCall, Event, EventData, IncompleteDetails, Item, ItemStatus, Message, Part, Reasoning,
    Response, ResponseError, ResponseUsage, Status, SummaryText, kind,
};
use server_openai::{ChatTokenLogprob, ChoiceFinishReason};

use crate::encoding::EncodingCost;
use crate::error::Error;
use crate::prepare::responses::{CallName, CallNames, ToolKind, custom_input};
use crate::respond::{ChoiceDelta, TokenText};
use crate::store::ItemIds;

/// Converts tokens to the log probabilities of the API.
pub(crate) type LogprobFormat = Box<dyn Fn(Vec<TokenText>) -> Vec<ChatTokenLogprob> + Send + Sync>;

/// A response without output, and the settings for assembling it.
pub(crate) struct NewResponse {
    /// The response, which is in progress or queued.
    pub(crate) response: Response,
    /// The IDs for the items of the response.
    pub(crate) ids: ItemIds,
    /// The format of log probabilities, if they are requested.
    pub(crate) logprobs: Option<LogprobFormat>,
    /// Number of choices, each of which has its own items.
    pub(crate) choices: u32,
    /// The names under which calls are reported.
    pub(crate) call_names: CallNames,
}

/// A response that is being assembled.
pub(crate) struct Assembly {
    response: Response,
    ids: ItemIds,
    logprobs: Option<LogprobFormat>,
    choices: Vec<Choice>,
    call_names: CallNames,
    /// Number of tokens with log probabilities that have been added, if log probabilities are requested.
    num_tokens: usize,
    /// Size in bytes of the texts that have been added: messages, reasoning, and arguments of calls.
    text_bytes: usize,
    /// The sequence number of the next event.
    number: u64,
}

/// Receives events.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(&Event<'_>);

/// The state of a choice.
#[derive(Default)]
struct Choice {
    open: OpenItem,
    /// Whitespace that either begins a message or only separates items.
    blank: String,
    /// The tokens of the whitespace in `blank`.
    tokens: Vec<TokenText>,
    has_items: bool,
    /// The arguments of the open call of a custom tool, whose input is reported when the call ends.
    arguments: String,
}

/// The kind of the item that is being generated, with its index in the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum OpenItem {
    #[default]
    None,
    Message(usize),
    Reasoning(usize),
    Call(usize),
}

impl Assembly {
    pub(crate) fn new(new: NewResponse) -> Self {
        let NewResponse { response, ids, logprobs, choices, call_names } = new;
        let choices = (0..choices).map(|_| Choice::default()).collect();
        Self { response, ids, logprobs, choices, call_names, num_tokens: 0, text_bytes: 0, number: 0 }
    }

    /// Returns the current state of the response.
    pub(crate) fn response(&self) -> &Response {
        &self.response
    }

    /// Returns the cost of encoding the output, or events that repeat it.
    pub(crate) fn encoding_cost(&self) -> EncodingCost {
        EncodingCost::of_tokens(self.num_tokens).max(EncodingCost::of_text(self.text_bytes))
    }

    /// Returns the cost of adding deltas and encoding their events.
    pub(crate) fn deltas_cost(&self, deltas: &[ChoiceDelta]) -> EncodingCost {
        let cost = ChoiceDelta::encoding_cost(deltas);
        // A delta that does not continue the open item ends it, and the events at the end of an item repeat the whole
        // item.
        if deltas.iter().any(|delta| self.ends_item(delta)) { cost.max(self.encoding_cost()) } else { cost }
    }

    /// Whether a delta may end the open item of its choice.
    fn ends_item(&self, delta: &ChoiceDelta) -> bool {
        !matches!(
            (self.choices[delta.choice() as usize].open, delta),
            (OpenItem::None, _)
                | (OpenItem::Message(_), ChoiceDelta::Text { .. })
                | (OpenItem::Reasoning(_), ChoiceDelta::Reasoning { .. })
                | (OpenItem::Call(_), ChoiceDelta::CallArguments { .. })
        )
    }

    /// Reports that the response has been created and, if it must wait, that it is queued.
    pub(crate) fn create(&mut self, sink: Sink<'_>) {
        self.report(kind::CREATED, sink);
        if self.response.status == Status::Queued {
            self.report(kind::QUEUED, sink);
        }
    }

    /// Reports that the response is in progress.
    pub(crate) fn begin(&mut self, sink: Sink<'_>) {
        self.response.status = Status::InProgress;
        self.report(kind::IN_PROGRESS, sink);
    }

    /// Adds a delta.
    pub(crate) fn push(&mut self, delta: ChoiceDelta, sink: Sink<'_>) {
        self.text_bytes += delta.text_bytes();
        if self.logprobs.is_some() {
            self.num_tokens += delta.num_tokens();
        }
        match delta {
            ChoiceDelta::Text { choice, text, tokens } => self.text(choice as usize, &text, tokens, sink),
            ChoiceDelta::Reasoning { choice, text, .. } => self.reasoning(choice as usize, &text, sink),
            ChoiceDelta::CallBegin { choice, id, name, .. } => self.call(choice as usize, id, name, sink),
            ChoiceDelta::CallArguments { choice, text, .. } => self.arguments(choice as usize, &text, sink),
            ChoiceDelta::CallEnd { choice, .. } => self.close(choice as usize, ItemStatus::Completed, sink),
            ChoiceDelta::End { choice, reason, .. } => self.end(choice as usize, reason, sink),
        }
    }

    /// Completes the response after all choices have ended. [`Assembly::conclude`] reports it.
    pub(crate) fn complete(&mut self, usage: ResponseUsage, now: u64) {
        let response = &mut self.response;
        response.usage = Some(usage);
        if response.incomplete_details.is_some() {
            response.status = Status::Incomplete;
        } else {
            response.status = Status::Completed;
            response.completed_at = Some(now);
        }
    }

    /// Marks a response as failed although all its choices have ended. The response keeps its output.
    /// [`Assembly::conclude`] reports the failure.
    pub(crate) fn fail_complete(&mut self, error: ResponseError) {
        self.response.status = Status::Failed;
        self.response.completed_at = None;
        self.response.incomplete_details = None;
        self.response.error = Some(error);
    }

    /// Sets whether the response is stored.
    pub(crate) fn set_stored(&mut self, is_stored: bool) {
        self.response.store = is_stored;
    }

    /// Reports the last event: the final state of the response.
    pub(crate) fn conclude(&mut self, sink: Sink<'_>) {
        let kind = match self.response.status {
            Status::Completed => kind::COMPLETED,
            Status::Incomplete => kind::INCOMPLETE,
            Status::Queued | Status::InProgress | Status::Failed | Status::Cancelled => kind::FAILED,
        };
        self.report(kind, sink);
    }

    /// Reports the error, and marks the response as failed. The response keeps its partial output.
    pub(crate) fn fail(&mut self, error: &Error, sink: Sink<'_>) {
        let body = error.body().error;
        let data = EventData::Error { code: body.code, message: &body.message, param: body.param.as_deref() };
        emit(&mut self.number, kind::ERROR, data, sink);
        self.interrupt(Status::Failed);
        self.response.error = Some(ResponseError { code: "server_error".to_owned(), message: body.message });
    }

    /// Marks the response as canceled. The response keeps its partial output.
    pub(crate) fn cancel(&mut self) {
        self.interrupt(Status::Cancelled);
    }

    fn interrupt(&mut self, status: Status) {
        self.response.status = status;
        for choice in &mut self.choices {
            let open = std::mem::take(&mut choice.open);
            if let OpenItem::Message(at) | OpenItem::Reasoning(at) | OpenItem::Call(at) = open {
                self.response.output[at].set_status(ItemStatus::Incomplete);
                if let Item::CustomToolCall(CustomCall { input, .. }) = &mut self.response.output[at] {
                    *input = custom_input(&std::mem::take(&mut choice.arguments));
                }
            }
        }
    }

    fn text(&mut self, choice: usize, text: &str, tokens: Vec<TokenText>, sink: Sink<'_>) {
        let at = match self.choices[choice].open {
            OpenItem::Message(at) => at,
            // Whitespace alone does not begin a message: it may merely separate reasoning from a call.
            _ if text.trim().is_empty() => {
                self.choices[choice].blank.push_str(text);
                self.choices[choice].tokens.extend(tokens);
                return;
            }
            _ => self.open_message(choice, sink),
        };
        let blank = std::mem::take(&mut self.choices[choice].blank);
        let mut all_tokens = std::mem::take(&mut self.choices[choice].tokens);
        all_tokens.extend(tokens);
        self.append_text(at, &(blank + text), all_tokens, sink);
    }

    fn open_message(&mut self, choice: usize, sink: Sink<'_>) -> usize {
        self.close(choice, ItemStatus::Incomplete, sink);
        let id = self.ids.next("msg");
        let role = "assistant".to_owned();
        let message = Message { id, status: ItemStatus::InProgress, content: Vec::new(), role };
        let at = self.add(choice, Item::Message(message), sink);
        self.choices[choice].open = OpenItem::Message(at);
        let Self { response, number, .. } = self;
        let Item::Message(Message { id, content, .. }) = &mut response.output[at] else { return at };
        content.push(Part::OutputText { annotations: Vec::new(), logprobs: Vec::new(), text: String::new() });
        let data = EventData::Part { item_id: id, output_index: at, content_index: 0, part: &content[0] };
        emit(number, kind::PART_ADDED, data, sink);
        at
    }

    fn append_text(&mut self, at: usize, new: &str, tokens: Vec<TokenText>, sink: Sink<'_>) {
        let Self { response, number, logprobs: format, .. } = self;
        let new_logprobs = format.as_ref().map(|format| format(tokens)).unwrap_or_default();
        if new.is_empty() && new_logprobs.is_empty() {
            return;
        }
        let Item::Message(Message { id, content, .. }) = &mut response.output[at] else { return };
        let Some(Part::OutputText { logprobs, text, .. }) = content.first_mut() else { return };
        let data = EventData::TextDelta {
            item_id: id,
            output_index: at,
            content_index: 0,
            delta: new,
            logprobs: &new_logprobs,
        };
        emit(number, kind::TEXT_DELTA, data, sink);
        text.push_str(new);
        logprobs.extend(new_logprobs);
    }

    fn reasoning(&mut self, choice: usize, new: &str, sink: Sink<'_>) {
        if new.is_empty() {
            return;
        }
        let at = match self.choices[choice].open {
            OpenItem::Reasoning(at) => at,
            _ => self.open_reasoning(choice, sink),
        };
        let Self { response, number, .. } = self;
        let Item::Reasoning(Reasoning { id, summary, .. }) = &mut response.output[at] else { return };
        let data = EventData::SummaryDelta { item_id: id, output_index: at, summary_index: 0, delta: new };
        emit(number, kind::SUMMARY_DELTA, data, sink);
        summary[0].text.push_str(new);
    }

    fn open_reasoning(&mut self, choice: usize, sink: Sink<'_>) -> usize {
        self.close(choice, ItemStatus::Incomplete, sink);
        self.discard_blank(choice);
        let item = Item::Reasoning(Reasoning {
            id: self.ids.next("rs"),
            summary: Vec::new(),
            content: None,
            encrypted_content: None,
            status: Some(ItemStatus::InProgress),
        });
        let at = self.add(choice, item, sink);
        self.choices[choice].open = OpenItem::Reasoning(at);
        let Self { response, number, .. } = self;
        let Item::Reasoning(Reasoning { id, summary, .. }) = &mut response.output[at] else { return at };
        summary.push(SummaryText { text: String::new() });
        let data =
            EventData::SummaryPart { item_id: id, output_index: at, summary_index: 0, part: &summary[0] };
        emit(number, kind::SUMMARY_PART_ADDED, data, sink);
        at
    }

    fn call(&mut self, choice: usize, call_id: String, name: String, sink: Sink<'_>) {
        self.close(choice, ItemStatus::Incomplete, sink);
        self.discard_blank(choice);
        let status = ItemStatus::InProgress;
        let CallName { namespace, name, kind } = self.call_names.reported(name);
        let item = match kind {
            ToolKind::Function => {
                let id = self.ids.next("fc");
                Item::FunctionCall(Call { id, status, arguments: String::new(), call_id, name, namespace })
            }
            ToolKind::Custom => {
                let id = self.ids.next("ctc");
                Item::CustomToolCall(CustomCall {
                    id,
                    status,
                    input: String::new(),
                    call_id,
                    name,
                    namespace,
                })
            }
        };
        let at = self.add(choice, item, sink);
        self.choices[choice].open = OpenItem::Call(at);
    }

    fn arguments(&mut self, choice: usize, new: &str, sink: Sink<'_>) {
        let OpenItem::Call(at) = self.choices[choice].open else { return };
        if new.is_empty() {
            return;
        }
        let Self { response, number, choices, .. } = self;
        let Item::FunctionCall(Call { id, call_id, arguments, .. }) = &mut response.output[at] else {
            // This is a call of a custom tool. Its input is extracted and reported when the arguments are complete.
            choices[choice].arguments.push_str(new);
            return;
        };
        let data = EventData::ArgumentsDelta { item_id: id, output_index: at, call_id, delta: new };
        emit(number, kind::ARGUMENTS_DELTA, data, sink);
        arguments.push_str(new);
    }

    fn end(&mut self, choice: usize, reason: ChoiceFinishReason, sink: Sink<'_>) {
        if !self.choices[choice].has_items {
            // An answer that is empty or consists of whitespace becomes a message, too.
            let at = self.open_message(choice, sink);
            let Choice { blank, tokens, .. } = std::mem::take(&mut self.choices[choice]);
            self.choices[choice].open = OpenItem::Message(at);
            self.append_text(at, &blank, tokens, sink);
        }
        let is_cut_off = reason == ChoiceFinishReason::Length;
        if is_cut_off {
            let reason = "max_output_tokens".to_owned();
            self.response.incomplete_details = Some(IncompleteDetails { reason });
        }
        // A call that is still open is incomplete.
        let is_call = matches!(self.choices[choice].open, OpenItem::Call(_));
        let status = if is_cut_off || is_call { ItemStatus::Incomplete } else { ItemStatus::Completed };
        self.finish(choice, status, sink);
    }

    /// Ends the open item. A call gets this `status`; any other item is complete.
    fn close(&mut self, choice: usize, status: ItemStatus, sink: Sink<'_>) {
        let is_call = matches!(self.choices[choice].open, OpenItem::Call(_));
        self.finish(choice, if is_call { status } else { ItemStatus::Completed }, sink);
    }

    fn finish(&mut self, choice: usize, status: ItemStatus, sink: Sink<'_>) {
        let open = std::mem::take(&mut self.choices[choice].open);
        let (OpenItem::Message(at) | OpenItem::Reasoning(at) | OpenItem::Call(at)) = open else { return };
        let Self { response, number, choices, .. } = self;
        response.output[at].set_status(status);
        let arguments = std::mem::take(&mut choices[choice].arguments);
        if let Item::CustomToolCall(CustomCall { input, .. }) = &mut response.output[at] {
            *input = custom_input(&arguments);
        }
        let item = &response.output[at];
        match item {
            Item::Message(Message { id, content, .. }) => {
                if let Some(part @ Part::OutputText { text, logprobs, .. }) = content.first() {
                    let (item_id, output_index, content_index) = (id.as_str(), at, 0);
                    let data = EventData::TextDone { item_id, output_index, content_index, text, logprobs };
                    emit(number, kind::TEXT_DONE, data, sink);
                    let data = EventData::Part { item_id, output_index, content_index, part };
                    emit(number, kind::PART_DONE, data, sink);
                }
            }
            Item::Reasoning(Reasoning { id, summary, .. }) => {
                if let Some(part) = summary.first() {
                    let (item_id, output_index, summary_index) = (id.as_str(), at, 0);
                    let text = &part.text;
                    let data = EventData::SummaryDone { item_id, output_index, summary_index, text };
                    emit(number, kind::SUMMARY_DONE, data, sink);
                    let data = EventData::SummaryPart { item_id, output_index, summary_index, part };
                    emit(number, kind::SUMMARY_PART_DONE, data, sink);
                }
            }
            Item::FunctionCall(Call { id, call_id, name, arguments, .. }) => {
                let data =
                    EventData::ArgumentsDone { item_id: id, output_index: at, call_id, name, arguments };
                emit(number, kind::ARGUMENTS_DONE, data, sink);
            }
            Item::CustomToolCall(CustomCall { id, input, .. }) => {
                let (item_id, output_index) = (id.as_str(), at);
                if !input.is_empty() {
                    let data = EventData::InputDelta { item_id, output_index, delta: input };
                    emit(number, kind::INPUT_DELTA, data, sink);
                }
                emit(number, kind::INPUT_DONE, EventData::InputDone { item_id, output_index, input }, sink);
            }
            // The model does not generate results of calls.
            Item::FunctionCallOutput(_) | Item::CustomToolCallOutput(_) => {}
        }
        emit(number, kind::ITEM_DONE, EventData::Item { output_index: at, item }, sink);
    }

    fn add(&mut self, choice: usize, item: Item, sink: Sink<'_>) -> usize {
        let Self { response, number, .. } = self;
        let at = response.output.len();
        response.output.push(item);
        self.choices[choice].has_items = true;
        let data = EventData::Item { output_index: at, item: &response.output[at] };
        emit(number, kind::ITEM_ADDED, data, sink);
        at
    }

    fn discard_blank(&mut self, choice: usize) {
        self.choices[choice].blank.clear();
        self.choices[choice].tokens.clear();
    }

    fn report(&mut self, kind: &'static str, sink: Sink<'_>) {
        let Self { response, number, .. } = self;
        emit(number, kind, EventData::Response { response }, sink);
    }
}

fn emit(number: &mut u64, kind: &'static str, data: EventData<'_>, sink: Sink<'_>) {
    sink(&Event { r#type: kind, data, sequence_number: *number });
    *number += 1;
}

/// Encodes an event for the stream.
pub(crate) fn encode(event: &Event<'_>) -> String {
    let data = serde_json::to_string(event).expect("invariant: an event is JSON");
    format!("event: {}\ndata: {data}\n\n", event.r#type)
}

#[cfg(test)]
pub(super) mod tests;
