//! Tests which values each kind accepts, and the messages for other values.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::*;

fn check(kind: Kind, good: &[Value], bad: &[Value], expect: &Expect) {
    for value in good {
        assert_eq!(kind.check("it", value), Ok(()), "{value}");
    }
    let mut shown = String::new();
    for value in bad {
        let Err(Error::Invalid { code, param, message }) = kind.check("it", value) else {
            panic!("{value} was accepted")
        };
        assert!(message.starts_with(&format!("{param}: ")), "{message}");
        shown += &format!("{code} | {message}\n");
    }
    expect.assert_eq(&shown);
}

#[test]
fn numbers_have_ranges() {
    check(
        Kind::Integer(1, 5),
        &[json!(1), json!(5)],
        &[json!(0), json!(6), json!(1.0), json!("1"), json!(u64::MAX), json!(1e300)],
        &expect![[r#"
            integer_below_min_value | it: 0 is not an integer from 1 to 5
            integer_above_max_value | it: 6 is not an integer from 1 to 5
            invalid_type | it: 1.0 is not an integer from 1 to 5
            invalid_type | it: "1" is not an integer from 1 to 5
            integer_above_max_value | it: 18446744073709551615 is not an integer from 1 to 5
            invalid_type | it: 1e+300 is not an integer from 1 to 5
        "#]],
    );
    check(
        Kind::Number(0.001, 2.0),
        // After conversion to the engine's type, the first and the last accepted value equal the bounds.
        &[json!(0.001), json!(1), json!(2.000_000_000_1)],
        &[json!(0), json!(1e-50), json!(-1), json!(2.1), json!(3.5e38), json!(1e300), json!(null)],
        &expect![[r#"
            decimal_below_min_value | it: 0 is not a number from 0.001 to 2
            decimal_below_min_value | it: 1e-50 is not a number from 0.001 to 2
            decimal_below_min_value | it: -1 is not a number from 0.001 to 2
            decimal_above_max_value | it: 2.1 is not a number from 0.001 to 2
            decimal_above_max_value | it: 3.5e+38 is not a number from 0.001 to 2
            decimal_above_max_value | it: 1e+300 is not a number from 0.001 to 2
            invalid_type | it: null is not a number from 0.001 to 2
        "#]],
    );
}

#[test]
fn long_values_are_shortened_in_messages() {
    check(
        Kind::Text(5),
        &[json!("12345"), json!("éé")],
        &[json!("éééé"), json!("x".repeat(1000)), json!(7)],
        &expect![[r#"
            string_above_max_length | it: "éééé" is not a string of at most 5 bytes
            string_above_max_length | it: "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx… (1002 bytes) is not a string of at most 5 bytes
            invalid_type | it: 7 is not a string of at most 5 bytes
        "#]],
    );
    check(
        Kind::Pairs(2, 3, 4),
        &[json!({}), json!({"a": "b", "c": "d"}), json!({"éüñ": "日本語。"})],
        &[
            json!({"a": 1}),
            json!({"a": "12345"}),
            json!({"a": "日本語です"}),
            json!({"abcd": "x"}),
            json!({"a": "", "b": "", "c": ""}),
            json!([]),
        ],
        &expect![[r#"
            invalid_type | it.a: 1 is not a string of at most 4 characters
            string_above_max_length | it.a: "12345" is not a string of at most 4 characters
            string_above_max_length | it.a: "日本語です" is not a string of at most 4 characters
            string_above_max_length | it: "abcd" is not a string of at most 3 characters
            object_above_max_properties | it: has 3 members (limit: 2)
            invalid_type | it: an array is not an object of at most 2 strings of at most 4 characters with names of at most 3 characters
        "#]],
    );
}

#[test]
fn the_kind_that_a_value_resembles_most_determines_the_error() {
    check(
        Kind::Either(&[Kind::Text(3), Kind::Texts(2, 3), Kind::Array(&Kind::Integer(0, 9), 3)]),
        &[json!("abc"), json!([]), json!(["a", "b"]), json!([1, 2, 3])],
        &[
            json!("abcd"),
            json!(["abcd"]),
            json!(["a", "b", "c"]),
            json!([10]),
            json!([1, "a"]),
            json!([true]),
            json!(1),
        ],
        &expect![[r#"
            string_above_max_length | it: "abcd" is not a string of at most 3 bytes
            string_above_max_length | it[0]: "abcd" is not a string of at most 3 bytes
            array_above_max_length | it: has 3 elements (limit: 2)
            integer_above_max_value | it[0]: 10 is not an integer from 0 to 9
            invalid_type | it[1]: "a" is not an integer from 0 to 9
            invalid_type | it: an array is not a string of at most 3 bytes, an array of at most 2 strings or an array of at most 3 tokens
            invalid_type | it: 1 is not a string of at most 3 bytes, an array of at most 2 strings or an array of at most 3 tokens
        "#]],
    );
    check(
        Kind::Fields(&[("a", Kind::Boolean), ("b", Kind::OneOf(&["x", "y"]))]),
        &[json!({}), json!({"a": null, "b": "x", "c": 1})],
        &[json!({"a": 1}), json!({"b": "z"}), json!({"b": []}), json!("a")],
        &expect![[r#"
            invalid_type | it.a: 1 is not true or false
            invalid_value | it.b: "z" is not "x" or "y"
            invalid_type | it.b: an array is not "x" or "y"
            invalid_type | it: "a" is not an object
        "#]],
    );
}
