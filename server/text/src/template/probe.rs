//! Determines by trial rendering which tool features a template supports, because templates do not declare them. Each
//! trial renders a conversation with a tool call that has a unique name and checks whether that name is in the output.

use serde_json::{Value as Json, json};

use super::{ChatTemplate, RenderInput, limits};

/// The features for tools and calls that a template supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// The place where the template reads tools.
    pub tools: ToolsPlace,
    /// The format of calls and their results; `None` if the template renders neither.
    pub calls: Option<CallStyle>,
    /// The member of an assistant message that the template renders as reasoning: the first of `reasoning_content`,
    /// `reasoning` and `thinking` that the template renders, or `reasoning_content` if it renders none.
    pub thoughts: &'static str,
    /// Whether the template fails on tools without a description.
    pub needs_descriptions: bool,
}

impl Abilities {
    /// The capabilities of a model without a template.
    pub const NONE: Self =
        Self { tools: ToolsPlace::Nowhere, calls: None, thoughts: THOUGHTS[0], needs_descriptions: false };
}

/// The place where a template reads tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolsPlace {
    /// The variable `tools` of the template.
    Variable,
    /// The member `tools` of the system message, which is a string.
    SystemMessage,
    /// The template does not render tools.
    Nowhere,
}

/// The format that a template expects of the calls in an assistant message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStyle {
    /// The format of the arguments.
    pub arguments: Arguments,
    /// The content of a message that has calls but no text.
    pub content: NoText,
    /// The format of call identifiers.
    pub ids: CallIds,
    /// The number of calls that a message may have.
    pub count: CallCount,
}

/// The format of the arguments of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arguments {
    /// The arguments must be an object.
    Object,
    /// The arguments must be a string with the JSON of an object.
    Text,
}

/// The content of a message without text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoText {
    /// The content is an empty string.
    Empty,
    /// The content is `null`.
    Null,
}

/// The format of call identifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallIds {
    /// The template accepts any identifier.
    Any,
    /// The template accepts exactly nine letters and digits.
    Nine,
}

/// The number of calls that a message may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallCount {
    /// A message has at most one call.
    One,
    /// A message may have any number of calls.
    Many,
}

impl CallCount {
    /// The number of calls to try.
    fn trial_calls(self) -> usize {
        match self {
            Self::One => 1,
            Self::Many => KEYS.len(),
        }
    }
}

/// Names that no template contains.
const TOOL: &str = "zqtool";
const KEY: &str = "zqkey";
const KEYS: [&str; 2] = ["zqkey0", "zqkey1"];
const RESULT: &str = "zqresult";
const THOUGHT: &str = "zqthought";
/// The members from which templates read reasoning, most common first.
const THOUGHTS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

impl ChatTemplate {
    /// Determines by trial rendering which tool features the template supports.
    pub fn abilities(&self) -> Abilities {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(limits::TRIAL_STEPS_MAX));
        let (bos_token, eos_token) = (self.bos_token.clone(), self.eos_token.clone());
        Self { environment, names: self.names.clone(), bos_token, eos_token }.probe()
    }

    fn probe(&self) -> Abilities {
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

    /// Some templates render reasoning only before a call, others only in the last message, so this function tries
    /// both.
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
        let messages = [
            json!({"role": "system", "content": "x", "tools": TOOL}),
            json!({"role": "user", "content": "x"}),
        ];
        let shows = self.trial(&messages, None).is_some_and(|text| text.contains(TOOL));
        if shows { ToolsPlace::SystemMessage } else { ToolsPlace::Nowhere }
    }

    /// Whether the template renders the tools in the variable `tools`, with or without a system message.
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
                    let Some(bytes) = self.rendered_bytes(one) else { continue };
                    // Some templates render an empty text as a separate turn.
                    let null = CallStyle { content: NoText::Null, ..one };
                    let is_less = self.rendered_bytes(null).is_some_and(|null| null < bytes);
                    let one = if is_less { null } else { one };
                    let many = CallStyle { count: CallCount::Many, ..one };
                    return Some(if self.rendered_bytes(many).is_some() { many } else { one });
                }
            }
        }
        None
    }

    /// The length of the rendered conversation with calls in this style, if the template renders the calls and
    /// their results unchanged.
    fn rendered_bytes(&self, style: CallStyle) -> Option<usize> {
        let text = self.trial(&conversation(style), Some(&[tool()]))?;
        // The model should not write arguments in Python notation or within a JSON string.
        let misquoted = [format!("'{KEY}"), format!("\\\"{KEY}")];
        let is_rendered = KEYS[..style.count.trial_calls()].iter().all(|key| text.contains(key))
            && text.contains(RESULT)
            && !misquoted.iter().any(|key| text.contains(key.as_str()));
        is_rendered.then_some(text.len())
    }

    /// Renders a trial conversation; `None` if the template rejects it.
    fn trial(&self, messages: &[Json], tools: Option<&[Json]>) -> Option<String> {
        let input = RenderInput { messages, tools, add_generation_prompt: true, ..RenderInput::default() };
        self.render(&input).ok()
    }
}

/// Returns a question, calls in this style, and their results.
fn conversation(style: CallStyle) -> Vec<Json> {
    let count = style.count.trial_calls();
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
    fn templates_of_model_families_are_distinguished() {
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
    fn arguments_are_text_for_templates_that_concatenate_strings() {
        let source = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}\
            {{ '```json\\n' + c.function.arguments + '```' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        let style = CallStyle { arguments: Arguments::Text, ..OBJECTS };
        assert_eq!(abilities(source).calls, Some(style));
        let python = source.replace(" + c.function.arguments + ", " ~ c.function.arguments ~ ");
        assert_eq!(abilities(&python).calls, Some(style));
    }

    #[test]
    fn a_message_with_calls_has_no_content_if_the_template_requires_none() {
        let source = "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}\
            {{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(abilities(source).calls, Some(CallStyle { content: NoText::Null, ..OBJECTS }));
    }

    #[test]
    fn an_empty_text_is_omitted_if_it_would_be_a_separate_turn() {
        let source = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\
            {% if m.content is not none %}<turn>{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(abilities(source).calls, Some(CallStyle { content: NoText::Null, ..OBJECTS }));
    }

    #[test]
    fn a_template_that_concatenates_descriptions_needs_them() {
        let source = "{% for t in tools %}{{ t.function.name }}{{ 'JOIN' }}{% endfor %}";
        assert!(!abilities(source).needs_descriptions);
        let joined = source.replace("'JOIN'", "'// ' + t.function.description");
        assert!(abilities(&joined).needs_descriptions);
    }

    #[test]
    fn reasoning_uses_the_member_that_the_template_renders() {
        let source = "{% for m in messages %}{{ m.content }}{% if m.NAME is string %}{{ m.NAME }}{% endif %}{% endfor %}";
        for name in THOUGHTS {
            assert_eq!(abilities(&source.replace("NAME", name)).thoughts, name);
        }
        assert_eq!(abilities(&source.replace("NAME", "idea")).thoughts, "reasoning_content");
        // The template of gpt-oss renders reasoning before a call, but not together with content.
        let harmony = "{% for m in messages %}{% if m.tool_calls and m.thinking %}{% if m.content %}{{ \
            raise_exception('both') }}{% endif %}{{ m.thinking }}{% endif %}{{ m.tool_calls }}{{ m.content }}{% endfor %}";
        assert_eq!(abilities(harmony).thoughts, "thinking");
    }
}
