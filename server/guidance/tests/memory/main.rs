//! Compares the memory that the compiler reports with the memory that is allocated. The tests take turns, because they
//! count the allocations of the whole process.

use std::sync::{Mutex, PoisonError};

use peak_alloc::PeakAlloc;
use serde_json::{Map, Value, json};
use server_engine::{Guide as _, GuideError, GuideState, TokenSet};
use server_guidance::limits::GuideLimits;
use server_guidance::{Compiler, Form, Guide, Vocabulary};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;
static TURN: Mutex<()> = Mutex::new(());

fn compiler() -> Compiler {
    let bytes = (0..=255u8).map(|byte| (vec![byte], false));
    let longer = [(vec![b'x'; 64], false), (b"<end>".to_vec(), true)];
    let vocabulary = Vocabulary::new(bytes.chain(longer)).expect("a vocabulary");
    Compiler::with_limits(vocabulary, GuideLimits { sequence_bytes_max: 1 << 30, ..GuideLimits::default() })
        .expect("a vocabulary")
}

/// A pseudorandom number in hexadecimal.
fn word(number: u64) -> String {
    format!("{:012x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16)
}

fn words(count: u64) -> Vec<String> {
    (0..count).map(word).collect()
}

fn json_form(schema: Value) -> Form {
    Form::Json { schema, at: String::new() }
}

fn grammar(text: String) -> Form {
    Form::Grammar { text, at: String::new() }
}

/// The schema of an object with `count` properties. `schema` returns the schema of a property, given its number.
fn object(count: u64, schema: impl Fn(u64) -> Value) -> Value {
    let properties: Map<String, Value> = (0..count).map(|number| (word(number), schema(number))).collect();
    json!({"type": "object", "properties": properties, "additionalProperties": false})
}

/// Asserts that `reported` bytes are within a factor of two of `allocated` bytes.
fn assert_similar(reported: usize, allocated: usize, what: &str) {
    assert!(
        reported <= 2 * allocated && allocated <= 2 * reported,
        "{what}: {reported} bytes are reported, {allocated} bytes are allocated"
    );
}

/// Makes a sequence follow `text`, whose tokens are bytes. The set of allowed tokens is computed at every 16th position
/// and at the end.
fn follow(state: &mut dyn GuideState, text: &[u8]) -> Result<(), GuideError> {
    let mut allowed = TokenSet::new(258);
    for (position, byte) in text.iter().enumerate() {
        if position % 16 == 0 {
            state.allow(&mut allowed)?;
        }
        state.commit((*byte).into())?;
    }
    state.allow(&mut allowed)?;
    Ok(())
}

#[test]
fn the_reported_memory_of_a_compiled_form_is_close_to_the_allocated_memory() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let rules: String =
        (0..3000).map(|number| format!("r{number}: \"{}\" | r{}\n", word(number), number + 1)).collect();
    let repeats: String = (0..100).map(|number| format!("\"{}\"{{0,5000}} ", word(number))).collect();
    let mut required = object(2000, |_| json!({"type": "string"}));
    required["required"] = json!(words(2000));
    for (what, form) in [
        ("a literal", Form::literal("a")),
        ("optional properties", json_form(object(1000, |_| json!({"type": "integer"})))),
        ("required properties", json_form(required)),
        (
            "ranges",
            json_form(object(
                300,
                |number| json!({"minimum": 3 * number, "maximum": 10_000 + number, "type": "number"}),
            )),
        ),
        (
            "patterns",
            json_form(object(
                500,
                |number| json!({"pattern": format!("^{}[a-z]{{3,9}}$", word(number)), "type": "string"}),
            )),
        ),
        ("values", json_form(json!({"enum": words(8000)}))),
        ("alternatives", Form::Choice(words(4000).into_iter().map(Form::literal).collect())),
        ("rules", grammar(format!("start: r0\nr3000: \"x\"\n{rules}"))),
        ("repetitions", grammar(format!("start: {repeats}\n"))),
        ("a regular expression", Form::Regex { pattern: words(2000).join("|"), at: String::new() }),
    ] {
        let compiler = compiler();
        // The first compilation initializes the vocabulary.
        compiler.compile(&Form::literal("b")).unwrap();
        let key_bytes = format!("{form:?}").len();
        let (reported, allocated) = (compiler.memory_bytes(), ALLOCATOR.current_usage());
        let guide = compiler.compile(&form).unwrap();
        let compiled = compiler.memory_bytes();
        assert_similar(compiled - reported, ALLOCATOR.current_usage() - allocated - key_bytes, what);
        let allocated = ALLOCATOR.current_usage();
        let state = guide.start().unwrap();
        assert_similar(compiler.memory_bytes() - compiled, ALLOCATOR.current_usage() - allocated, what);
        drop(state);
    }
}

/// Compares the reported with the allocated memory, for a sequence that follows `text` and for a copy of the sequence.
fn compare_sequence(what: &str, form: &Form, text: &[u8]) {
    let compiler = compiler();
    let guide: Guide = compiler.compile(form).expect("the form is valid");
    // The first sequence makes the lexer build states, which must not count as memory of the next sequence.
    let mut other = guide.start().expect("a state");
    follow(&mut *other, &text[..text.len().min(100)]).expect("the text follows the form");
    drop(other);
    let (reported, allocated) = (compiler.memory_bytes(), ALLOCATOR.current_usage());
    let mut state = guide.start().expect("a state");
    follow(&mut *state, text).expect("the text follows the form");
    let grown = compiler.memory_bytes();
    assert_similar(grown - reported, ALLOCATOR.current_usage() - allocated, what);
    let allocated = ALLOCATOR.current_usage();
    let copy = state.fork();
    assert_similar(compiler.memory_bytes() - grown, ALLOCATOR.current_usage() - allocated, what);
    drop((state, copy));
    assert!(compiler.memory_bytes() <= grown, "{what}");
}

#[test]
fn the_reported_memory_of_a_sequence_grows_with_its_text() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let records =
        json!({"type": "array", "items": object(8, |_| json!({"type": ["string", "integer", "null"]}))});
    let record: Map<String, Value> = (0..8).map(|number| (word(number), json!(word(number)))).collect();
    let record = Value::Object(record).to_string();
    compare_sequence(
        "objects",
        &json_form(records),
        format!("[{}{record}]", format!("{record}, ").repeat(300)).as_bytes(),
    );
    let many = words(1000).iter().map(|word| format!("\"{}\"", &word[..6])).collect::<Vec<_>>().join(" | ");
    compare_sequence("alternatives", &grammar(format!("start: (\"x\" | {many})*\n")), &[b'x'; 1000]);
    // To compute the allowed tokens, the parser tries a token of 64 bytes, and creates a row for each byte.
    compare_sequence("a long token", &grammar(format!("start: (\"x\" | {many})*\n")), b"x");
    compare_sequence("a long lexeme", &grammar(format!("start: /[x]+/ (\"y\" | {many})\n")), &[b'x'; 5_000]);
    compare_sequence("ambiguous rules", &grammar("start: start start | \"x\"\n".to_owned()), &[b'x'; 250]);
    compare_sequence(
        "captures",
        &grammar("start: r\nr[capture]: r \"x\" | \"x\"\n".to_owned()),
        &[b'x'; 2000],
    );
    let growing = Form::Regex { pattern: "[ab]*a[ab]{12}".to_owned(), at: String::new() };
    let letters: Vec<u8> =
        (0..800).flat_map(|number| word(number).into_bytes()).map(|digit| b'a' + digit % 2).collect();
    compare_sequence("states", &growing, &letters);
}
