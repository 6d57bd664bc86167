//! Tests each kind of form with texts that match and texts that do not.

use serde_json::{Value, json};
use server_guidance::{Form, Tag, TriggeredTags, limits};

use crate::support::{Fit, check, compile, draw, fit};

fn json_form(schema: Value) -> Form {
    Form::Json { schema, at: "schema".to_owned() }
}

fn regex(pattern: &str) -> Form {
    Form::Regex { pattern: pattern.to_owned(), at: "regex".to_owned() }
}

fn grammar(text: &str) -> Form {
    Form::Grammar { text: text.to_owned(), at: "grammar".to_owned() }
}

#[test]
fn a_literal_matches_itself_with_its_special_tokens() {
    check(&Form::literal("yes, \"ä\"\n"), &["yes, \"ä\"\n"], &["", "yes", "yes, \"ä\"\nx", "no"]);
    let marked = Form::literal("a<|channel|>b<think>");
    check(&marked, &["a<|channel|>b<think>"], &["a<|channel|>b"]);
    // The bytes that spell a special token do not match this token.
    let guide = compile(&Form::literal("<think>"));
    assert_eq!(fit(&guide, "<thin"), Fit::NotAfter(0));
}

#[test]
fn text_matches_anything_but_special_tokens() {
    check(&Form::text(), &["", "a", "{\"日本 🦀\n\n"], &["a<think>", "<|end|>"]);
    let bounded = Form::Text { excludes: vec!["no".to_owned(), "<b".to_owned()], chars_max: Some(5) };
    check(&bounded, &["", "nnnnn", "ääääö", "<a", "on"], &["no", "xnox", "123456", "a<b"]);
}

#[test]
fn a_regular_expression_matches_as_a_whole() {
    check(&regex("[a-c]{2}/\\d+"), &["ab/1", "cc/42"], &["ab", "a/1", "abc/1", "ab/1x"]);
    check(&regex("^(yes|no)$"), &["yes", "no"], &["yesno", "^yes"]);
    check(&regex("a\\/b\\$"), &["a/b$"], &["a/b"]);
    check(&regex("a|b"), &["a", "b"], &["ab"]);
    check(&regex(r"\d\w"), &["1_"], &["꧖a", "1ä"]);
}

#[test]
fn a_choice_matches_one_of_its_parts() {
    let choice = Form::Choice(["red", "green", "re", ""].map(Form::literal).to_vec());
    check(&choice, &["red", "green", "re", ""], &["r", "redgreen", "blue"]);
}

#[test]
fn every_kind_of_choice_may_have_as_many_parts_as_the_limit() {
    let words: Vec<String> = (0..limits::ELEMENTS_MAX).map(|index| format!("word {index}")).collect();
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    let literals = Form::Choice(words.iter().map(Form::literal).collect());
    let texts = ["word 0", "word 1234", "word 8191"];
    check(&literals, &texts, &["word", "word 8192", "word 12a"]);
    let alternatives = quoted.join(" | ");
    check(&grammar(&format!("start: {alternatives}")), &texts, &["word", "word 8192"]);
    check(&grammar(&format!("root ::= {alternatives}")), &texts, &["word", "word 8192"]);
    let texts = ["\"word 0\"", "\"word 1234\"", "\"word 8191\""];
    check(&json_form(json!({"enum": words})), &texts, &["\"word\"", "\"word 8192\""]);
    let parts: Vec<Value> = words.iter().map(|word| json!({"const": word})).collect();
    check(&json_form(json!({"anyOf": parts})), &texts, &["\"word\"", "\"word 8192\""]);
}

#[test]
fn sequences_and_repetitions_match_their_parts_in_order() {
    let form = Form::Sequence(vec![
        Form::literal("["),
        Form::Repeat { form: Box::new(regex("[0-9];")), min: 1, max: Some(3) },
        Form::literal("]").optional(),
    ]);
    check(&form, &["[1;", "[1;]", "[1;2;3;]"], &["[", "[]", "[1;2;3;4;]", "1;"]);
    let many = Form::literal("ab").repeated(2);
    check(&many, &["abab", "ababab"], &["ab", "aba"]);
}

#[test]
fn text_ends_at_the_first_occurrence_of_its_end() {
    let until = Form::Sequence(vec![Form::Until("</a>".to_owned()), Form::literal("!")]);
    check(&until, &["</a>!", "x<</a>!", "</</a>!"], &["</a>", "</a>x</a>!", "!"]);
    let token = Form::Sequence(vec![Form::Until("<|end|>".to_owned()), Form::literal("!")]);
    check(&token, &["<|end|>!", "x<|end|>!"], &["<|end|>", "x!"]);
    // The same holds for any text before a literal.
    let sequence = Form::Sequence(vec![Form::text(), Form::literal("STOP")]);
    check(&sequence, &["STOP", "xSTOP", "STSTOP"], &["STOPSTOP", "x"]);
    let excluding = Form::Sequence(vec![
        Form::Text { excludes: vec!["x".to_owned(), "E".to_owned()], chars_max: Some(3) },
        Form::literal("E"),
    ]);
    check(&excluding, &["E", "abcE"], &["xE", "abcdE", "abc"]);
}

#[test]
fn only_json_that_is_the_whole_output_may_have_layout() {
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a"],
        "additionalProperties": false,
    });
    let free = json_form(schema.clone());
    check(
        &free,
        &["{\"a\":1}", "{\"a\": 1, \"b\": [true, false]}", "{\n  \"a\": -12,\n  \"b\": [\n    true\n  ]\n}"],
        &["{}", "{\"a\":1.5}", "{\"a\":1,\"c\":2}", " {\"a\":1}", "{\"a\":1} ", "{\"b\":[]}"],
    );
    let spaced = format!("{{{}\"a\":1}}", " ".repeat(64));
    let too_far = format!("{{{}\"a\":1}}", " ".repeat(65));
    check(&free, &[&spaced], &[&too_far]);
    let within = Form::Sequence(vec![Form::literal("<"), json_form(schema), Form::literal(">")]);
    check(
        &within,
        &["<{\"a\":1}>", "<{\"a\": 1, \"b\": [true, false]}>", "<{\"a\":1,\"b\":[]}>"],
        &["<{ \"a\":1}>", "<{\"a\":1,  \"b\":[]}>", "<{\"a\":1} >"],
    );
}

#[test]
fn json_and_another_form_may_begin_at_the_same_position() {
    let number = Form::Sequence(vec![json_form(json!({"type": "integer"})), Form::literal("\nend")]);
    let choice = Form::Choice(vec![json_form(json!({"type": "object"})), Form::literal("none"), number]);
    check(&choice, &["{}", "none", "{\"a\": [1]}", "42\nend"], &["none!", "42", "{}\nend"]);
}

#[test]
fn a_lark_grammar_is_followed() {
    let lark = "start: \"SELECT \" column (\", \" column)* \" FROM \" NAME\n\
                column: NAME | \"count(\" column \")\"\nNAME: /[a-z]+/";
    let text = "SELECT a, count(count(b)) FROM t";
    check(&grammar(lark), &[text], &["SELECT ", "SELECT a FROM ", "SELECT count(a FROM t"]);
    // The grammar is also followed if it is part of another form, and if it is used twice.
    let one = grammar(lark);
    let twice =
        Form::Sequence(vec![Form::literal("<"), one.clone(), Form::literal(">;<"), one, Form::literal(">")]);
    check(&twice, &["<SELECT a FROM b>;<SELECT c FROM d>"], &["<SELECT a FROM b>"]);
}

#[test]
fn an_ebnf_grammar_is_followed() {
    let arithmetic = "# sums\nroot ::= expression\n\
        expression ::= term (ws [-+] ws term)*\n\
        term ::= factor (ws (\"*\" | \"/\") ws factor)*\n\
        factor ::= number | \"(\" ws expression ws \")\"\n\
        number ::= [0-9]+ (\".\" [0-9]{1,2})?\n\
        ws ::= \" \"*";
    check(
        &grammar(arithmetic),
        &["1", "1+2", "(1 + 2.50)*3", "((7))"],
        &["", "1+", "(1", "1.234", "a", "1 2"],
    );
    let list = "root ::= \"[\" (item (\",\" item)*)? \"]\"\nitem ::= \"\\\"\" [^\"\\\\\\n]* \"\\\"\" | root";
    check(&grammar(list), &["[]", "[\"a\",[\"ä\",[]]]"], &["[", "[,]", "[\"a\" ]"]);
    let choice = "root ::= \"yes\" | \"no\" | \"maybe\" \"!\"?";
    check(&grammar(choice), &["yes", "no", "maybe", "maybe!"], &["ye", "yes!"]);
}

fn calls(at_least_one: bool, stop_after_first: bool) -> Form {
    let tag =
        |name: &str, schema: Value| Tag::new(format!("<f={name}>"), json_form(schema), &["</f>".to_owned()]);
    Form::TriggeredTags(TriggeredTags {
        triggers: vec!["<f=".to_owned()],
        tags: vec![tag("a", json!({"type": "object"})), tag("b", json!({"type": "integer"}))],
        at_least_one,
        stop_after_first,
        excludes: Vec::new(),
        at: "tags".to_owned(),
    })
}

#[test]
fn text_is_free_until_a_trigger() {
    check(
        &calls(false, false),
        &["", "text", "a<f", "<f=a>{}</f>", "x<f=b>1</f>y<f=a>{\"k\": []}</f>z", "<f=b>1</f> <f"],
        &["<f=", "x<f=c>", "<f=b>{}</f>", "<f=b>1</f", "<f=b>1</f><f=a>"],
    );
    check(&calls(true, false), &["<f=b>1</f>", "<f=b>1</f>x<f=a>{}</f>y"], &["", "x", "x<f=b>1</f>"]);
    check(&calls(true, true), &["<f=b>1</f>"], &["", "<f=b>1</f>x", "x<f=b>1</f>"]);
    check(&calls(false, true), &["", "x", "x<f=b>1</f>"], &["x<f=b>1</f>x"]);
}

#[test]
fn a_trigger_may_be_a_token() {
    let tag = Tag::new("<|tool_call>call:", json_form(json!({"type": "null"})), &["<tool_call|>".to_owned()]);
    let form = Form::TriggeredTags(TriggeredTags {
        triggers: vec!["<|tool_call>".to_owned()],
        tags: vec![tag],
        at_least_one: false,
        stop_after_first: false,
        excludes: Vec::new(),
        at: "tags".to_owned(),
    });
    let call = "<|tool_call>call:null<tool_call|>";
    let texts = [String::new(), "x".to_owned(), call.to_owned(), format!("x{call}y{call}")];
    check(&form, &texts.each_ref().map(String::as_str), &["<|tool_call>", "x<|tool_call>y", "<tool_call|>"]);
}

#[test]
fn sampled_texts_match_their_form() {
    let forms = [
        calls(false, false),
        calls(true, true),
        grammar("root ::= \"(\" root? \")\" | [a-z]{1,4} (\",\" root)?"),
        Form::Sequence(vec![
            Form::Until("<|end|>".to_owned()),
            regex("[ab]+c"),
            Form::Until("</".to_owned()),
        ]),
    ];
    for form in &forms {
        let guide = compile(form);
        let mut whole = 0;
        for seed in 0..40 {
            let drawn = draw(&guide, seed, 400);
            if drawn.is_whole {
                whole += 1;
                assert_eq!(fit(&guide, &drawn.text()), Fit::Whole, "{:?}", drawn.text());
            }
        }
        assert!(whole > 20, "only {whole} of 40 texts are complete: {form:?}");
    }
}

#[test]
fn a_compiled_form_is_cached_and_its_sequences_are_independent() {
    let guide = compile(&json_form(json!({"type": "array", "items": {"type": "string"}})));
    let texts: Vec<Vec<u8>> = (0..600).map(|seed| draw(&guide, seed, 40).bytes).collect();
    // The result is the same with a warm lexer, and with more sequences than can share a lexer.
    for (seed, text) in (0..600).zip(&texts).step_by(13) {
        assert_eq!(draw(&guide, seed, 40).bytes, *text);
    }
}
