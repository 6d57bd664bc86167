//! From items to the messages that chat templates know. Items are finer: what the assistant thinks, says and calls
//! in one turn are several of them, and one message.

use serde_json::{Map, Value, json};
use server_openai::responses::{Call, CallOutput, Item, Message as Said, Output, Part, Reasoning};
use server_openai::{Content, Message};

/// The messages that say the same as the items, after the instructions.
pub(crate) fn messages<'a>(
    instructions: Option<&str>,
    items: impl Iterator<Item = &'a Item>,
) -> Vec<Message> {
    let mut all = Turns::default();
    if let Some(instructions) = instructions.filter(|text| !text.is_empty()) {
        all.system(instructions.to_owned());
    }
    for item in items {
        match item {
            Item::Message(said) => all.message(said),
            Item::Reasoning(reasoning) => all.reasoning(reasoning),
            Item::FunctionCall(call) => all.call(call),
            Item::FunctionCallOutput(output) => all.output(output),
        }
    }
    all.finish()
}

/// Messages in the making.
#[derive(Default)]
struct Turns {
    done: Vec<Message>,
    /// What the assistant says, as far as it is known.
    open: Option<Message>,
    /// Tools by their calls: some templates name them in the answer again.
    called: Vec<(String, String)>,
}

impl Turns {
    fn message(&mut self, said: &Said) {
        let text = joined(&said.content);
        if said.role != "assistant" {
            self.close();
            // The first message of many templates is the only one that may be the system's.
            if said.role == "user" || self.done.iter().any(|message| message.role != "system") {
                self.done.push(message(&said.role, text));
            } else {
                self.system(text);
            }
            return;
        }
        match &mut self.open {
            // It goes on: what was thought and called so far has no text.
            Some(open) if open.content.is_none() => open.content = Some(Content::Text(text)),
            _ => {
                self.close();
                self.open = Some(message("assistant", text));
            }
        }
    }

    /// What is said before everything else, in one message.
    fn system(&mut self, text: String) {
        match self.done.first_mut() {
            Some(Message { content: Some(Content::Text(before)), .. }) => {
                before.push_str("\n\n");
                before.push_str(&text);
            }
            _ => self.done.push(message("system", text)),
        }
    }

    fn reasoning(&mut self, reasoning: &Reasoning) {
        let content: Vec<&str> = reasoning.content.iter().flatten().map(|part| part.text.as_str()).collect();
        let summary = reasoning.summary.iter().map(|part| part.text.as_str()).collect();
        let text = if content.is_empty() { summary } else { content }.join("\n");
        if text.is_empty() {
            return;
        }
        match &mut self.open {
            Some(Message { content: None, tool_calls: None, reasoning_content: Some(before), .. }) => {
                before.push('\n');
                before.push_str(&text);
            }
            _ => {
                self.close();
                let role = "assistant".to_owned();
                self.open = Some(Message { role, reasoning_content: Some(text), ..Message::default() });
            }
        }
    }

    fn call(&mut self, call: &Call) {
        self.called.push((call.call_id.clone(), call.name.clone()));
        let mut shown = Map::new();
        shown.insert("id".to_owned(), json!(call.call_id));
        shown.insert("type".to_owned(), json!("function"));
        shown.insert("function".to_owned(), json!({"name": call.name, "arguments": call.arguments}));
        let open =
            self.open.get_or_insert_with(|| Message { role: "assistant".to_owned(), ..Message::default() });
        open.tool_calls.get_or_insert_default().push(shown);
    }

    fn output(&mut self, output: &CallOutput) {
        self.close();
        let text = match &output.output {
            Output::Text(text) => text.clone(),
            Output::Parts(parts) => joined(parts),
        };
        let called = self.called.iter().rev().find(|(call, _)| *call == output.call_id);
        let mut answer = message("tool", text);
        answer.name = called.map(|(_, name)| name.clone());
        answer.tool_call_id = (!output.call_id.is_empty()).then(|| output.call_id.clone());
        self.done.push(answer);
    }

    fn close(&mut self) {
        self.done.extend(self.open.take());
    }

    fn finish(mut self) -> Vec<Message> {
        self.close();
        self.done
    }
}

fn message(role: &str, text: String) -> Message {
    Message { role: role.to_owned(), content: Some(Content::Text(text)), ..Message::default() }
}

fn joined(parts: &[Part]) -> String {
    parts.iter().map(Part::text).collect::<Vec<_>>().join("\n")
}

/// Where a conversation that is too long may be cut: what begins at these indices is a conversation of its own.
/// What the system says at the beginning stays.
pub(crate) fn cuts(messages: &[Message]) -> Vec<usize> {
    let first = usize::from(messages.first().is_some_and(|message| message.role == "system"));
    (first..messages.len()).filter(|&at| at > first && messages[at].role == "user").collect()
}

/// The conversation without what is before `cut`.
pub(crate) fn without(messages: &[Message], cut: usize) -> Vec<Message> {
    let first = usize::from(messages.first().is_some_and(|message| message.role == "system"));
    messages[..first].iter().chain(&messages[cut..]).cloned().collect()
}

/// As the endpoint shows a tool: flat.
pub(crate) fn shown(tool: &super::super::tools::Tool) -> Value {
    json!({
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    })
}
