use super::*;

/// Returns the value at the start of `text` as the parser emits it, and the rest; `None` if there is no value.
fn split(text: &str) -> Option<(String, &str)> {
    let mut value = JsonValue::new();
    let mut written = String::new();
    for (at, letter) in text.char_indices() {
        match value.step(letter, &mut written) {
            ValueEffect::Continues => {}
            ValueEffect::Completes => return Some((written, &text[at + letter.len_utf8()..])),
            ValueEffect::AlreadyComplete => return Some((written, &text[at..])),
            ValueEffect::Invalid => return None,
        }
    }
    None
}

#[test]
fn a_value_ends_at_its_last_character() {
    for (value, rest) in [
        (r#"{"a": [1, -2.5e+3, {"b": null}], "c": "}]"}"#, "}"),
        ("[]", "]"),
        (" {}", " "),
        ("\"a\\\"b\"", "\""),
        ("0", ","),
        ("-1.5", " "),
        ("true", "x"),
    ] {
        assert_eq!(split(&format!("{value}{rest}")), Some((value.to_owned(), rest)), "{value}");
    }
}

#[test]
fn invalid_json_is_detected() {
    for text in [
        "{a: 1} ",
        "{'a': 1}",
        "[1,]",
        "{\"a\":1,}",
        "[01]",
        "+1 ",
        "1. ",
        ".5",
        "-",
        "tru ",
        "[}",
        "{]",
        "{\"a\" 1}",
        "{\"a\":}",
        "- ",
        "None ",
        "]",
        "nul,",
    ] {
        assert_eq!(split(text), None, "{text}");
    }
}

#[test]
fn corrected_strings_are_valid_json() {
    for (text, written) in [
        ("\"a\nb\tc\u{1}\"", r#""a\nb\tc\u0001""#),
        (r#""D:\data""#, r#""D:\\data""#),
        (r#""\u12""#, r#""\\u12""#),
        (r#""\uD83D\uDE00 \u00e9""#, r#""\ud83d\uDE00 \u00e9""#),
        (r#""\uD83D""#, "\"\u{fffd}\""),
        (r#""\uD83Dx\uDE00""#, "\"\u{fffd}x\u{fffd}\""),
        (r#""\uD83D\uD83D\uDE00""#, "\"\u{fffd}\\ud83d\\uDE00\""),
        (r#""\uD83D\q""#, "\"\u{fffd}\\\\q\""),
    ] {
        let (passed, _) = split(text).unwrap();
        assert_eq!(passed, written);
        assert!(serde_json::from_str::<String>(&passed).is_ok(), "{passed}");
    }
}

#[test]
fn a_string_is_decoded_as_by_a_json_parser() {
    for text in [r#"a\n\t\"\\\/ \u00e9 \ud83d\ude00 z"#, "", "\u{1F600}"] {
        let mut string = JsonString::default();
        let mut pieces = Pieces::default();
        for letter in text.chars() {
            assert!(!string.step(letter, &mut pieces));
        }
        assert!(string.step('"', &mut pieces));
        let meant: String = serde_json::from_str(&format!("\"{text}\"")).unwrap();
        assert_eq!(pieces.meant, meant);
        assert_eq!(serde_json::from_str::<String>(&quoted(&meant)).unwrap(), meant);
    }
}

#[test]
fn nesting_is_limited() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert!(split(&nested(NESTING_MAX)).is_some());
    assert!(split(&nested(NESTING_MAX + 1)).is_none());
}
