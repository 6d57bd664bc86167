use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value as Json, json};

use super::*;

fn single(source: &str) -> ChatTemplate {
    named(&[(DEFAULT, source)])
}

fn named(sources: &[(&str, &str)]) -> ChatTemplate {
    let sources = sources.iter().map(|(name, source)| ((*name).to_owned(), (*source).to_owned()));
    ChatTemplate::new(sources, Some("<s>".to_owned()), Some("</s>".to_owned())).unwrap()
}

fn causes(error: RenderError) -> String {
    format!("{:#}", anyhow::Error::from(error))
}

/// Returns the differences between this engine's output and that of Python's Jinja, for the cases of a golden file.
fn differences(golden: &Json, source: impl Fn(&str) -> String) -> Vec<String> {
    let now = UNIX_EPOCH + Duration::from_secs(golden["now_seconds"].as_u64().unwrap());
    let mut wrong = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let input = RenderInput {
            messages: golden["conversations"][case["conversation"].as_str().unwrap()].as_array().unwrap(),
            tools: case["tools"].as_bool().unwrap().then(|| golden["tools"].as_array().unwrap().as_slice()),
            documents: case["documents"].as_array().map(Vec::as_slice),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
            extra: case["extra"].as_object(),
            name: None,
            now: Some(now),
        };
        let rendered = single(&source(name)).render(&input);
        let as_expected = match &rendered {
            Ok(text) => case["text"] == *text,
            Err(RenderError::Refused(message)) => case["refused"] == *message,
            Err(_) => case["failed"] == true,
        };
        if !as_expected {
            let rendered = rendered.map_err(causes);
            wrong.push(format!("{name} {}\n{rendered:?}\n{}", case["conversation"], case["text"]));
        }
    }
    wrong
}

/// `golden/templates.json` contains templates with the features that the templates of Llama 3, Qwen 3, Gemma 3, Mistral
/// and Phi use.
#[test]
fn templates_render_as_in_python() {
    let golden: Json = serde_json::from_str(include_str!("../../tests/golden/templates.json")).unwrap();
    let wrong = differences(&golden, |name| golden["templates"][name].as_str().unwrap().to_owned());
    assert!(wrong.is_empty(), "{} renderings differ\n{}", wrong.len(), wrong.join("\n\n"));
}

/// Reads the template of a model family from `tests/templates`.
fn family(name: &str) -> String {
    let path = format!("{}/tests/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

/// `golden/families.json` is written by `golden/families.py`.
#[test]
fn templates_of_model_families_render_as_in_python() {
    let golden: Json = serde_json::from_str(include_str!("../../tests/golden/families.json")).unwrap();
    let wrong = differences(&golden, family);
    assert!(wrong.is_empty(), "{} renderings differ\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn the_features_of_model_families_are_determined() {
    let style = |arguments, empty_content, ids, count| CallStyle { arguments, empty_content, ids, count };
    let usual = style(ArgumentsFormat::Object, EmptyContent::EmptyString, CallIdFormat::Any, CallCount::Many);
    let nine = Some(CallStyle { ids: CallIdFormat::NineCharacters, ..usual });
    let usual_with = |reasoning_member| TemplateFeatures { reasoning_member, ..shown(Some(usual)) };
    fn shown(call_style: Option<CallStyle>) -> TemplateFeatures {
        TemplateFeatures { tools_location: ToolsLocation::Variable, call_style, ..TemplateFeatures::NONE }
    }
    for (name, features) in [
        (
            "gpt-oss",
            TemplateFeatures {
                reasoning_member: "thinking",
                needs_tool_descriptions: true,
                ..shown(Some(CallStyle { count: CallCount::One, ..usual }))
            },
        ),
        ("gemma-4", usual_with("reasoning_content")),
        (
            "deepseek-r1-distill",
            TemplateFeatures {
                call_style: Some(CallStyle { empty_content: EmptyContent::Null, ..usual }),
                ..TemplateFeatures::NONE
            },
        ),
        ("deepseek-v3.1", TemplateFeatures { call_style: Some(usual), ..TemplateFeatures::NONE }),
        ("granite-3.3", shown(None)),
        ("granite-4.0", shown(Some(usual))),
        ("qwen3", shown(Some(usual))),
        ("qwen3-coder", shown(Some(usual))),
        ("devstral-small", shown(Some(usual))),
        ("mistral-small-3.2", shown(nine)),
        ("mistral-nemo", shown(nine)),
        ("lfm2", usual_with("thinking")),
        ("lfm2-first", shown(None)),
        ("minicpm5", shown(Some(usual))),
        ("phi-4-functools", shown(Some(usual))),
    ] {
        assert_eq!(single(&family(name)).features(), features, "{name}");
    }
}

#[test]
fn extra_variables_take_precedence() {
    let template = single("{{ bos_token }} {{ tools }} {{ x }}");
    let extra = json!({"bos_token": "B", "tools": "T", "x": 1});
    let input = RenderInput { extra: extra.as_object(), ..RenderInput::default() };
    assert_eq!(template.render(&input).unwrap(), "B T 1");
}

#[test]
fn the_tool_template_is_used_for_requests_with_tools() {
    let template = named(&[(DEFAULT, "plain"), ("tool_use", "tools"), ("rag", "rag")]);
    let tools = [json!({})];
    let render = |tools, name| {
        let input = RenderInput { tools, name, ..RenderInput::default() };
        template.render(&input).map_err(|error| error.to_string())
    };
    assert_eq!(render(None, None).as_deref(), Ok("plain"));
    assert_eq!(render(Some(&tools), None).as_deref(), Ok("tools"));
    assert_eq!(render(Some(&tools), Some("rag")).as_deref(), Ok("rag"));
    let known = "the model has no chat template named \"x\"; its templates are default, tool_use, rag";
    assert_eq!(render(None, Some("x")), Err(known.to_owned()));
}

#[test]
fn a_template_cannot_run_forever() {
    let render = |source: &str| single(source).render(&RenderInput::default());
    let nested = "{% for a in range(99999) %}".repeat(3) + &"{% endfor %}".repeat(3);
    assert!(matches!(render(&nested), Err(RenderError::Render(_))));
    assert!(matches!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), Err(RenderError::Render(_))));
    let long = "{% set x = 'x' * 10000 %}{% for a in range(99999) %}{{ x }}{% endfor %}";
    assert!(matches!(render(long), Err(RenderError::TooLong)));
}

#[test]
fn widths_are_bounded() {
    let render = |source: &str| single(source).render(&RenderInput::default()).map_err(causes);
    let fitting = "{{ '%5.1f|%-3s' | format(1.25, 'a') }}{{ '{:>3}'.format('b') }}{{ 'c\nd' | indent(2, true) }}{{ 'e\nf' | indent(width=1) }}";
    assert_eq!(render(fitting).unwrap(), "  1.2|a    b  c\n  de\n f");
    for wide in [
        "{{ '%9223372036854775807s' | format('a') }}",
        "{{ '%*s' | format(99999999, 'a') }}",
        "{{ '{:>99999999}'.format('a') }}",
        "{{ 'a' | indent(99999999) }}",
        "{{ 'a' | indent(width=99999999) }}",
    ] {
        assert!(render(wide).unwrap_err().contains("at most 4096"), "{wide}");
    }
}

#[test]
fn chained_filters_cannot_multiply_a_text_without_bound() {
    let joined = format!("{{{{ 'ab'{} }}}}", " | join('-----------------')".repeat(40));
    let rendered = single(&joined).render(&RenderInput::default());
    assert!(causes(rendered.unwrap_err()).contains("longer than"));
}

#[test]
fn a_panic_of_the_engine_is_an_error() {
    let rendered = single("{{ messages }}{{ ''[::-1] }}").render(&RenderInput::default());
    assert!(matches!(rendered, Ok(_) | Err(RenderError::Engine)), "{rendered:?}");
}

#[test]
fn generation_tags_keep_their_whitespace_control() {
    let replaced = environment::without_generation_tags("a {%- generation -%} b {% endgeneration +%} {% x");
    assert_eq!(replaced, "a {%- if true -%} b {% endif +%} {% x");
    for other in ["{% generations %}", "{%}", "{%} {% x %}", "{%", "{%-%}"] {
        assert_eq!(environment::without_generation_tags(other), other);
    }
}

#[test]
fn an_invalid_source_is_rejected() {
    let new = |source: String| ChatTemplate::new([(DEFAULT.to_owned(), source)], None, None);
    assert!(matches!(new("{% for %}".to_owned()), Err(TemplateError::Syntax(_))));
    assert!(matches!(new("x".repeat(limits::SOURCE_BYTES_MAX + 1)), Err(TemplateError::TooLong)));
}

#[test]
fn strftime_now_formats_in_utc_as_python_does() {
    let formatted = |seconds: u64, format: &str| {
        let now = Some(UNIX_EPOCH + Duration::from_secs(seconds));
        let format = json!({ "format": format });
        single("{{ strftime_now(format) }}").render(&RenderInput {
            extra: format.as_object(),
            now,
            ..RenderInput::default()
        })
    };
    for (seconds, format, expected) in [
        (0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001"),
        (951_782_400, "%d %B %Y", "29 February 2000"),
        (951_868_800, "%e %b %y %D", " 1 Mar 00 03/01/00"),
        (1_735_603_200, "%d %b %Y|%-d|%-m|%p %I", "31 Dec 2024|31|12|AM 12"),
        (1_735_689_599, "%F %T %w %Z %z %%", "2024-12-31 23:59:59 2 UTC +0000 %"),
        (1_735_689_599, "%c|%x|%X", "Tue Dec 31 23:59:59 2024|12/31/24|23:59:59"),
    ] {
        assert_eq!(formatted(seconds, format).unwrap(), expected, "{format}");
    }
    for wrong in ["%E", "50%"] {
        assert!(causes(formatted(0, wrong).unwrap_err()).contains("strftime"), "{wrong}");
    }
}
