use std::time::{Duration, UNIX_EPOCH};

use serde_json::json;

use super::*;

fn single(source: &str) -> ChatTemplate {
    named(&[(DEFAULT, source)])
}

fn named(sources: &[(&str, &str)]) -> ChatTemplate {
    let sources = sources.iter().map(|(name, source)| ((*name).to_owned(), (*source).to_owned()));
    ChatTemplate::new(sources, Some("<s>".to_owned()), Some("</s>".to_owned())).unwrap()
}

/// `golden/templates.json`: templates that use what those of Llama 3, Qwen 3, Gemma 3, Mistral and Phi use, and
/// what Python's Jinja makes of them.
#[test]
fn templates_render_as_in_python() {
    let golden: Json = serde_json::from_str(include_str!("../../tests/golden/templates.json")).unwrap();
    let now = UNIX_EPOCH + Duration::from_secs(golden["now_seconds"].as_u64().unwrap());
    let mut wrong = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let template = single(golden["templates"][name].as_str().unwrap());
        let input = RenderInput {
            messages: golden["conversations"][case["conversation"].as_str().unwrap()].as_array().unwrap(),
            tools: case["tools"].as_bool().unwrap().then(|| golden["tools"].as_array().unwrap().as_slice()),
            documents: case["documents"].as_array().map(Vec::as_slice),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            extra: case["extra"].as_object(),
            name: None,
            now: Some(now),
        };
        let rendered = template.render(&input);
        let as_expected = match &rendered {
            Ok(text) => case["text"] == *text,
            Err(RenderError::Refused(message)) => case["refused"] == *message,
            Err(_) => case["failed"] == true,
        };
        if !as_expected {
            let rendered = rendered.map_err(|error| chain(&error));
            wrong.push(format!("{name} {}\n{rendered:?}\n{}", case["conversation"], case["text"]));
        }
    }
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn extra_variables_win_over_all_others() {
    let template = single("{{ bos_token }} {{ tools }} {{ x }}");
    let extra = json!({"bos_token": "B", "tools": "T", "x": 1});
    let input = RenderInput { extra: extra.as_object(), ..RenderInput::default() };
    assert_eq!(template.render(&input).unwrap(), "B T 1");
}

#[test]
fn the_template_for_tools_is_used_when_there_are_tools() {
    let template = named(&[(DEFAULT, "plain"), ("tool_use", "tools"), ("rag", "rag")]);
    let tools = [json!({})];
    let render = |tools, name| {
        let input = RenderInput { tools, name, ..RenderInput::default() };
        template.render(&input).map_err(|error| error.to_string())
    };
    assert_eq!(render(None, None).as_deref(), Ok("plain"));
    assert_eq!(render(Some(&tools), None).as_deref(), Ok("tools"));
    assert_eq!(render(Some(&tools), Some("rag")).as_deref(), Ok("rag"));
    let known = "the model has no chat template named \"x\"; it has default, tool_use, rag";
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
fn marks_of_generation_keep_their_white_space_control() {
    let replaced = environment::without_generation_tags("a {%- generation -%} b {% endgeneration +%} {% x");
    assert_eq!(replaced, "a {%- if true -%} b {% endif +%} {% x");
    assert_eq!(environment::without_generation_tags("{% generations %}"), "{% generations %}");
}

#[test]
fn a_source_that_is_no_template_is_refused() {
    let new = |source: String| ChatTemplate::new([(DEFAULT.to_owned(), source)], None, None);
    assert!(matches!(new("{% for %}".to_owned()), Err(TemplateError::Syntax(_))));
    assert!(matches!(new("x".repeat(limits::SOURCE_BYTES_MAX + 1)), Err(TemplateError::TooLong)));
}
