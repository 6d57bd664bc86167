//! Tests the format `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}`, and the older format with
//! `function<｜tool▁sep｜>f` and a block of JSON.

use server_parsers::{ReasoningFormat, ToolFormat};

use crate::check::{Case, both, call, content, cut, reasoning, tool};

fn deepseek() -> Case {
    tool(ToolFormat::DeepSeek)
}

const FIRST: &str = r#"{"city": "<｜tool▁call▁end｜> ```"}"#;

#[test]
fn calls_are_parsed() {
    let both = [call(0, "weather", FIRST), call(1, "now", "{}")].concat();
    let old = |name: &str, arguments: &str| {
        format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        )
    };
    let new = |name: &str, arguments: &str| {
        format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    };
    for text in [
        format!("<｜tool▁calls▁begin｜>{}\n{}<｜tool▁calls▁end｜>", old("weather", FIRST), old("now", "{}")),
        format!(
            "<｜tool▁calls▁begin｜>\n{}{}<｜tool▁calls▁end｜>\n",
            new("weather", FIRST),
            new("now", "{}")
        ),
        format!("<｜tool▁calls▁begin｜>{}{}", new("weather", FIRST), old("now", "{}")),
        format!("{}{}", old("weather", FIRST), new("now", "{}")),
        format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{FIRST}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}"
        ),
        format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{FIRST}<｜tool▁call▁end｜>{}",
            new("now", "{}")
        ),
    ] {
        deepseek().reads(&text, &both);
    }
}

#[test]
fn a_call_without_arguments_is_a_call() {
    let now = call(0, "now", "{}");
    let end = "<｜tool▁call▁end｜>";
    for head in
        ["now<｜tool▁sep｜>", " now\n<｜tool▁sep｜> ", "now<｜tool▁sep｜>null", "now<｜tool▁sep｜> null\n"]
    {
        let text = format!("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{head}");
        deepseek().reads(&text, &now);
        deepseek().reads(
            &format!("{text}{end}<｜tool▁calls▁end｜>ok"),
            &[now.clone(), vec![content("ok")]].concat(),
        );
        deepseek().reads(
            &format!("{text}{end}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{\"a\": 1}}{end}"),
            &[now.clone(), call(1, "f", "{\"a\": 1}")].concat(),
        );
    }
    for body in
        ["now", "now\n", "now\n```json\n```", "now\n```json\nnull\n```", "now\n```\n\n```\n", "now```null```"]
    {
        for end in ["", end, "<｜tool▁calls▁end｜>"] {
            deepseek().reads(&format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{body}{end}"), &now);
        }
    }
    // The parser cannot know whether the name was complete or whether arguments would have followed.
    deepseek().reads_cut("<｜tool▁call▁begin｜>now<｜tool▁sep｜>", &cut(0, "now", ""));
    let name = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>no";
    deepseek().reads_cut(name, &[content(name)]);
}

#[test]
fn whitespace_around_the_name_is_dropped() {
    for text in [
        "<｜tool▁call▁begin｜> f <｜tool▁sep｜> {\"a\": 1}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>\nf\n<｜tool▁sep｜>\n{\"a\": 1}\n<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜> function <｜tool▁sep｜> f \n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>",
    ] {
        deepseek().reads(text, &call(0, "f", "{\"a\": 1}"));
    }
}

#[test]
fn text_around_calls_is_content() {
    deepseek().reads(
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done. ```x```",
        &[vec![content("I look.")], call(0, "now", "{}"), vec![content("Done. ```x```")]].concat(),
    );
    deepseek().reads(
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>```py```",
        &[call(0, "now", "{}"), vec![content("```py```")]].concat(),
    );
}

#[test]
fn text_that_is_not_a_call_stays_text() {
    for text in [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜>now",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]\n```",
        "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
        "<｜tool▁call▁begin｜> <｜tool▁sep｜>{}",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜><b>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```python\nnull\nnull```",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜><｜tool▁call▁end｜>",
        "<｜tool",
    ] {
        deepseek().is_text(text);
    }
    let text = "<｜tool▁calls▁begin｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}";
    deepseek().reads(text, &[vec![content("<｜tool▁calls▁begin｜>")], call(0, "now", "{}")].concat());
    deepseek().reads("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"b", &cut(0, "f", "{\"a\": \"b"));
}

#[test]
fn reasoning_precedes_calls() {
    let r1 = both(ToolFormat::DeepSeek, ReasoningFormat::DeepSeek);
    let called = call(0, "now", "{}");
    let text = "Hm.\n</think>\n\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>";
    let expected = [vec![reasoning("Hm.\n")], called].concat();
    r1.reads(&format!("<think>\n{text}"), &expected);
    r1.clone().after("<｜Assistant｜><think>\n").reads(text, &expected);
    // The model repeats the tag that ends the prompt.
    r1.clone().after("<｜Assistant｜><think>\n").reads(&format!("<think>\n{text}"), &expected);
    r1.is_text("No tag opened it.</think>");
}
