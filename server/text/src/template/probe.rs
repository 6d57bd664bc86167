//! What a template can show of tools, found out by trying: templates do not say. Each trial is a conversation
//! with a call of a tool that has a name of its own, and what counts is whether that comes out.

use serde_json::{Value as Json, json};

use super::{ChatTemplate, RenderInput, limits};

/// What a template can show of tools and calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Where it looks for tools.
    pub tools: ToolsPlace,
    /// How it wants calls and their results; `None` if it shows neither.
    pub calls: Option<CallStyle>,
    /// The member of an assistant's message that it takes for what was thought before: the first of
    /// `reasoning_content`, `reasoning` and `thinking` that it shows, or the first if it shows none.
    pub thoughts: &'static str,
    /// Whether it fails on a tool that has no description.
    pub needs_descriptions: bool,
}

impl Abilities {
    /// Of a model without a template.
    pub const NONE: Self =
        Self { tools: ToolsPlace::Nowhere, calls: None, thoughts: THOUGHTS[0], needs_descriptions: false };
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

impl CallCount {
    /// How many calls it is found out with.
    fn tried(self) -> usize {
        match self {
            Self::One => 1,
            Self::Many => KEYS.len(),
        }
    }
}

/// Names that no template writes by itself.
const TOOL: &str = "zqtool";
const KEY: &str = "zqkey";
const KEYS: [&str; 2] = ["zqkey0", "zqkey1"];
const RESULT: &str = "zqresult";
const THOUGHT: &str = "zqthought";
/// What templates call a thought, the most usual first.
const THOUGHTS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

impl ChatTemplate {
    /// Finds out what the template can show of tools.
    pub fn abilities(&self) -> Abilities {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(limits::TRIAL_STEPS_MAX));
        let (bos_token, eos_token) = (self.bos_token.clone(), self.eos_token.clone());
        Self { environment, names: self.names.clone(), bos_token, eos_token }.found_out()
    }

    fn found_out(&self) -> Abilities {
        let calls = self.call_style();
        let tools = self.tools_place();
        let mut bare = tool();
        bare["function"].as_object_mut().map(|function| function.remove("description"));
        Abilities {
            tools,
            calls,
            thoughts: self.thoughts_member(calls),
            needs_descriptions: tools == ToolsPlace::Variable && !self.shows_tool(&bare),
        }
    }

    /// Thoughts are shown before a call alone, or in the last message alone: both are tried.
    fn thoughts_member(&self, calls: Option<CallStyle>) -> &'static str {
        let shows = |member: &&&str| {
            let mut before_call =
                calls.map(|style| conversation(CallStyle { count: CallCount::One, ..style }));
            if let Some(messages) = &mut before_call {
                messages[1][**member] = json!(THOUGHT);
            }
            let at_end = vec![
                json!({"role": "user", "content": "x"}),
                json!({"role": "assistant", "content": "x", **member: THOUGHT}),
            ];
            let mut trials = before_call.into_iter().chain([at_end]);
            trials.any(|messages| {
                self.trial(&messages, Some(&[tool()])).is_some_and(|text| text.contains(THOUGHT))
            })
        };
        THOUGHTS.iter().find(shows).copied().unwrap_or(THOUGHTS[0])
    }

    fn tools_place(&self) -> ToolsPlace {
        if self.shows_tool(&tool()) {
            return ToolsPlace::Variable;
        }
        let told = [
            json!({"role": "system", "content": "x", "tools": TOOL}),
            json!({"role": "user", "content": "x"}),
        ];
        let shows = self.trial(&told, None).is_some_and(|text| text.contains(TOOL));
        if shows { ToolsPlace::SystemMessage } else { ToolsPlace::Nowhere }
    }

    /// Whether a tool comes out of the variable, without the system's message or with one.
    fn shows_tool(&self, tool: &Json) -> bool {
        let [system, user] = ["system", "user"].map(|role| json!({"role": role, "content": "x"}));
        let tools = std::slice::from_ref(tool);
        [vec![user.clone()], vec![system, user]]
            .iter()
            .any(|messages| self.trial(messages, Some(tools)).is_some_and(|text| text.contains(TOOL)))
    }

    fn call_style(&self) -> Option<CallStyle> {
        for ids in [CallIds::Any, CallIds::Nine] {
            for content in [NoText::Empty, NoText::Null] {
                for arguments in [Arguments::Object, Arguments::Text] {
                    let one = CallStyle { arguments, content, ids, count: CallCount::One };
                    let Some(bytes) = self.shown_bytes(one) else { continue };
                    // Some make a turn of its own of an empty text.
                    let null = CallStyle { content: NoText::Null, ..one };
                    let is_less = self.shown_bytes(null).is_some_and(|null| null < bytes);
                    let one = if is_less { null } else { one };
                    let many = CallStyle { count: CallCount::Many, ..one };
                    return Some(if self.shown_bytes(many).is_some() { many } else { one });
                }
            }
        }
        None
    }

    /// How long a conversation with calls in this style is, if these and their results come out as they are.
    fn shown_bytes(&self, style: CallStyle) -> Option<usize> {
        let text = self.trial(&conversation(style), Some(&[tool()]))?;
        // As Python writes it, or within a string of JSON, it is not what the model is to write.
        let spoiled = [format!("'{KEY}"), format!("\\\"{KEY}")];
        let shown = KEYS[..style.count.tried()].iter().all(|key| text.contains(key))
            && text.contains(RESULT)
            && !spoiled.iter().any(|spoiled| text.contains(spoiled.as_str()));
        shown.then_some(text.len())
    }

    /// `None` if the template refuses.
    fn trial(&self, messages: &[Json], tools: Option<&[Json]>) -> Option<String> {
        let input = RenderInput { messages, tools, add_generation_prompt: true, ..RenderInput::default() };
        self.render(&input).ok()
    }
}

/// A question, calls in this style, and their results.
fn conversation(style: CallStyle) -> Vec<Json> {
    let count = style.count.tried();
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
    messages
        .extend((0..count).map(
            |index| json!({"role": "tool", "tool_call_id": id(index), "name": TOOL, "content": RESULT}),
        ));
    messages
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

    fn shown(tools: ToolsPlace, calls: Option<CallStyle>) -> Abilities {
        Abilities { tools, calls, ..Abilities::NONE }
    }

    const OBJECTS: CallStyle = CallStyle {
        arguments: Arguments::Object,
        content: NoText::Empty,
        ids: CallIds::Any,
        count: CallCount::Many,
    };

    #[test]
    fn templates_of_the_families_are_told_apart() {
        assert_eq!(golden("qwen3"), shown(ToolsPlace::Variable, Some(OBJECTS)));
        let one = CallStyle { count: CallCount::One, ..OBJECTS };
        assert_eq!(golden("llama3"), shown(ToolsPlace::Variable, Some(one)));
        let nine = CallStyle { ids: CallIds::Nine, ..OBJECTS };
        assert_eq!(golden("mistral"), shown(ToolsPlace::Variable, Some(nine)));
        assert_eq!(golden("phi"), shown(ToolsPlace::SystemMessage, None));
        for without in ["chatml", "gemma3"] {
            assert_eq!(golden(without), Abilities::NONE, "{without}");
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

    #[test]
    fn an_empty_text_is_left_out_where_it_would_be_a_turn_of_its_own() {
        let source = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\
            {% if m.content is not none %}<turn>{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(abilities(source).calls, Some(CallStyle { content: NoText::Null, ..OBJECTS }));
    }

    #[test]
    fn a_template_that_adds_descriptions_up_needs_them() {
        let source = "{% for t in tools %}{{ t.function.name }}{{ 'JOIN' }}{% endfor %}";
        assert!(!abilities(source).needs_descriptions);
        let joined = source.replace("'JOIN'", "'// ' + t.function.description");
        assert!(abilities(&joined).needs_descriptions);
    }

    #[test]
    fn thoughts_go_by_the_name_that_a_template_shows() {
        let source = "{% for m in messages %}{{ m.content }}{% if m.NAME is string %}{{ m.NAME }}{% endif %}{% endfor %}";
        for name in THOUGHTS {
            assert_eq!(abilities(&source.replace("NAME", name)).thoughts, name);
        }
        assert_eq!(abilities(&source.replace("NAME", "idea")).thoughts, "reasoning_content");
        // gpt-oss: before a call, and not beside content.
        let harmony = "{% for m in messages %}{% if m.tool_calls and m.thinking %}{% if m.content %}{{ \
            raise_exception('both') }}{% endif %}{{ m.thinking }}{% endif %}{{ m.tool_calls }}{{ m.content }}{% endfor %}";
        assert_eq!(abilities(harmony).thoughts, "thinking");
    }
}
