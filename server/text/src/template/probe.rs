//! What a template can show of tools, found out by trying: templates do not say. Each trial is a conversation
//! with a call of a tool that has a name of its own, and what counts is whether that comes out.

use serde_json::{Value as Json, json};

use super::{ChatTemplate, RenderInput};

/// What a template can show of tools and calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Where it looks for tools.
    pub tools: ToolsPlace,
    /// How it wants calls and their results; `None` if it shows neither.
    pub calls: Option<CallStyle>,
}

/// Where a template looks for tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolsPlace {
    /// In the variable `tools`.
    Variable,
    /// In the member `tools` of the system's message, as text.
    SystemMessage,
    /// Nowhere.
    Nowhere,
}

/// How a template wants the calls of an assistant's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStyle {
    /// The form of the arguments.
    pub arguments: Arguments,
    /// The content of a message that has calls and no text.
    pub content: NoText,
    /// What calls may be named.
    pub ids: CallIds,
    /// How many calls there may be in a message.
    pub count: CallCount,
}

/// The form of a call's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arguments {
    /// An object.
    Object,
    /// The JSON of one.
    Text,
}

/// The content of a message without text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoText {
    /// An empty string.
    Empty,
    /// Nothing.
    Null,
}

/// What calls may be named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallIds {
    /// Anything.
    Any,
    /// Nine letters and digits.
    Nine,
}

/// How many calls a message may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallCount {
    /// One.
    One,
    /// Any number.
    Many,
}

/// Names that no template writes by itself.
const TOOL: &str = "zqtool";
const KEY: &str = "zqkey";
const KEYS: [&str; 2] = ["zqkey0", "zqkey1"];
const RESULT: &str = "zqresult";

impl ChatTemplate {
    /// Finds out what the template can show of tools.
    pub fn abilities(&self) -> Abilities {
        Abilities { tools: self.tools_place(), calls: self.call_style() }
    }

    fn tools_place(&self) -> ToolsPlace {
        let user = json!({"role": "user", "content": "x"});
        let system = json!({"role": "system", "content": "x"});
        let tools = [tool()];
        let shows = |messages: &[Json], tools: Option<&[Json]>| {
            self.trial(messages, tools).is_some_and(|text| text.contains(TOOL))
        };
        if shows(std::slice::from_ref(&user), Some(&tools)) || shows(&[system, user.clone()], Some(&tools)) {
            return ToolsPlace::Variable;
        }
        let told = json!({"role": "system", "content": "x", "tools": TOOL});
        if shows(&[told, user], None) { ToolsPlace::SystemMessage } else { ToolsPlace::Nowhere }
    }

    fn call_style(&self) -> Option<CallStyle> {
        for ids in [CallIds::Any, CallIds::Nine] {
            for content in [NoText::Empty, NoText::Null] {
                for arguments in [Arguments::Object, Arguments::Text] {
                    let one = CallStyle { arguments, content, ids, count: CallCount::One };
                    if self.shows_calls(one) {
                        let many = CallStyle { count: CallCount::Many, ..one };
                        return Some(if self.shows_calls(many) { many } else { one });
                    }
                }
            }
        }
        None
    }

    /// Whether calls in this style, and their results, come out as they are.
    fn shows_calls(&self, style: CallStyle) -> bool {
        let count = match style.count {
            CallCount::One => 1,
            CallCount::Many => KEYS.len(),
        };
        let id = |index: usize| match style.ids {
            CallIds::Any => format!("call_abcdefghijklmnopqrstuv{index:02}"),
            CallIds::Nine => format!("abcdefg{index:02}"),
        };
        let call = |(index, key): (usize, &&str)| {
            let arguments = match style.arguments {
                Arguments::Object => json!({*key: "x"}),
                Arguments::Text => json!(json!({*key: "x"}).to_string()),
            };
            json!({"id": id(index), "type": "function", "function": {"name": TOOL, "arguments": arguments}})
        };
        let calls: Vec<Json> = KEYS[..count].iter().enumerate().map(call).collect();
        let content = match style.content {
            NoText::Empty => json!(""),
            NoText::Null => Json::Null,
        };
        let mut messages = vec![
            json!({"role": "user", "content": "x"}),
            json!({"role": "assistant", "content": content, "tool_calls": calls}),
        ];
        messages.extend((0..count).map(
            |index| json!({"role": "tool", "tool_call_id": id(index), "name": TOOL, "content": RESULT}),
        ));
        let Some(text) = self.trial(&messages, Some(&[tool()])) else { return false };
        // As Python writes it, or within a string of JSON, it is not what the model is to write.
        let spoiled = [format!("'{KEY}"), format!("\\\"{KEY}")];
        KEYS[..count].iter().all(|key| text.contains(key))
            && text.contains(RESULT)
            && !spoiled.iter().any(|spoiled| text.contains(spoiled.as_str()))
    }

    /// `None` if the template refuses.
    fn trial(&self, messages: &[Json], tools: Option<&[Json]>) -> Option<String> {
        let input = RenderInput { messages, tools, add_generation_prompt: true, ..RenderInput::default() };
        self.render(&input).ok()
    }
}

fn tool() -> Json {
    json!({
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "x",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::super::DEFAULT;
    use super::*;

    fn abilities(source: &str) -> Abilities {
        let [begin, end] = ["<s>", "</s>"].map(|token| Some(token.to_owned()));
        ChatTemplate::new([(DEFAULT.to_owned(), source.to_owned())], begin, end).unwrap().abilities()
    }

    fn golden(name: &str) -> Abilities {
        let golden: Json = serde_json::from_str(include_str!("../../tests/golden/templates.json")).unwrap();
        abilities(golden["templates"][name].as_str().unwrap())
    }

    const OBJECTS: CallStyle = CallStyle {
        arguments: Arguments::Object,
        content: NoText::Empty,
        ids: CallIds::Any,
        count: CallCount::Many,
    };

    #[test]
    fn templates_of_the_families_are_told_apart() {
        assert_eq!(golden("qwen3"), Abilities { tools: ToolsPlace::Variable, calls: Some(OBJECTS) });
        let one = CallStyle { count: CallCount::One, ..OBJECTS };
        assert_eq!(golden("llama3"), Abilities { tools: ToolsPlace::Variable, calls: Some(one) });
        let nine = CallStyle { ids: CallIds::Nine, ..OBJECTS };
        assert_eq!(golden("mistral"), Abilities { tools: ToolsPlace::Variable, calls: Some(nine) });
        assert_eq!(golden("phi"), Abilities { tools: ToolsPlace::SystemMessage, calls: None });
        for without in ["chatml", "gemma3"] {
            assert_eq!(golden(without), Abilities { tools: ToolsPlace::Nowhere, calls: None }, "{without}");
        }
    }

    #[test]
    fn arguments_go_as_text_where_a_template_joins_strings() {
        let source = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}\
            {{ '```json\\n' + c.function.arguments + '```' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        let style = CallStyle { arguments: Arguments::Text, ..OBJECTS };
        assert_eq!(abilities(source).calls, Some(style));
        let python = source.replace(" + c.function.arguments + ", " ~ c.function.arguments ~ ");
        assert_eq!(abilities(&python).calls, Some(style));
    }

    #[test]
    fn a_message_with_calls_has_no_content_where_a_template_asks_for_none() {
        let source = "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}\
            {{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(abilities(source).calls, Some(CallStyle { content: NoText::Null, ..OBJECTS }));
    }
}
