//! Calls as a form, in the way of each model: what comes out is read as calls of the tools that are offered, with
//! arguments that fit their schemas.

use std::collections::HashSet;

use serde_json::{Value, json};
use server_guidance::{Dialect, Form, Tag, TriggeredTags, Vocabulary};
use server_parsers::ToolFormat;

use crate::prepare::conversation::Conversation;
use crate::prepare::tools::{Tool, ToolChoice};

/// The tools that may be called, with their places in the request.
pub(super) fn offered(conversation: &Conversation) -> impl Iterator<Item = (usize, &Tool)> {
    let allowed = |(_, tool): &(usize, &Tool)| conversation.choice.allows(&tool.name);
    conversation.tools.iter().enumerate().filter(allowed)
}

fn place(index: usize) -> String {
    format!("tools[{index}].function.parameters")
}

/// Whether what is at `at` is in the schema of this tool.
pub(super) fn is_of(at: &str, index: usize) -> bool {
    at.strip_prefix(&place(index)).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The calls that a request admits.
pub(super) struct Calls<'a> {
    format: ToolFormat,
    tools: Vec<(usize, &'a Tool)>,
    /// Tools of whose arguments nothing is asked.
    loose: &'a HashSet<usize>,
    parallel: bool,
}

impl<'a> Calls<'a> {
    pub(super) fn new(conversation: &'a Conversation, format: ToolFormat, loose: &'a HashSet<usize>) -> Self {
        // One that is named is called, and that is all.
        let is_named = matches!(conversation.choice, ToolChoice::Named(_));
        let parallel = conversation.parallel.unwrap_or(true) && !is_named;
        Self { format, tools: offered(conversation).collect(), loose, parallel }
    }

    /// The whole answer is calls, at least one; `None` if the model is not known to write any.
    pub(super) fn alone(&self, vocabulary: &Vocabulary) -> Option<Form> {
        let one = |written: Written| written.form();
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

    /// Calls within text, each held to its tool from its mark on; `None` if the model is not known to write any.
    pub(super) fn in_text(&self, vocabulary: &Vocabulary) -> Option<Form> {
        let calls = || self.tools.iter().map(|tool| self.call(tool));
        let tags: Vec<Written> = match self.format {
            ToolFormat::None | ToolFormat::Gptoss => return None,
            ToolFormat::Llama3 => return Some(self.llama_in_text()),
            ToolFormat::Hermes3 => calls().map(|call| self.hermes(call)).collect(),
            ToolFormat::Mistral => vec![self.array("[TOOL_CALLS]", "")],
            ToolFormat::Devstral => calls().map(devstral).collect(),
            ToolFormat::Phi4 => self.phi4(vocabulary),
            ToolFormat::Granite => self.granite(vocabulary),
            // Its outer tag may be missing.
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
        let tags = tags.into_iter().map(|Written { mark, rest }| Tag { begin: mark.to_owned(), rest });
        Some(Form::TriggeredTags(TriggeredTags {
            triggers,
            tags: tags.collect(),
            at_least_one: false,
            stop_after_first: !self.parallel,
            excludes: Vec::new(),
            at: "tools".to_owned(),
        }))
    }

    /// The name of each tool and its arguments as JSON.
    pub(super) fn json_arguments(&self) -> impl Iterator<Item = (&'a str, Form)> {
        self.tools.iter().map(|tool| {
            let call = self.call(tool);
            (call.name, call.json())
        })
    }

    fn call(&self, (index, tool): &(usize, &'a Tool)) -> Call<'a> {
        // OpenAI's: a tool without parameters takes none.
        let nothing = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        let mut schema = match &tool.parameters {
            _ if self.loose.contains(index) => json!({"type": "object"}),
            None => nothing(),
            Some(parameters) => parameters.clone(),
        };
        // Arguments are an object, said or not.
        if let Value::Object(map) = &mut schema
            && !map.contains_key("type")
            && !map.contains_key("$ref")
        {
            map.insert("type".to_owned(), json!("object"));
        }
        Call { name: &tool.name, schema, at: place(*index) }
    }

    fn each(&self, write: impl Fn(Call<'a>) -> Form) -> Form {
        Form::Choice(self.tools.iter().map(|tool| write(self.call(tool))).collect())
    }

    /// One or, where they may be, several, with something between them.
    fn several(&self, one: Form, between: &str) -> Form {
        if !self.parallel {
            return one;
        }
        let next = Form::Sequence(vec![Form::literal(between), one.clone()]);
        Form::Sequence(vec![one, next.repeated(0)])
    }

    fn either(&self, written: Vec<Written>) -> Form {
        let several = |written: Written| match written.mark {
            "<tool_call>" => self.several(written.form(), "\n"),
            _ => written.form(),
        };
        Form::Choice(written.into_iter().map(several).collect())
    }

    fn hermes(&self, call: Call<'_>) -> Written {
        let rest = vec![Form::literal("\n"), object(call, "arguments"), Form::literal("\n</tool_call>")];
        Written { mark: "<tool_call>", rest: Form::Sequence(rest) }
    }

    /// Objects in an array.
    fn array(&self, mark: &'static str, end: &str) -> Written {
        let objects = self.several(self.each(|call| object(call, "arguments")), ", ");
        let rest = vec![
            // Some tokenizers put a space after the mark.
            Form::literal(" ").optional(),
            Form::literal("["),
            objects,
            Form::literal(format!("]{end}")),
        ];
        Written { mark, rest: Form::Sequence(rest) }
    }

    fn phi4(&self, vocabulary: &Vocabulary) -> Vec<Written> {
        let mut ways = vec![self.array("functools", "")];
        if vocabulary.special("<|tool_call|>").is_some() {
            ways.push(self.array("<|tool_call|>", "<|/tool_call|>"));
        }
        ways
    }

    fn granite(&self, vocabulary: &Vocabulary) -> Vec<Written> {
        let mut ways = vec![Written { mark: "<tool_call>", rest: self.each(|call| self.hermes(call).rest) }];
        if vocabulary.special("<|tool_call|>").is_some() {
            ways.push(self.array("<|tool_call|>", ""));
        }
        ways
    }

    fn lfm2(&self) -> Written {
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
        Written { mark: "<|tool_call_start|>", rest: Form::Sequence(rest) }
    }

    fn deepseek(&self) -> Written {
        let one = self.deepseek_call().form();
        let rest = vec![self.several(one, "\n"), Form::literal("<｜tool▁calls▁end｜>")];
        Written { mark: "<｜tool▁calls▁begin｜>", rest: Form::Sequence(rest) }
    }

    /// A call in either form of DeepSeek's.
    fn deepseek_call(&self) -> Written {
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
        Written { mark: "<｜tool▁call▁begin｜>", rest: Form::Sequence(rest) }
    }

    /// Calls have no mark, but are the whole answer then: other text does not begin as they do.
    fn llama_in_text(&self) -> Form {
        let calls = self.several(self.each(|call| object(call, "parameters")), "; ");
        let text = Form::Regex { pattern: r"[^\s\{\[](?s:.*)".to_owned(), at: "tools".to_owned() };
        Form::Choice(vec![calls, text.optional()])
    }
}

/// A call of a tool.
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

/// Something that begins with a mark.
struct Written {
    mark: &'static str,
    rest: Form,
}

impl Written {
    fn form(self) -> Form {
        Form::Sequence(vec![Form::literal(self.mark), self.rest])
    }
}

/// A call as a JSON object, laid out as models are taught it.
fn object(call: Call<'_>, arguments: &str) -> Form {
    let begin = format!("{{\"name\": {}, \"{arguments}\": ", json!(call.name));
    Form::Sequence(vec![Form::literal(begin), call.json(), Form::literal("}")])
}

fn devstral(call: Call<'_>) -> Written {
    let begin = Form::literal(format!("{}[ARGS]", call.name));
    Written { mark: "[TOOL_CALLS]", rest: Form::Sequence(vec![begin, call.json()]) }
}

fn qwen(call: Call<'_>) -> Written {
    let inner = bare_qwen(call).rest;
    let rest = vec![Form::literal("\n<function="), inner, Form::literal("\n</tool_call>")];
    Written { mark: "<tool_call>", rest: Form::Sequence(rest) }
}

fn bare_qwen(call: Call<'_>) -> Written {
    let Call { name, schema, at } = call;
    let rest = vec![
        Form::literal(format!("{name}>\n")),
        Form::Value { dialect: Dialect::Qwen, schema, at },
        Form::literal("</function>"),
    ];
    Written { mark: "<function=", rest: Form::Sequence(rest) }
}

fn minicpm(call: Call<'_>) -> Written {
    let Call { name, schema, at } = call;
    let rest = vec![
        Form::literal(format!("\"{name}\">")),
        Form::Value { dialect: Dialect::MiniCpm, schema, at },
        Form::literal("</function>"),
    ];
    Written { mark: "<function name=", rest: Form::Sequence(rest) }
}

fn gemma(call: Call<'_>) -> Written {
    let Call { name, schema, at } = call;
    let rest = vec![
        Form::literal(format!("call:{name}{{")),
        Form::Value { dialect: Dialect::Gemma, schema, at },
        Form::literal("}<tool_call|>"),
    ];
    Written { mark: "<|tool_call>", rest: Form::Sequence(rest) }
}
