//! Defines the forms of tool calls in each tool call format. The parser turns an answer with such a form into calls of
//! the offered tools. The arguments match the schemas of the tools, unless a schema is not supported.

use std::collections::HashSet;

use serde_json::{Value, json};
use server_guidance::{Dialect, Form, Tag, TriggeredTags, Vocabulary};
use server_parsers::ToolFormat;

use crate::prepare::conversation::Conversation;
use crate::prepare::tools::{Tool, ToolChoice};

/// Returns the tools that may be called, with their indices in the request.
pub(super) fn offered(conversation: &Conversation) -> impl Iterator<Item = (usize, &Tool)> {
    let allowed = |(_, tool): &(usize, &Tool)| conversation.choice.allows(&tool.name);
    conversation.tools.iter().enumerate().filter(allowed)
}

fn schema_path(tool: &Tool) -> String {
    format!("{}.parameters", tool.path)
}

/// Whether the path `at` is in the schema of this tool.
pub(super) fn is_of(at: &str, tool: &Tool) -> bool {
    at.strip_prefix(&schema_path(tool)).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The calls that a request allows.
pub(super) struct Calls<'a> {
    format: ToolFormat,
    tools: Vec<(usize, &'a Tool)>,
    /// Indices of the tools whose arguments may be any object.
    unconstrained: &'a HashSet<usize>,
    parallel: bool,
}

impl<'a> Calls<'a> {
    pub(super) fn new(
        conversation: &'a Conversation,
        format: ToolFormat,
        unconstrained: &'a HashSet<usize>,
    ) -> Self {
        // If the request names a tool, that tool is called exactly once.
        let is_named = matches!(conversation.choice, ToolChoice::Named(_));
        let parallel = conversation.parallel.unwrap_or(true) && !is_named;
        Self { format, tools: offered(conversation).collect(), unconstrained, parallel }
    }

    /// Returns the form of an answer that consists of one or more calls and nothing else; `None` if the format of the
    /// model is unknown or Harmony, for which `harmony` defines the forms.
    pub(super) fn alone(&self, vocabulary: &Vocabulary) -> Option<Form> {
        let one = |marked: MarkedForm| marked.form();
        Some(match self.format {
            ToolFormat::None | ToolFormat::Gptoss => return None,
            ToolFormat::Hermes3 => self.several(self.each(|call| one(self.hermes(call))), "\n"),
            ToolFormat::Llama3 => self.several(self.each(|call| object(call, "parameters")), "; "),
            ToolFormat::Mistral => self.array("[TOOL_CALLS]", "").form(),
            ToolFormat::Devstral => self.several(self.each(|call| one(devstral(call))), ""),
            ToolFormat::Phi4 => self.either(self.phi4(vocabulary)),
            ToolFormat::Granite => self.either(self.granite(vocabulary)),
            ToolFormat::Qwen3Coder => self.several(self.each(|call| one(qwen(call))), "\n"),
            ToolFormat::MiniCpm5 => self.several(self.each(|call| one(minicpm(call))), "\n"),
            ToolFormat::Lfm2 => self.lfm2().form(),
            ToolFormat::Gemma4 => self.several(self.each(|call| one(gemma(call))), ""),
            ToolFormat::DeepSeek => self.deepseek().form(),
        })
    }

    /// Returns the form of text that may contain calls. If calls have a mark, each call is constrained after its mark.
    /// `None` for the same formats as in [`Self::alone`].
    pub(super) fn in_text(&self, vocabulary: &Vocabulary) -> Option<Form> {
        let calls = || self.calls();
        let tags: Vec<MarkedForm> = match self.format {
            ToolFormat::None | ToolFormat::Gptoss => return None,
            ToolFormat::Llama3 => return Some(self.llama_in_text()),
            ToolFormat::Hermes3 => calls().map(|call| self.hermes(call)).collect(),
            ToolFormat::Mistral => vec![self.array("[TOOL_CALLS]", "")],
            ToolFormat::Devstral => calls().map(devstral).collect(),
            ToolFormat::Phi4 => self.phi4(vocabulary),
            ToolFormat::Granite => self.granite(vocabulary),
            // Models sometimes omit the outer tag.
            ToolFormat::Qwen3Coder => calls().map(qwen).chain(calls().map(bare_qwen)).collect(),
            ToolFormat::MiniCpm5 => calls().map(minicpm).collect(),
            ToolFormat::Lfm2 => vec![self.lfm2()],
            ToolFormat::Gemma4 => calls().map(gemma).collect(),
            ToolFormat::DeepSeek => vec![self.deepseek(), self.deepseek_call()],
        };
        let mut triggers: Vec<String> = tags.iter().map(|tag| tag.mark.to_owned()).collect();
        triggers.dedup();
        triggers.sort_unstable();
        triggers.dedup();
        let tags = tags.into_iter().map(|MarkedForm { mark, rest }| Tag { begin: mark.to_owned(), rest });
        Some(Form::TriggeredTags(TriggeredTags {
            triggers,
            tags: tags.collect(),
            at_least_one: false,
            stop_after_first: !self.parallel,
            excludes: Vec::new(),
            at: "tools".to_owned(),
        }))
    }

    /// Returns the name of each tool, and the form of its arguments as JSON.
    pub(super) fn json_arguments(&self) -> impl Iterator<Item = (&'a str, Form)> {
        self.calls().map(|call| (call.name, call.json()))
    }

    fn calls(&self) -> impl Iterator<Item = Call<'a>> {
        self.tools.iter().map(|(index, tool)| self.call(*index, tool))
    }

    fn call(&self, index: usize, tool: &'a Tool) -> Call<'a> {
        // As in OpenAI's API, a tool without parameters has no arguments.
        let nothing = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        let mut schema = match &tool.parameters {
            _ if self.unconstrained.contains(&index) => json!({"type": "object"}),
            None => nothing(),
            Some(parameters) => parameters.clone(),
        };
        // Arguments are always an object, even if the schema does not say so.
        if let Value::Object(map) = &mut schema
            && !map.contains_key("type")
            && !map.contains_key("$ref")
        {
            map.insert("type".to_owned(), json!("object"));
        }
        Call { name: &tool.name, schema, at: schema_path(tool) }
    }

    fn each(&self, write: impl Fn(Call<'a>) -> Form) -> Form {
        Form::Choice(self.calls().map(write).collect())
    }

    /// Returns the form of one call or, if parallel calls are allowed, of one or more calls separated by `between`.
    fn several(&self, one: Form, between: &str) -> Form {
        if !self.parallel {
            return one;
        }
        let next = Form::Sequence(vec![Form::literal(between), one.clone()]);
        Form::Sequence(vec![one, next.repeated(0)])
    }

    fn either(&self, forms: Vec<MarkedForm>) -> Form {
        let several = |marked: MarkedForm| match marked.mark {
            "<tool_call>" => self.several(marked.form(), "\n"),
            _ => marked.form(),
        };
        Form::Choice(forms.into_iter().map(several).collect())
    }

    fn hermes(&self, call: Call<'_>) -> MarkedForm {
        let rest = vec![Form::literal("\n"), object(call, "arguments"), Form::literal("\n</tool_call>")];
        MarkedForm { mark: "<tool_call>", rest: Form::Sequence(rest) }
    }

    /// Returns the form of calls as JSON objects in an array.
    fn array(&self, mark: &'static str, end: &str) -> MarkedForm {
        let objects = self.several(self.each(|call| object(call, "arguments")), ", ");
        let rest = vec![
            // With some tokenizers, a space follows the mark.
            Form::literal(" ").optional(),
            Form::literal("["),
            objects,
            Form::literal(format!("]{end}")),
        ];
        MarkedForm { mark, rest: Form::Sequence(rest) }
    }

    fn phi4(&self, vocabulary: &Vocabulary) -> Vec<MarkedForm> {
        let mut ways = vec![self.array("functools", "")];
        if vocabulary.special("<|tool_call|>").is_some() {
            ways.push(self.array("<|tool_call|>", "<|/tool_call|>"));
        }
        ways
    }

    fn granite(&self, vocabulary: &Vocabulary) -> Vec<MarkedForm> {
        let mut ways =
            vec![MarkedForm { mark: "<tool_call>", rest: self.each(|call| self.hermes(call).rest) }];
        if vocabulary.special("<|tool_call|>").is_some() {
            ways.push(self.array("<|tool_call|>", ""));
        }
        ways
    }

    fn lfm2(&self) -> MarkedForm {
        let call = |call: Call<'a>| {
            let Call { name, schema, at } = call;
            Form::Sequence(vec![
                Form::literal(format!("{name}(")),
                Form::Value { dialect: Dialect::Python, schema, at },
                Form::literal(")"),
            ])
        };
        let rest = vec![
            Form::literal("["),
            self.several(self.each(call), ", "),
            Form::literal("]<|tool_call_end|>"),
        ];
        MarkedForm { mark: "<|tool_call_start|>", rest: Form::Sequence(rest) }
    }

    fn deepseek(&self) -> MarkedForm {
        let one = self.deepseek_call().form();
        let rest = vec![self.several(one, "\n"), Form::literal("<｜tool▁calls▁end｜>")];
        MarkedForm { mark: "<｜tool▁calls▁begin｜>", rest: Form::Sequence(rest) }
    }

    /// Returns the form of a call in either of DeepSeek's two formats.
    fn deepseek_call(&self) -> MarkedForm {
        const SEPARATOR: &str = "<｜tool▁sep｜>";
        let older = self.each(|call| {
            let begin = Form::literal(format!("function{SEPARATOR}{}\n```json\n", call.name));
            Form::Sequence(vec![begin, call.json(), Form::literal("\n```")])
        });
        let newer = self.each(|call| {
            let begin = Form::literal(format!("{}{SEPARATOR}", call.name));
            Form::Sequence(vec![begin, call.json()])
        });
        let rest = vec![Form::Choice(vec![older, newer]), Form::literal("<｜tool▁call▁end｜>")];
        MarkedForm { mark: "<｜tool▁call▁begin｜>", rest: Form::Sequence(rest) }
    }

    /// Returns the form of an answer that is either calls in Llama's format or text. The calls have no mark, so the
    /// text must not begin like a call.
    fn llama_in_text(&self) -> Form {
        let calls = self.several(self.each(|call| object(call, "parameters")), "; ");
        let text = Form::Regex { pattern: r"[^\s\{\[](?s:.*)".to_owned(), at: "tools".to_owned() };
        Form::Choice(vec![calls, text.optional()])
    }
}

/// A tool that the model may call, with the schema of its arguments.
struct Call<'a> {
    name: &'a str,
    schema: Value,
    at: String,
}

impl Call<'_> {
    fn json(self) -> Form {
        Form::Json { schema: self.schema, at: self.at }
    }
}

/// A form that begins with a mark.
struct MarkedForm {
    mark: &'static str,
    rest: Form,
}

impl MarkedForm {
    fn form(self) -> Form {
        Form::Sequence(vec![Form::literal(self.mark), self.rest])
    }
}

/// Returns the form of a call as a JSON object, with the whitespace that models are trained with.
fn object(call: Call<'_>, arguments: &str) -> Form {
    let begin = format!("{{\"name\": {}, \"{arguments}\": ", json!(call.name));
    Form::Sequence(vec![Form::literal(begin), call.json(), Form::literal("}")])
}

fn devstral(call: Call<'_>) -> MarkedForm {
    let begin = Form::literal(format!("{}[ARGS]", call.name));
    MarkedForm { mark: "[TOOL_CALLS]", rest: Form::Sequence(vec![begin, call.json()]) }
}

fn qwen(call: Call<'_>) -> MarkedForm {
    let inner = bare_qwen(call).rest;
    let rest = vec![Form::literal("\n<function="), inner, Form::literal("\n</tool_call>")];
    MarkedForm { mark: "<tool_call>", rest: Form::Sequence(rest) }
}

fn bare_qwen(call: Call<'_>) -> MarkedForm {
    let Call { name, schema, at } = call;
    let rest = vec![
        Form::literal(format!("{name}>\n")),
        Form::Value { dialect: Dialect::Qwen, schema, at },
        Form::literal("</function>"),
    ];
    MarkedForm { mark: "<function=", rest: Form::Sequence(rest) }
}

fn minicpm(call: Call<'_>) -> MarkedForm {
    let Call { name, schema, at } = call;
    let rest = vec![
        Form::literal(format!("\"{name}\">")),
        Form::Value { dialect: Dialect::MiniCpm, schema, at },
        Form::literal("</function>"),
    ];
    MarkedForm { mark: "<function name=", rest: Form::Sequence(rest) }
}

fn gemma(call: Call<'_>) -> MarkedForm {
    let Call { name, schema, at } = call;
    let rest = vec![
        Form::literal(format!("call:{name}{{")),
        Form::Value { dialect: Dialect::Gemma, schema, at },
        Form::literal("}<tool_call|>"),
    ];
    MarkedForm { mark: "<|tool_call>", rest: Form::Sequence(rest) }
}
