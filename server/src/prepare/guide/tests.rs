//! Samples random output from the guides of requests, in every tool call format. The tests check that calls are parsed
//! as calls of the request's tools, and that content matches the form.

use std::sync::{Arc, LazyLock};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use server_engine::{Guide as _, Progress, TokenSet};
use server_guidance::{Guide, Vocabulary};
use server_openai::Generation;
use server_parsers::{Delta, Parser, Tools};

use super::*;
use crate::prepare::tools::{Tool, ToolChoice};

/// A compiler whose vocabulary has all bytes, the special tokens of all formats, and some tokens of several bytes.
static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    let formats = || {
        let tools = ToolFormat::ALL.into_iter().flat_map(|format| format.special_tokens());
        tools.chain(ReasoningFormat::ALL.into_iter().flat_map(|format| format.special_tokens()))
    };
    // In most vocabularies, MiniCPM's opening tags, which contain `name=`, are not special tokens.
    let mut special: Vec<&str> = formats().copied().filter(|text| !text.contains("name=")).collect();
    special.sort_unstable();
    special.dedup();
    let bytes = (0..=255u8).map(|byte| (vec![byte], false));
    let special = special.into_iter().map(|text| (text.as_bytes().to_vec(), true));
    let longer = [
        "{\"",
        "\": ",
        "\", \"",
        "\"}",
        "}}",
        "name",
        "arguments",
        "true",
        "</",
        "tool",
        "\n</parameter>\n",
        "</param>",
    ];
    let longer = longer.iter().map(|text| (text.as_bytes().to_vec(), false));
    Compiler::new(Vocabulary::new(bytes.chain(special).chain(longer)).unwrap(), 1).unwrap()
});

/// The status must be 503 so that the router retries the request on another replica, and does not count the error
/// against the health of this replica.
#[test]
fn a_form_that_cannot_be_checked_is_a_503() {
    let failure = FormError { is_internal: true, ..FormError::new("", "no process") };
    let error = rejected(failure, "response_format");
    assert_eq!((error.status().as_u16(), error.message().as_str()), (503, "no process"));
    assert!(rejected(FormError::new("", "is invalid"), "response_format").status().is_client_error());
}

/// Samples a random text; `None` if the text is not complete within the maximum number of tokens. Tokens that close a
/// part of the text are sampled more often.
fn draw(guide: &Guide, seed: u64) -> Option<String> {
    draw_after(guide, seed, "")
}

/// Like [`draw`], for texts that begin with `begin`.
fn draw_after(guide: &Guide, seed: u64, begin: &str) -> Option<String> {
    const TOKENS_MAX: usize = 700;

    let vocabulary = COMPILER.vocabulary();
    let mut random = StdRng::seed_from_u64(seed);
    let mut state = guide.start().unwrap();
    let mut allowed = TokenSet::new(vocabulary.len() as u32);
    let mut text = Vec::new();
    for byte in begin.bytes() {
        allowed.clear();
        state.allow(&mut allowed).unwrap();
        assert!(allowed.contains(u32::from(byte)), "the text may not begin with {begin:?}");
        state.commit(u32::from(byte)).unwrap();
        text.push(byte);
    }
    for _ in 0..TOKENS_MAX {
        allowed.clear();
        let progress = state.allow(&mut allowed).unwrap();
        if progress == Progress::Ended || (progress == Progress::MayEnd && random.random_range(0..3) == 0) {
            return Some(String::from_utf8_lossy(&text).into_owned());
        }
        let ends = |token: &u32| {
            let bytes = vocabulary.bytes(*token);
            let is_closing = matches!(bytes, [b'"' | b'}' | b']' | b')' | b'<' | b'\n'] | [.., b'"' | b'}']);
            vocabulary.is_special(*token)
                || is_closing
                || bytes.starts_with(b"</")
                || bytes.starts_with(b"\n</")
        };
        let ending: Vec<u32> = allowed.iter().filter(ends).collect();
        let tokens =
            if !ending.is_empty() && random.random_bool(0.5) { ending } else { allowed.iter().collect() };
        assert!(!tokens.is_empty(), "nothing may follow {:?}", String::from_utf8_lossy(&text));
        let token = tokens[random.random_range(0..tokens.len())];
        text.extend_from_slice(vocabulary.bytes(token));
        if state.commit(token).unwrap() == Progress::Ended {
            return Some(String::from_utf8_lossy(&text).into_owned());
        }
    }
    None
}

/// Returns a tool without a path, which [`conversation`] sets.
fn tool(name: &str, parameters: Option<Value>, strict: bool) -> Tool {
    Tool { strict, ..Tool::function(String::new(), name.to_owned(), None, parameters) }
}

fn three_tools(strict: bool) -> Vec<Tool> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 20},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "unit"],
        "additionalProperties": false,
    });
    let list = json!({
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"id": {"type": "integer"}, "tag": {"type": ["string", "null"]}},
                    "required": ["id", "tag"],
                    "additionalProperties": false,
                },
                "maxItems": 2,
            },
            "limit": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
        },
        "required": ["items", "limit"],
        "additionalProperties": false,
    });
    vec![
        tool("weather", Some(weather), strict),
        tool("list_all", Some(list), strict),
        tool("now", None, strict),
    ]
}

/// Returns a tool whose name and most of whose parameter names are not identifiers. The parameter `filter[status]` is
/// omitted for LFM2, whose calls cannot express it.
fn oddly_named(format: ToolFormat) -> Tool {
    let mut properties = json!({
        "q": {"type": "string", "enum": ["x", "y"]},
        "$top": {"type": "integer", "minimum": 0, "maximum": 9},
        "xml:lang": {"type": "string", "enum": ["de", "en"]},
    });
    if format != ToolFormat::Lfm2 {
        properties["filter[status]"] = json!({"type": "boolean"});
    }
    let names: Vec<&String> = properties.as_object().unwrap().keys().collect();
    let parameters = json!({
        "type": "object", "properties": properties, "required": names, "additionalProperties": false,
    });
    tool("3d_a/b:c", Some(parameters), false)
}

fn formats(tool: ToolFormat) -> Formats {
    let reasoning = match tool {
        ToolFormat::Gptoss => ReasoningFormat::Gptoss,
        ToolFormat::Gemma4 => ReasoningFormat::Gemma4,
        ToolFormat::Granite => ReasoningFormat::Granite,
        ToolFormat::Hermes3 | ToolFormat::Qwen3Coder | ToolFormat::MiniCpm5 => ReasoningFormat::Qwen3,
        ToolFormat::DeepSeek => ReasoningFormat::DeepSeek,
        _ => ReasoningFormat::None,
    };
    Formats { tool, reasoning }
}

/// The parsed parts of an answer.
#[derive(Debug, Default)]
struct ParsedAnswer {
    content: String,
    reasoning: String,
    /// For each call, its name, its arguments, and whether it is complete.
    calls: Vec<(String, String, bool)>,
}

fn read(text: &str, formats: Formats, tools: &[Tool], prompt_end: &str) -> ParsedAnswer {
    let tools = Tools::new(tools.iter().map(|tool| (tool.name.as_str(), tool.parameters.as_ref())));
    let mut parser = Parser::new(formats, &Arc::new(tools), prompt_end);
    let mut deltas = parser.push(text);
    deltas.extend(parser.finish());
    let mut said = ParsedAnswer::default();
    for delta in deltas {
        match delta {
            Delta::Content(text) => said.content.push_str(&text),
            Delta::Reasoning(text) => said.reasoning.push_str(&text),
            Delta::ToolCallBegin { name, .. } => said.calls.push((name, String::new(), false)),
            Delta::ToolCallArguments { text, .. } => said.calls.last_mut().unwrap().1.push_str(&text),
            Delta::ToolCallEnd { .. } => said.calls.last_mut().unwrap().2 = true,
        }
    }
    said
}

/// Checks that every call is complete, and that its arguments match the schema of its tool, unless a number in them is
/// too large to parse.
fn check_calls(said: &ParsedAnswer, tools: &[Tool], text: &str) {
    for (name, arguments, is_whole) in &said.calls {
        assert!(is_whole, "the call of {name} is not complete in {text:?}");
        let tool = tools.iter().find(|tool| tool.name == *name);
        let tool = tool.unwrap_or_else(|| panic!("the request has no tool {name}: {text:?}"));
        let value: Value = match serde_json::from_str(arguments) {
            Ok(value) => value,
            Err(error) if error.to_string().starts_with("number out of range") => continue,
            Err(error) => panic!("{error}: {arguments} in {text:?}"),
        };
        let nothing = json!({"type": "object", "maxProperties": 0});
        let schema = tool.parameters.as_ref().unwrap_or(&nothing);
        let error =
            jsonschema::validator_for(schema).unwrap().validate(&value).err().map(|error| error.to_string());
        assert_eq!(error, None, "{arguments} of {name} in {text:?}");
    }
}

fn guide(conversation: &Conversation, formats: Formats, content: Option<&Form>) -> Guide {
    let request = FormRequest { conversation, formats, content };
    assert!(!request.is_unconstrained());
    request.compiled(&COMPILER, "response_format").unwrap()
}

fn conversation(mut tools: Vec<Tool>, choice: ToolChoice) -> Conversation {
    for (index, tool) in tools.iter_mut().enumerate() {
        tool.path = format!("tools[{index}].function");
    }
    Conversation { param: "messages", tools, choice, ..Conversation::default() }
}

/// Returns every tool call format, each with the reasoning format that the tests combine it with.
fn all_formats() -> impl Iterator<Item = Formats> {
    ToolFormat::ALL.into_iter().filter(|format| *format != ToolFormat::None).map(formats)
}

#[test]
fn required_calls_parse_as_calls_in_every_format() {
    for formats in all_formats() {
        for parallel in [None, Some(false)] {
            let tools = [three_tools(false), vec![oddly_named(formats.tool)]].concat();
            let mut conversation = conversation(tools.clone(), ToolChoice::Required);
            conversation.parallel = parallel;
            let guide = guide(&conversation, formats, None);
            let (mut whole, mut several, mut names) = (0, 0, HashSet::new());
            for seed in 0..60 {
                let Some(text) = draw(&guide, seed) else { continue };
                whole += 1;
                let said = read(&text, formats, &tools, "");
                assert!(!said.calls.is_empty(), "{formats:?}: no call in {text:?}");
                assert!(parallel.is_none() || said.calls.len() == 1, "{formats:?}: {text:?}");
                several += usize::from(said.calls.len() > 1);
                // In Harmony, content may precede calls.
                let is_alone = said.content.is_empty() || formats.tool == ToolFormat::Gptoss;
                assert!(is_alone, "{formats:?}: {:?} in {text:?}", said.content);
                check_calls(&said, &tools, &text);
                names.extend(said.calls.into_iter().map(|call| call.0));
            }
            assert!(whole >= 20, "{formats:?}: only {whole} of 60 texts are complete");
            assert_eq!(names.len(), 4, "{formats:?}: the texts call only {names:?}");
            assert!(parallel.is_some() || several > 0 || formats.tool == ToolFormat::Gptoss, "{formats:?}");
        }
    }
}

#[test]
fn a_named_tool_is_called_exactly_once_and_no_other_is_called() {
    for formats in all_formats() {
        let tools = three_tools(false);
        let named =
            guide(&conversation(tools.clone(), ToolChoice::Named("list_all".to_owned())), formats, None);
        let names = vec!["now".to_owned(), "weather".to_owned()];
        let allowed = ToolChoice::Allowed { names: names.clone(), is_required: true };
        let allowed = guide(&conversation(tools.clone(), allowed), formats, None);
        for seed in 0..30 {
            if let Some(text) = draw(&named, seed) {
                let said = read(&text, formats, &tools, "");
                assert!(said.calls.len() == 1 && said.calls[0].0 == "list_all", "{formats:?}: {text:?}");
                check_calls(&said, &tools, &text);
            }
            if let Some(text) = draw(&allowed, seed) {
                let said = read(&text, formats, &tools, "");
                assert!(said.calls.iter().all(|call| names.contains(&call.0)), "{formats:?}: {text:?}");
            }
        }
    }
}

#[test]
fn strict_tools_are_constrained_within_text() {
    for formats in all_formats() {
        let tools = three_tools(true);
        let guide = guide(&conversation(tools.clone(), ToolChoice::Auto), formats, None);
        let (mut called, mut plain) = (0, 0);
        for seed in 0..120 {
            // Random sampling would almost never produce these beginnings of calls.
            let begin = match formats.tool {
                ToolFormat::MiniCpm5 if seed % 2 == 0 => "<function name=",
                ToolFormat::Phi4 if seed % 2 == 0 => "x functools",
                _ => "",
            };
            let Some(text) = draw_after(&guide, seed, begin) else { continue };
            let said = read(&text, formats, &tools, "");
            check_calls(&said, &tools, &text);
            called += usize::from(!said.calls.is_empty());
            plain += usize::from(said.calls.is_empty());
        }
        assert!(called > 0 && plain > 0, "{formats:?}: {called} texts with calls, {plain} texts without");
    }
}

#[test]
fn a_request_without_a_form_has_no_guide() {
    let nothing = |conversation: &Conversation| {
        FormRequest { conversation, formats: formats(ToolFormat::Hermes3), content: None }.is_unconstrained()
    };
    assert!(nothing(&conversation(three_tools(false), ToolChoice::Auto)));
    assert!(nothing(&conversation(three_tools(true), ToolChoice::None)));
    assert!(nothing(&conversation(Vec::new(), ToolChoice::Auto)));
    assert!(!nothing(&conversation(three_tools(true), ToolChoice::Auto)));
}

#[test]
fn content_is_constrained_beside_calls_and_after_reasoning() {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
    let form = Form::Json { schema: schema.clone(), at: "response_format".to_owned() };
    let validator = jsonschema::validator_for(&schema).unwrap();
    for formats in all_formats() {
        let tools = three_tools(false);
        let alone = guide(&conversation(Vec::new(), ToolChoice::Auto), formats, Some(&form));
        let beside = guide(&conversation(tools.clone(), ToolChoice::Auto), formats, Some(&form));
        let (mut contents, mut called) = (0, 0);
        for seed in 0..80 {
            for (guide, tools) in [(&alone, &[][..]), (&beside, &tools[..])] {
                let Some(text) = draw(guide, seed) else { continue };
                let said = read(
                    &text,
                    formats.with_tools(&Tools::new(tools.iter().map(|tool| (tool.name.as_str(), None)))),
                    tools,
                    "",
                );
                check_calls(&said, tools, &text);
                called += said.calls.len();
                if said.calls.is_empty() {
                    contents += 1;
                    let value: Value = serde_json::from_str(&said.content).unwrap_or_else(|error| {
                        panic!("{formats:?}: {error}: {:?} in {text:?}", said.content)
                    });
                    assert!(validator.is_valid(&value), "{formats:?}: {text:?}");
                }
            }
        }
        assert!(contents > 5 && called > 0, "{formats:?}: {contents} contents, {called} calls");
    }
}

#[test]
fn an_unsupported_schema_is_rejected_if_its_tool_is_strict_and_otherwise_ignored() {
    let unique = json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}, "required": ["a"]});
    for formats in all_formats() {
        let with = |strict: bool| {
            let mut tools = three_tools(false);
            tools.push(tool("odd", Some(unique.clone()), strict));
            conversation(tools, ToolChoice::Required)
        };
        let strict = with(true);
        let request = FormRequest { conversation: &strict, formats, content: None };
        let error = request.compiled(&COMPILER, "tools").unwrap_err();
        let Error::Invalid { param, message, .. } = &error else { panic!("{error:?}") };
        assert!(param.starts_with("tools[3].function.parameters"), "{formats:?}: {message}");
        let loose = with(false);
        let guide = guide(&loose, formats, None);
        let called = (0..60)
            .filter_map(|seed| draw(&guide, seed))
            .any(|text| read(&text, formats, &loose.tools, "").calls.iter().any(|call| call.0 == "odd"));
        assert!(called, "{formats:?}");
    }
}

#[test]
fn a_parameter_that_a_python_call_cannot_name_is_rejected_if_its_tool_is_strict() {
    let filter = json!({
        "type": "object", "properties": {"filter[status]": {"type": "string"}}, "additionalProperties": false,
    });
    let with = |strict| conversation(vec![tool("find", Some(filter.clone()), strict)], ToolChoice::Required);
    let formats = formats(ToolFormat::Lfm2);
    let strict = with(true);
    let request = FormRequest { conversation: &strict, formats, content: None };
    let error = request.compiled(&COMPILER, "tools").unwrap_err();
    let Error::Invalid { param, .. } = &error else { panic!("{error:?}") };
    assert_eq!(param, "tools[0].function.parameters.properties.filter[status]");
    let loose = with(false);
    let guide = guide(&loose, formats, None);
    let mut whole = 0;
    for text in (0..60).filter_map(|seed| draw(&guide, seed)) {
        whole += 1;
        let said = read(&text, formats, &loose.tools, "");
        assert!(said.content.is_empty() && !said.calls.is_empty(), "{text:?}");
    }
    assert!(whole >= 20, "only {whole} of 60 texts are complete");
}

#[test]
fn each_unsupported_schema_is_tried_once() {
    let unique = json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}, "required": ["a"]});
    let count = 40;
    for formats in all_formats() {
        let tools =
            (0..count).map(|index| tool(&format!("odd{index}"), Some(unique.clone()), false)).collect();
        let conversation = conversation(tools, ToolChoice::Required);
        let request = FormRequest { conversation: &conversation, formats, content: None };
        let (compiled, tried) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
        let attempts = Attempts {
            vocabulary: COMPILER.vocabulary(),
            compile: &|form| {
                compiled.set(compiled.get() + 1);
                COMPILER.compile(form)
            },
            accepts: &|form| {
                tried.set(tried.get() + 1);
                COMPILER.accepts(form)
            },
            param: "tools",
        };
        request.compiled_by(&attempts).unwrap();
        assert_eq!((compiled.get(), tried.get()), (2, count), "{formats:?}");
    }
}

#[test]
fn a_model_without_a_format_of_calls_cannot_be_required_to_call() {
    let required = conversation(three_tools(false), ToolChoice::Required);
    let request = FormRequest { conversation: &required, formats: Formats::default(), content: None };
    let error = request.compiled(&COMPILER, "tools").unwrap_err();
    assert!(matches!(&error, Error::Invalid { param, .. } if param == "tool_choice"), "{error:?}");
}

fn generation(value: Value) -> Generation {
    serde_json::from_value(value).unwrap()
}

#[test]
fn every_parameter_with_a_form_is_read() {
    let schema = json!({"type": "integer"});
    let json_at = |at: &str| Some(Form::Json { schema: schema.clone(), at: at.to_owned() });
    let regex_at = |at: &str| Some(Form::Regex { pattern: "a+".to_owned(), at: at.to_owned() });
    let grammar_at = |at: &str| Some(Form::Grammar { text: "root ::= \"a\"".to_owned(), at: at.to_owned() });
    let object_at = |at: &str| Some(Form::json_object(at));
    let choice = Some(Form::Choice(vec![Form::literal("a"), Form::literal("b")]));
    let word = Some(Form::literal("hi"));
    let tag = json!({"type": "structural_tag", "format": {"type": "const_string", "value": "hi"}});
    let cases = [
        (json!({}), None),
        (json!({"response_format": {"type": "text"}}), None),
        (json!({"response_format": {"type": "json_object"}}), object_at("response_format")),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}}}),
            json_at("response_format.json_schema.schema"),
        ),
        (
            json!({"response_format": {"type": "json_schema", "name": "n", "schema": schema}}),
            json_at("response_format.schema"),
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": schema}}),
            json_at("response_format.json_schema"),
        ),
        (json!({"response_format": {"type": "regex", "pattern": "a+"}}), regex_at("response_format.pattern")),
        (
            json!({"response_format": {"type": "grammar", "grammar": "root ::= \"a\""}}),
            grammar_at("response_format.grammar"),
        ),
        (json!({"response_format": {"type": "const_string", "value": "hi"}}), word.clone()),
        (json!({"response_format": tag}), word.clone()),
        (json!({"structured_outputs": {"json": schema}}), json_at("structured_outputs.json")),
        (
            json!({"structured_outputs": {"json": schema.to_string(), "regex": null}}),
            json_at("structured_outputs.json"),
        ),
        (json!({"structured_outputs": {"regex": "a+"}}), regex_at("structured_outputs.regex")),
        (json!({"structured_outputs": {"choice": ["a", "b"]}}), choice.clone()),
        (
            json!({"structured_outputs": {"grammar": "root ::= \"a\""}}),
            grammar_at("structured_outputs.grammar"),
        ),
        (json!({"structured_outputs": {"json_object": true}}), object_at("structured_outputs.json_object")),
        (json!({"structured_outputs": {"structural_tag": tag.to_string()}}), word),
        (json!({"structured_outputs": {"disable_fallback": true}}), None),
        (json!({"guided_json": schema}), json_at("guided_json")),
        (json!({"guided_regex": "a+"}), regex_at("guided_regex")),
        (json!({"guided_choice": ["a", "b"]}), choice),
        (json!({"guided_grammar": "root ::= \"a\""}), grammar_at("guided_grammar")),
        (json!({"guided_json_object": false}), None),
    ];
    for (request, expected) in cases {
        let format = format::requested(&generation(request.clone())).unwrap();
        assert_eq!(format.map(|format| format.form), expected, "{request}");
    }
}

#[test]
fn an_error_names_the_parameter_of_an_invalid_form() {
    for (request, place) in [
        (json!({"response_format": {}}), "response_format.type"),
        (json!({"response_format": {"type": 3}}), "response_format.type"),
        (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": 3}}),
            "response_format.json_schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            "response_format.json_schema.schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}}),
            "response_format.json_schema.name",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}}}),
            "response_format.json_schema.strict",
        ),
        (json!({"response_format": {"type": "regex"}}), "response_format.pattern"),
        (json!({"structured_outputs": {"json": "{"}}), "structured_outputs.json"),
        (json!({"structured_outputs": {"regex": 3}}), "structured_outputs.regex"),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"choice": ["a", 3]}}), "structured_outputs.choice[1]"),
        (json!({"structured_outputs": {"json_object": "yes"}}), "structured_outputs.json_object"),
        (json!({"structured_outputs": {"structural_tag": 3}}), "structured_outputs.structural_tag"),
        (json!({"structured_outputs": {"whitespace_pattern": " "}}), "structured_outputs.whitespace_pattern"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs.choice"),
        (json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}), "guided_regex"),
        (json!({"guided_grammar": ["a"]}), "guided_grammar"),
    ] {
        let error = format::requested(&generation(request.clone())).unwrap_err();
        let Error::Invalid { param, message, .. } = &error else { panic!("{error:?}") };
        assert_eq!(param, place, "{message}: {request}");
    }
}

#[test]
fn a_key_with_escaped_letters_may_demand_a_form_too() {
    assert!(may_compile(br#"{"tools": []}"#));
    assert!(may_compile(br#"{"\u0074ools": []}"#));
    assert!(may_compile(br#"{"functions": []}"#));
    assert!(may_compile(br#"{"structural_tag": "{\"type\": \"structural_tag\"}"}"#));
    assert!(!may_compile(br#"{"messages": [{"role": "user", "content": "a tool"}]}"#));
}
