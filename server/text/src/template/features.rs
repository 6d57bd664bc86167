//! Determines which tool and reasoning features a template supports. Templates do not declare these features, so this
//! module renders trial conversations. Each trial renders a conversation, with or without a tool, and checks whether
//! unique words of the input are in the output.

use serde_json::{Value as Json, json};

use super::{ChatTemplate, RenderInput, limits};

/// The tool and reasoning features that a template supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateFeatures {
    /// The location from which the template reads tools.
    pub tools_location: ToolsLocation,
    /// The format of calls and their results; `None` if the template does not render both.
    pub call_style: Option<CallStyle>,
    /// The member of an assistant message that the template renders as reasoning: the first of `reasoning_content`,
    /// `reasoning` and `thinking` that the template renders, or `reasoning_content` if it renders none.
    pub reasoning_member: &'static str,
    /// Whether the template cannot render tools without a description.
    pub needs_tool_descriptions: bool,
}

impl TemplateFeatures {
    /// The features of a model without a template.
    pub const NONE: Self = Self {
        tools_location: ToolsLocation::Unsupported,
        call_style: None,
        reasoning_member: REASONING_MEMBERS[0],
        needs_tool_descriptions: false,
    };
}

/// The location from which a template reads tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolsLocation {
    /// The variable `tools` of the template.
    Variable,
    /// The member `tools` of the system message, which is a string.
    SystemMessage,
    /// The template does not render tools.
    Unsupported,
}

/// The format in which a template expects the calls in an assistant message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStyle {
    /// The format of the arguments.
    pub arguments: ArgumentsFormat,
    /// The content of a message that has calls but no text.
    pub empty_content: EmptyContent,
    /// The format of call identifiers.
    pub ids: CallIdFormat,
    /// The number of calls that a message may have.
    pub count: CallCount,
}

/// The format of the arguments of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentsFormat {
    /// The arguments must be an object.
    Object,
    /// The arguments must be a string that contains a JSON object.
    JsonString,
}

/// The content of a message without text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyContent {
    /// The content is an empty string.
    EmptyString,
    /// The content is `null`.
    Null,
}

/// The format of call identifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallIdFormat {
    /// The template accepts any identifier.
    Any,
    /// The template accepts only identifiers of exactly nine letters and digits.
    NineCharacters,
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
    /// The number of calls in a trial conversation.
    fn trial_calls(self) -> usize {
        match self {
            Self::One => 1,
            Self::Many => KEYS.len(),
        }
    }
}

/// Words that no template contains.
const TOOL: &str = "zqtool";
const KEY: &str = "zqkey";
const KEYS: [&str; 2] = ["zqkey0", "zqkey1"];
const RESULT: &str = "zqresult";
const REASONING: &str = "zqthought";
/// The members from which templates read reasoning, most common first.
const REASONING_MEMBERS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

impl ChatTemplate {
    /// Renders trial conversations to determine which tool and reasoning features the template supports.
    pub fn features(&self) -> TemplateFeatures {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(limits::TRIAL_STEPS_MAX));
        let (bos_token, eos_token) = (self.bos_token.clone(), self.eos_token.clone());
        Self { environment, names: self.names.clone(), bos_token, eos_token }.detect()
    }

    fn detect(&self) -> TemplateFeatures {
        let call_style = self.call_style();
        let tools_location = self.tools_location();
        let mut bare = tool();
        bare["function"].as_object_mut().map(|function| function.remove("description"));
        TemplateFeatures {
            tools_location,
            call_style,
            reasoning_member: self.reasoning_member(call_style),
            needs_tool_descriptions: tools_location == ToolsLocation::Variable && !self.shows_tool(&bare),
        }
    }

    /// Returns the member that the template renders as reasoning. Some templates render reasoning only before a call,
    /// others only in the last message, so this function tries both.
    fn reasoning_member(&self, call_style: Option<CallStyle>) -> &'static str {
        let shows = |member: &&&str| {
            let mut before_call =
                call_style.map(|style| conversation(CallStyle { count: CallCount::One, ..style }));
            if let Some(messages) = &mut before_call {
                messages[1][**member] = json!(REASONING);
            }
            let at_end = vec![
                json!({"role": "user", "content": "x"}),
                json!({"role": "assistant", "content": "x", **member: REASONING}),
            ];
            let mut trials = before_call.into_iter().chain([at_end]);
            trials.any(|messages| {
                self.trial(&messages, Some(&[tool()])).is_some_and(|text| text.contains(REASONING))
            })
        };
        REASONING_MEMBERS.iter().find(shows).copied().unwrap_or(REASONING_MEMBERS[0])
    }

    fn tools_location(&self) -> ToolsLocation {
        if self.shows_tool(&tool()) {
            return ToolsLocation::Variable;
        }
        let messages = [
            json!({"role": "system", "content": "x", "tools": TOOL}),
            json!({"role": "user", "content": "x"}),
        ];
        let shows = self.trial(&messages, None).is_some_and(|text| text.contains(TOOL));
        if shows { ToolsLocation::SystemMessage } else { ToolsLocation::Unsupported }
    }

    /// Whether the template renders `tool` if the variable `tools` contains it, in a conversation with or without a
    /// system message.
    fn shows_tool(&self, tool: &Json) -> bool {
        let [system, user] = ["system", "user"].map(|role| json!({"role": role, "content": "x"}));
        let tools = std::slice::from_ref(tool);
        [vec![user.clone()], vec![system, user]]
            .iter()
            .any(|messages| self.trial(messages, Some(tools)).is_some_and(|text| text.contains(TOOL)))
    }

    fn call_style(&self) -> Option<CallStyle> {
        for ids in [CallIdFormat::Any, CallIdFormat::NineCharacters] {
            for empty_content in [EmptyContent::EmptyString, EmptyContent::Null] {
                for arguments in [ArgumentsFormat::Object, ArgumentsFormat::JsonString] {
                    let one = CallStyle { arguments, empty_content, ids, count: CallCount::One };
                    let Some(bytes) = self.rendered_bytes(one) else { continue };
                    // Some templates render a separate turn for content that is an empty string, so use `null` if that
                    // makes the output shorter.
                    let null = CallStyle { empty_content: EmptyContent::Null, ..one };
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
        // Reject arguments in Python notation or within a JSON string, because the model would imitate them.
        let misquoted = [format!("'{KEY}"), format!("\\\"{KEY}")];
        let is_rendered = KEYS[..style.count.trial_calls()].iter().all(|key| text.contains(key))
            && text.contains(RESULT)
            && !misquoted.iter().any(|key| text.contains(key.as_str()));
        is_rendered.then_some(text.len())
    }

    /// Renders a trial conversation; `None` if this fails, for example because the template rejects the conversation.
    fn trial(&self, messages: &[Json], tools: Option<&[Json]>) -> Option<String> {
        let input = RenderInput { messages, tools, add_generation_prompt: true, ..RenderInput::default() };
        self.render(&input).ok()
    }
}

/// Returns a question, calls in this style, and their results.
fn conversation(style: CallStyle) -> Vec<Json> {
    let count = style.count.trial_calls();
    let id = |index: usize| match style.ids {
        CallIdFormat::Any => format!("call_abcdefghijklmnopqrstuv{index:02}"),
        CallIdFormat::NineCharacters => format!("abcdefg{index:02}"),
    };
    let call = |(index, key): (usize, &&str)| {
        let arguments = match style.arguments {
            ArgumentsFormat::Object => json!({*key: "x"}),
            ArgumentsFormat::JsonString => json!(json!({*key: "x"}).to_string()),
        };
        json!({"id": id(index), "type": "function", "function": {"name": TOOL, "arguments": arguments}})
    };
    let calls: Vec<Json> = KEYS[..count].iter().enumerate().map(call).collect();
    let content = match style.empty_content {
        EmptyContent::EmptyString => json!(""),
        EmptyContent::Null => Json::Null,
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

    fn features(source: &str) -> TemplateFeatures {
        let [begin, end] = ["<s>", "</s>"].map(|token| Some(token.to_owned()));
        ChatTemplate::new([(DEFAULT.to_owned(), source.to_owned())], begin, end).unwrap().features()
    }

    fn golden(name: &str) -> TemplateFeatures {
        let golden: Json = serde_json::from_str(include_str!("../../tests/golden/templates.json")).unwrap();
        features(golden["templates"][name].as_str().unwrap())
    }

    fn shown(tools_location: ToolsLocation, call_style: Option<CallStyle>) -> TemplateFeatures {
        TemplateFeatures { tools_location, call_style, ..TemplateFeatures::NONE }
    }

    const OBJECTS: CallStyle = CallStyle {
        arguments: ArgumentsFormat::Object,
        empty_content: EmptyContent::EmptyString,
        ids: CallIdFormat::Any,
        count: CallCount::Many,
    };

    #[test]
    fn templates_of_model_families_are_distinguished() {
        assert_eq!(golden("qwen3"), shown(ToolsLocation::Variable, Some(OBJECTS)));
        let one = CallStyle { count: CallCount::One, ..OBJECTS };
        assert_eq!(golden("llama3"), shown(ToolsLocation::Variable, Some(one)));
        let nine = CallStyle { ids: CallIdFormat::NineCharacters, ..OBJECTS };
        assert_eq!(golden("mistral"), shown(ToolsLocation::Variable, Some(nine)));
        assert_eq!(golden("phi"), shown(ToolsLocation::SystemMessage, None));
        for without in ["chatml", "gemma3"] {
            assert_eq!(golden(without), TemplateFeatures::NONE, "{without}");
        }
    }

    #[test]
    fn arguments_are_text_for_templates_that_concatenate_strings() {
        let source = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}\
            {{ '```json\\n' + c.function.arguments + '```' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        let style = CallStyle { arguments: ArgumentsFormat::JsonString, ..OBJECTS };
        assert_eq!(features(source).call_style, Some(style));
        let python = source.replace(" + c.function.arguments + ", " ~ c.function.arguments ~ ");
        assert_eq!(features(&python).call_style, Some(style));
    }

    #[test]
    fn a_message_with_calls_has_no_content_if_the_template_requires_none() {
        let source = "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}\
            {{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(
            features(source).call_style,
            Some(CallStyle { empty_content: EmptyContent::Null, ..OBJECTS })
        );
    }

    #[test]
    fn an_empty_text_is_omitted_if_it_would_be_a_separate_turn() {
        let source = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\
            {% if m.content is not none %}<turn>{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(
            features(source).call_style,
            Some(CallStyle { empty_content: EmptyContent::Null, ..OBJECTS })
        );
    }

    #[test]
    fn a_template_that_concatenates_descriptions_needs_them() {
        let source = "{% for t in tools %}{{ t.function.name }}{{ 'JOIN' }}{% endfor %}";
        assert!(!features(source).needs_tool_descriptions);
        let joined = source.replace("'JOIN'", "'// ' + t.function.description");
        assert!(features(&joined).needs_tool_descriptions);
    }

    #[test]
    fn reasoning_uses_the_member_that_the_template_renders() {
        let source = "{% for m in messages %}{{ m.content }}{% if m.NAME is string %}{{ m.NAME }}{% endif %}{% endfor %}";
        for name in REASONING_MEMBERS {
            assert_eq!(features(&source.replace("NAME", name)).reasoning_member, name);
        }
        assert_eq!(features(&source.replace("NAME", "idea")).reasoning_member, "reasoning_content");
        // The template of gpt-oss renders reasoning before a call, but not together with content.
        let harmony = "{% for m in messages %}{% if m.tool_calls and m.thinking %}{% if m.content %}{{ \
            raise_exception('both') }}{% endif %}{{ m.thinking }}{% endif %}{{ m.tool_calls }}{{ m.content }}{% endfor %}";
        assert_eq!(features(harmony).reasoning_member, "thinking");
    }
}
