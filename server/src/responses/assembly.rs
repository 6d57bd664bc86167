//! From deltas to items, and to the events that tell of them. Pure: an event is handed to whoever wants it when it
//! happens, and a response that is not streamed is what the same events lead to.
//!
//! ```text
//! begin ─► push … push ─► settle ─► conclude        fail, cancel: at any time in place of the last two
//! ```

use server_openai::responses::{
    Call, CustomCall, Event, EventData, IncompleteDetails, Item, ItemStatus, Message, Part, Reasoning,
    Response, ResponseError, Status, SummaryText, Usage, kind,
};
use server_openai::{ChatTokenLogprob, FinishReason};

use crate::error::Error;
use crate::prepare::responses::{CallName, CallNames, ToolKind, custom_input};
use crate::respond::{Delta, TokenText};
use crate::store::ItemIds;

/// Tokens as the API shows them.
pub(crate) type Show = Box<dyn Fn(Vec<TokenText>) -> Vec<ChatTokenLogprob> + Send + Sync>;

/// A response as it begins.
pub(crate) struct Begun {
    /// In progress or queued, without output.
    pub(crate) response: Response,
    /// For its items.
    pub(crate) ids: ItemIds,
    /// How tokens are shown, if log probabilities are wanted.
    pub(crate) show: Option<Show>,
    /// Choices that are made, each of which has items of its own.
    pub(crate) choices: u32,
    /// How calls are reported.
    pub(crate) call_names: CallNames,
}

/// A response in the making.
pub(crate) struct Assembly {
    response: Response,
    ids: ItemIds,
    show: Option<Show>,
    choices: Vec<Choice>,
    call_names: CallNames,
    /// Of the next event.
    number: u64,
}

/// Takes events.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(&Event<'_>);

/// What a choice is at.
#[derive(Default)]
struct Choice {
    open: Open,
    /// Space that may be a message's beginning or mere space between items.
    blank: String,
    /// Of `blank`.
    tokens: Vec<TokenText>,
    has_items: bool,
    /// The arguments of the call that is open, if the client sees them otherwise.
    arguments: String,
}

/// The item that is being made, by its place in the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Open {
    #[default]
    Nothing,
    Message(usize),
    Reasoning(usize),
    Call(usize),
}

impl Assembly {
    pub(crate) fn new(begun: Begun) -> Self {
        let Begun { response, ids, show, choices, call_names } = begun;
        let choices = (0..choices).map(|_| Choice::default()).collect();
        Self { response, ids, show, choices, call_names, number: 0 }
    }

    /// As it is now.
    pub(crate) fn response(&self) -> &Response {
        &self.response
    }

    /// That it is made: the first event.
    pub(crate) fn create(&mut self, sink: Sink<'_>) {
        self.tell(kind::CREATED, sink);
        if self.response.status == Status::Queued {
            self.tell(kind::QUEUED, sink);
        }
    }

    /// That the model has begun.
    pub(crate) fn begin(&mut self, sink: Sink<'_>) {
        self.response.status = Status::InProgress;
        self.tell(kind::IN_PROGRESS, sink);
    }

    /// Takes what is new.
    pub(crate) fn push(&mut self, delta: Delta, sink: Sink<'_>) {
        match delta {
            Delta::Text { choice, text, tokens } => self.text(choice as usize, (text, tokens), sink),
            Delta::Reasoning { choice, text, .. } => self.reasoning(choice as usize, &text, sink),
            Delta::CallBegin { choice, id, name, .. } => self.call(choice as usize, (id, name), sink),
            Delta::CallArguments { choice, text, .. } => self.arguments(choice as usize, &text, sink),
            Delta::CallEnd { choice, .. } => self.close(choice as usize, ItemStatus::Completed, sink),
            Delta::End { choice, reason } => self.end(choice as usize, reason, sink),
        }
    }

    /// All choices have ended: the response is as it stays, and nobody is told yet.
    pub(crate) fn settle(&mut self, usage: Usage, now: u64) {
        let response = &mut self.response;
        response.usage = Some(usage);
        if response.incomplete_details.is_some() {
            response.status = Status::Incomplete;
        } else {
            response.status = Status::Completed;
            response.completed_at = Some(now);
        }
    }

    /// Whether it is kept has turned out.
    pub(crate) fn set_stored(&mut self, is_stored: bool) {
        self.response.store = is_stored;
    }

    /// That it is as it stays: the last event.
    pub(crate) fn conclude(&mut self, sink: Sink<'_>) {
        let kind = match self.response.status {
            Status::Completed => kind::COMPLETED,
            Status::Incomplete => kind::INCOMPLETE,
            Status::Queued | Status::InProgress | Status::Failed | Status::Cancelled => kind::FAILED,
        };
        self.tell(kind, sink);
    }

    /// It has failed; what was said until then stays. To be concluded.
    pub(crate) fn fail(&mut self, error: &Error, sink: Sink<'_>) {
        let body = error.body().error;
        let data = EventData::Error { code: body.code, message: &body.message, param: body.param.as_deref() };
        emit(&mut self.number, (kind::ERROR, data), sink);
        self.break_off(Status::Failed);
        self.response.error = Some(ResponseError { code: "server_error".to_owned(), message: body.message });
    }

    /// It was cancelled; what was said until then stays. To be concluded.
    pub(crate) fn cancel(&mut self) {
        self.break_off(Status::Cancelled);
    }

    fn break_off(&mut self, status: Status) {
        self.response.status = status;
        for choice in &mut self.choices {
            if let Open::Message(at) | Open::Reasoning(at) | Open::Call(at) = std::mem::take(&mut choice.open)
            {
                self.response.output[at].set_status(ItemStatus::Incomplete);
                if let Item::CustomToolCall(CustomCall { input, .. }) = &mut self.response.output[at] {
                    *input = custom_input(&std::mem::take(&mut choice.arguments));
                }
            }
        }
    }

    fn text(&mut self, choice: usize, (text, tokens): (String, Vec<TokenText>), sink: Sink<'_>) {
        let at = match self.choices[choice].open {
            Open::Message(at) => at,
            // Space alone makes no message: it may be what stands between reasoning and a call.
            _ if text.trim().is_empty() => {
                self.choices[choice].blank.push_str(&text);
                self.choices[choice].tokens.extend(tokens);
                return;
            }
            _ => self.open_message(choice, sink),
        };
        let blank = std::mem::take(&mut self.choices[choice].blank);
        let mut shown = std::mem::take(&mut self.choices[choice].tokens);
        shown.extend(tokens);
        self.more_text(at, (blank + &text, shown), sink);
    }

    fn open_message(&mut self, choice: usize, sink: Sink<'_>) -> usize {
        self.close(choice, ItemStatus::Incomplete, sink);
        let id = self.ids.next("msg");
        let role = "assistant".to_owned();
        let message = Message { id, status: ItemStatus::InProgress, content: Vec::new(), role };
        let at = self.add(choice, Item::Message(message), sink);
        self.choices[choice].open = Open::Message(at);
        let Self { response, number, .. } = self;
        let Item::Message(Message { id, content, .. }) = &mut response.output[at] else { return at };
        content.push(Part::OutputText { annotations: Vec::new(), logprobs: Vec::new(), text: String::new() });
        let data = EventData::Part { item_id: id, output_index: at, content_index: 0, part: &content[0] };
        emit(number, (kind::PART_ADDED, data), sink);
        at
    }

    fn more_text(&mut self, at: usize, (new, tokens): (String, Vec<TokenText>), sink: Sink<'_>) {
        let Self { response, number, show, .. } = self;
        let shown = show.as_ref().map(|show| show(tokens)).unwrap_or_default();
        if new.is_empty() && shown.is_empty() {
            return;
        }
        let Item::Message(Message { id, content, .. }) = &mut response.output[at] else { return };
        let Some(Part::OutputText { logprobs, text, .. }) = content.first_mut() else { return };
        let data = EventData::TextDelta {
            item_id: id,
            output_index: at,
            content_index: 0,
            delta: &new,
            logprobs: &shown,
        };
        emit(number, (kind::TEXT_DELTA, data), sink);
        text.push_str(&new);
        logprobs.extend(shown);
    }

    fn reasoning(&mut self, choice: usize, new: &str, sink: Sink<'_>) {
        if new.is_empty() {
            return;
        }
        let at = match self.choices[choice].open {
            Open::Reasoning(at) => at,
            _ => self.open_reasoning(choice, sink),
        };
        let Self { response, number, .. } = self;
        let Item::Reasoning(Reasoning { id, summary, .. }) = &mut response.output[at] else { return };
        let data = EventData::SummaryDelta { item_id: id, output_index: at, summary_index: 0, delta: new };
        emit(number, (kind::SUMMARY_DELTA, data), sink);
        summary[0].text.push_str(new);
    }

    fn open_reasoning(&mut self, choice: usize, sink: Sink<'_>) -> usize {
        self.close(choice, ItemStatus::Incomplete, sink);
        self.forget_blank(choice);
        let item = Item::Reasoning(Reasoning {
            id: self.ids.next("rs"),
            summary: Vec::new(),
            content: None,
            encrypted_content: None,
            status: Some(ItemStatus::InProgress),
        });
        let at = self.add(choice, item, sink);
        self.choices[choice].open = Open::Reasoning(at);
        let Self { response, number, .. } = self;
        let Item::Reasoning(Reasoning { id, summary, .. }) = &mut response.output[at] else { return at };
        summary.push(SummaryText { text: String::new() });
        let data =
            EventData::SummaryPart { item_id: id, output_index: at, summary_index: 0, part: &summary[0] };
        emit(number, (kind::SUMMARY_PART_ADDED, data), sink);
        at
    }

    fn call(&mut self, choice: usize, (call_id, name): (String, String), sink: Sink<'_>) {
        self.close(choice, ItemStatus::Incomplete, sink);
        self.forget_blank(choice);
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
        self.choices[choice].open = Open::Call(at);
    }

    fn arguments(&mut self, choice: usize, new: &str, sink: Sink<'_>) {
        let Open::Call(at) = self.choices[choice].open else { return };
        if new.is_empty() {
            return;
        }
        let Self { response, number, choices, .. } = self;
        let Item::FunctionCall(Call { id, call_id, arguments, .. }) = &mut response.output[at] else {
            // The input of a custom tool is within the arguments: it is reported when they are complete.
            choices[choice].arguments.push_str(new);
            return;
        };
        let data = EventData::ArgumentsDelta { item_id: id, output_index: at, call_id, delta: new };
        emit(number, (kind::ARGUMENTS_DELTA, data), sink);
        arguments.push_str(new);
    }

    fn end(&mut self, choice: usize, reason: FinishReason, sink: Sink<'_>) {
        if !self.choices[choice].has_items {
            // An answer of nothing, or of space, is a message all the same.
            let at = self.open_message(choice, sink);
            let Choice { blank, tokens, .. } = std::mem::take(&mut self.choices[choice]);
            self.choices[choice].open = Open::Message(at);
            self.more_text(at, (blank, tokens), sink);
        }
        let is_cut = reason == FinishReason::Length;
        if is_cut {
            let reason = "max_output_tokens".to_owned();
            self.response.incomplete_details = Some(IncompleteDetails { reason });
        }
        // A call that is still open here has no end.
        let is_call = matches!(self.choices[choice].open, Open::Call(_));
        let status = if is_cut || is_call { ItemStatus::Incomplete } else { ItemStatus::Completed };
        self.finish(choice, status, sink);
    }

    /// Ends the open item because something else begins, or because its end has come: a call has that `status`,
    /// all else is complete.
    fn close(&mut self, choice: usize, status: ItemStatus, sink: Sink<'_>) {
        let is_call = matches!(self.choices[choice].open, Open::Call(_));
        self.finish(choice, if is_call { status } else { ItemStatus::Completed }, sink);
    }

    fn finish(&mut self, choice: usize, status: ItemStatus, sink: Sink<'_>) {
        let open = std::mem::take(&mut self.choices[choice].open);
        let (Open::Message(at) | Open::Reasoning(at) | Open::Call(at)) = open else { return };
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
                    emit(number, (kind::TEXT_DONE, data), sink);
                    let data = EventData::Part { item_id, output_index, content_index, part };
                    emit(number, (kind::PART_DONE, data), sink);
                }
            }
            Item::Reasoning(Reasoning { id, summary, .. }) => {
                if let Some(part) = summary.first() {
                    let (item_id, output_index, summary_index) = (id.as_str(), at, 0);
                    let text = &part.text;
                    let data = EventData::SummaryDone { item_id, output_index, summary_index, text };
                    emit(number, (kind::SUMMARY_DONE, data), sink);
                    let data = EventData::SummaryPart { item_id, output_index, summary_index, part };
                    emit(number, (kind::SUMMARY_PART_DONE, data), sink);
                }
            }
            Item::FunctionCall(Call { id, call_id, name, arguments, .. }) => {
                let data =
                    EventData::ArgumentsDone { item_id: id, output_index: at, call_id, name, arguments };
                emit(number, (kind::ARGUMENTS_DONE, data), sink);
            }
            Item::CustomToolCall(CustomCall { id, input, .. }) => {
                let (item_id, output_index) = (id.as_str(), at);
                if !input.is_empty() {
                    let data = EventData::InputDelta { item_id, output_index, delta: input };
                    emit(number, (kind::INPUT_DELTA, data), sink);
                }
                emit(number, (kind::INPUT_DONE, EventData::InputDone { item_id, output_index, input }), sink);
            }
            // The model makes none.
            Item::FunctionCallOutput(_) | Item::CustomToolCallOutput(_) => {}
        }
        emit(number, (kind::ITEM_DONE, EventData::Item { output_index: at, item }), sink);
    }

    fn add(&mut self, choice: usize, item: Item, sink: Sink<'_>) -> usize {
        let Self { response, number, .. } = self;
        let at = response.output.len();
        response.output.push(item);
        self.choices[choice].has_items = true;
        let data = EventData::Item { output_index: at, item: &response.output[at] };
        emit(number, (kind::ITEM_ADDED, data), sink);
        at
    }

    fn forget_blank(&mut self, choice: usize) {
        self.choices[choice].blank.clear();
        self.choices[choice].tokens.clear();
    }

    fn tell(&mut self, kind: &'static str, sink: Sink<'_>) {
        let Self { response, number, .. } = self;
        emit(number, (kind, EventData::Response { response }), sink);
    }
}

fn emit(number: &mut u64, (kind, data): (&'static str, EventData<'_>), sink: Sink<'_>) {
    sink(&Event { r#type: kind, data, sequence_number: *number });
    *number += 1;
}

/// An event as it is sent.
pub(crate) fn sent(event: &Event<'_>) -> String {
    let data = serde_json::to_string(event).expect("invariant: an event is JSON");
    format!("event: {}\ndata: {data}\n\n", event.r#type)
}

#[cfg(test)]
mod tests;
