//! Checks the guarantees that hold for every format and every text, with generated texts, most of which consist of
//! fragments of formats.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use server_parsers::{Delta, Formats, ReasoningFormat, ToolFormat};

use crate::check::{Case, WORK_PER_BYTE, both, joined, tools, well_formed};

/// All compatible combinations of a tool format and a reasoning format.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for tool in ToolFormat::ALL {
        for reasoning in ReasoningFormat::ALL {
            let formats = Formats { tool, reasoning };
            if formats.check().is_ok() {
                cases.push(Case { formats, tools: tools(), prompt: "" });
            }
        }
    }
    cases
}

/// Markers that are recognized anywhere in a text.
fn markers(tool: ToolFormat) -> &'static [&'static str] {
    match tool {
        ToolFormat::None | ToolFormat::Gptoss => &[],
        ToolFormat::Hermes3 => &["<tool_call>"],
        ToolFormat::Llama3 => &["<|python_tag|>", "<|python_start|>"],
        ToolFormat::Mistral | ToolFormat::Devstral => &["[TOOL_CALLS]"],
        ToolFormat::Phi4 => &["functools", "<|tool_call|>"],
        ToolFormat::Qwen3Coder => &["<tool_call>", "<function="],
        ToolFormat::Lfm2 => &["<|tool_call_start|>"],
        ToolFormat::Gemma4 => &["<|tool_call>", "```tool_code"],
        ToolFormat::MiniCpm5 => &["<function name="],
        ToolFormat::DeepSeek => &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
        ToolFormat::Granite => &["<|tool_call|>", "<tool_call>"],
    }
}

/// Fragments of formats.
const PARTS: [&str; 92] = [
    "<tool_call>",
    "</tool_call>",
    "<|tool_call|>",
    "<tool_",
    "call>",
    "</",
    "<",
    ">",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "{\"name\": \"f\", \"arguments\": {",
    "{\"name\":\"now\",\"parameters\":{}}",
    "\"name\"",
    "\"arguments\"",
    "\"parameters\": ",
    "\"a\": 1",
    ":",
    ",",
    ";",
    "\"",
    "'",
    "\\",
    "\\u00",
    "\\ud83d",
    "\n",
    " ",
    "é",
    "\u{1F600}",
    "x",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[f(",
    "f(a=",
    "a='",
    "True",
    "None",
    "-1.5e3",
    "0x1",
    "\"\"\"",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "functools",
    "functools[",
    "<function=f>",
    "<function=",
    "</function>",
    "<parameter=a>",
    "<parameter=days>",
    "<parameter=",
    "</parameter>",
    "<function name=\"f\">",
    "<function name=",
    "<param name='where'>",
    "<param name=",
    "</param>",
    "<![CDATA[",
    "]]>",
    "/",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_call>",
    "<tool_call|>",
    "call:f{",
    "call:",
    "a:",
    "<|\"|>",
    "<|\"",
    "<turn|>",
    "```tool_code\n",
    "```",
    "print(",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "function<｜tool▁sep｜>f\n```json\n{",
    "<think>",
    "</think>",
    "<|channel|>",
    "commentary to=functions.f",
    "<|message|>",
    "<|end|>",
    "<|channel>thought",
    "<channel|>",
    "weather",
];

/// Prints the text under test if the test fails.
struct PrintOnPanic(String);

impl Drop for PrintOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

fn garbage(random: &mut StdRng) -> String {
    let parts = random.random_range(1..24);
    (0..parts).map(|_| PARTS[random.random_range(0..PARTS.len())]).collect()
}

/// Random text that follows the beginning of a call, so that the inner states of the parsers are tested.
fn likely(tool: ToolFormat, random: &mut StdRng) -> String {
    let marker = match markers(tool) {
        [] => "<|channel|>commentary to=functions.f<|message|>",
        markers => markers[random.random_range(0..markers.len())],
    };
    let body = match tool {
        ToolFormat::Qwen3Coder => "<function=weather><parameter=city>",
        ToolFormat::MiniCpm5 => "\"weather\"><param name='where'>",
        ToolFormat::Gemma4 => "call:f{a:",
        ToolFormat::Mistral | ToolFormat::Devstral => "f[ARGS]{\"a\": ",
        ToolFormat::Lfm2 => "[weather(days=",
        ToolFormat::DeepSeek => "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": ",
        ToolFormat::Phi4 => "[{\"name\": \"f\", \"arguments\": {\"a\": ",
        ToolFormat::Gptoss => "{\"a\": ",
        _ => "{\"name\": \"f\", \"arguments\": {\"a\": ",
    };
    format!("{marker}{body}{}", garbage(random))
}

#[test]
fn garbage_is_parsed_the_same_however_it_is_split() {
    for case in cases() {
        for seed in 0..60 {
            let mut random = StdRng::seed_from_u64(seed);
            for text in [garbage(&mut random), likely(case.formats.tool, &mut random)] {
                let _print = PrintOnPanic(format!("seed {seed}, {:?}: {text:?}", case.formats));
                let whole = case.read([text.as_str()]);
                let letters: Vec<String> = text.chars().map(String::from).collect();
                assert_eq!(case.read(letters.iter().map(String::as_str)), whole);
                for _ in 0..3 {
                    let cut =
                        text.char_indices().map(|(at, _)| at).nth(random.random_range(0..letters.len()));
                    let (head, tail) = text.split_at(cut.unwrap_or(0));
                    assert_eq!(case.read([head, tail]), whole);
                }
            }
        }
    }
}

#[test]
fn short_garbage_is_parsed_the_same_at_every_split() {
    for case in cases() {
        for seed in 1000..1008 {
            let mut random = StdRng::seed_from_u64(seed);
            let text = likely(case.formats.tool, &mut random);
            let _print = PrintOnPanic(format!("seed {seed}, {:?}: {text:?}", case.formats));
            let whole = case.read([text.as_str()]);
            case.splits(&text, &whole);
        }
    }
}

#[test]
fn text_without_calls_is_not_changed() {
    for case in cases() {
        // The tags of reasoning, Harmony's headers and the tokens that end Gemma's turns are markup even without a
        // call.
        if case.formats.reasoning != ReasoningFormat::None || case.formats.tool == ToolFormat::Gptoss {
            continue;
        }
        for seed in 0..300 {
            let mut random = StdRng::seed_from_u64(seed);
            let text = garbage(&mut random).replace("<turn|>", "") + "x";
            let _print = PrintOnPanic(format!("seed {seed}, {:?}: {text:?}", case.formats));
            let deltas = case.read([text.as_str()]);
            if !deltas.iter().any(|delta| matches!(delta, Delta::ToolCallBegin { .. })) {
                assert_eq!(deltas, [Delta::Content(text.clone())]);
            }
            let deltas = case.clone().without_tools().read([text.as_str()]);
            assert_eq!(deltas, [Delta::Content(text.clone())]);
        }
    }
}

#[test]
fn content_never_ends_with_a_prefix_of_a_marker() {
    for case in cases() {
        let markers = markers(case.formats.tool);
        for seed in 0..60 {
            let mut random = StdRng::seed_from_u64(seed);
            let text = format!("{}{}", garbage(&mut random), likely(case.formats.tool, &mut random));
            let _print = PrintOnPanic(format!("seed {seed}, {:?}: {text:?}", case.formats));
            let mut parser = case.parser();
            for (at, letter) in text.char_indices() {
                let deltas = parser.push(letter.encode_utf8(&mut [0; 4]));
                let Some(Delta::Content(content)) = deltas.last() else { continue };
                let so_far = &text[..at + letter.len_utf8()];
                for marker in markers {
                    // In a text like `<tool_<`, only the last possible beginning of a marker is held back.
                    let begun = marker.char_indices().skip(1).map(|(at, _)| &marker[..at]);
                    let begun: Vec<&str> = begun.filter(|begun| so_far.ends_with(begun)).collect();
                    let Some(begun) = begun.iter().find(|begun| content.ends_with(**begun)) else { continue };
                    // The content may end with the beginning of a marker only if the text contains this beginning
                    // twice, and only the first occurrence was emitted. The last occurrence must still be held back.
                    let mut parser = case.parser();
                    parser.push(so_far);
                    let held = parser.finish();
                    let is_held = matches!(held.last(), Some(Delta::Content(held)) if held.ends_with(begun));
                    assert!(is_held, "{content:?} before {marker:?}");
                }
            }
        }
    }
}

#[test]
fn random_characters_are_parsed_the_same_however_they_are_split() {
    const LETTERS: &[char] = &[
        '<', '|', '>', '{', '}', '[', ']', '(', ')', '"', '\'', '\\', ':', ',', '=', 'f', 'a', '1', ' ', '\n',
    ];
    for case in cases() {
        for seed in 0..20 {
            let mut random = StdRng::seed_from_u64(seed);
            let tail: String = (0..200).map(|_| LETTERS[random.random_range(0..LETTERS.len())]).collect();
            let text = format!("{}{tail}", likely(case.formats.tool, &mut random));
            let _print = PrintOnPanic(format!("seed {seed}, {:?}: {text:?}", case.formats));
            let letters: Vec<String> = text.chars().map(String::from).collect();
            assert_eq!(case.read(letters.iter().map(String::as_str)), case.read([text.as_str()]));
        }
    }
}

/// Returns long calls, and long texts that are not calls, whose length is proportional to `bytes`.
fn long(bytes: usize) -> Vec<(Formats, String)> {
    let text = "a<b>\\n \\\"q\\\" [x] ".repeat(bytes / 20);
    let list = "1, [\"x\"], {\"y\": true}, ".repeat(bytes / 24) + "0";
    let formats = |tool| Formats { tool, reasoning: ReasoningFormat::None };
    let arguments = format!("{{\"a\": \"{text}\", \"b\": [{list}]}}");
    let quoted = arguments.replace('\\', "\\\\").replace('"', "\\\"");
    let python = format!("weather(city='{text}', tags=[{}])", list.replace("true", "True"));
    let gemma = format!(
        "{{a:<|\"|>{text}<|\"|>,b:[{}]}}",
        list.replace("\"x\"", "<|\"|>x<|\"|>").replace("\"y\"", "y")
    );
    let hermes = formats(ToolFormat::Hermes3);
    vec![
        (hermes, format!("<tool_call>{{\"name\": \"f\", \"arguments\": {arguments}}}</tool_call>")),
        (hermes, format!("<tool_call>{{\"arguments\": {arguments}, \"name\": \"f\"}}</tool_call>")),
        (hermes, format!("<tool_call>{{\"name\": \"f\", \"arguments\": \"{quoted}\"}}</tool_call>")),
        (hermes, format!("<tool_call>{{\"x\": {arguments}}}</tool_call>")),
        (hermes, "<tool_call>{\"x\":".repeat(bytes / 16)),
        (hermes, "<tool_call>".repeat(bytes / 11)),
        (hermes, "<tool_call".repeat(bytes / 10)),
        (hermes, "<".repeat(bytes)),
        (hermes, format!("{}x", " \n".repeat(bytes / 2))),
        (hermes, format!("<tool_call>{{\"name\": \"now\"}}{}", "\n".repeat(bytes))),
        (formats(ToolFormat::Llama3), format!("{{\"parameters\": {arguments}, \"name\": \"f\"}}")),
        (formats(ToolFormat::Llama3), format!("[{python}]")),
        (formats(ToolFormat::Mistral), format!("[TOOL_CALLS]f[ARGS]{arguments}")),
        (formats(ToolFormat::Mistral), "[TOOL_CALLS][".repeat(bytes / 13)),
        (formats(ToolFormat::Phi4), format!("functools[{{\"name\": \"f\", \"arguments\": {arguments}}}]")),
        (
            formats(ToolFormat::Granite),
            format!("<|tool_call|>[{{\"arguments\": {arguments}, \"name\": \"f\"}}]"),
        ),
        (
            formats(ToolFormat::Gptoss),
            format!("<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>"),
        ),
        (formats(ToolFormat::Gptoss), "<|start|>".repeat(bytes / 9)),
        (
            formats(ToolFormat::Qwen3Coder),
            format!(
                "<function=weather><parameter=city>{text}</parameter><parameter=tags>[{list}]</parameter></function>"
            ),
        ),
        (
            formats(ToolFormat::Qwen3Coder),
            format!("<function=weather><parameter=city>{}", "</parameter>\n</para".repeat(bytes / 20)),
        ),
        (formats(ToolFormat::Qwen3Coder), "<function=f>".repeat(bytes / 12)),
        (
            formats(ToolFormat::MiniCpm5),
            format!(
                "<function name=f><param name=a><![CDATA[{text}]]></param><param name=a>{text}</param></function>"
            ),
        ),
        (formats(ToolFormat::Lfm2), format!("<|tool_call_start|>[{python}]<|tool_call_end|>")),
        (formats(ToolFormat::Gemma4), format!("<|tool_call>call:f{gemma}<tool_call|>")),
        (formats(ToolFormat::Gemma4), "<|tool_call>call:f{a:<|".repeat(bytes / 24)),
        (
            formats(ToolFormat::DeepSeek),
            format!("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"),
        ),
        (
            Formats { tool: ToolFormat::Hermes3, reasoning: ReasoningFormat::Qwen3 },
            format!("<think>{text}</thin</think>{text}"),
        ),
    ]
}

#[test]
fn work_is_linear_in_the_text() {
    let work = |formats: Formats, text: &str, by_letters: bool| {
        let case = Case { formats, tools: tools(), prompt: "" };
        let mut parser = case.parser();
        let mut deltas = Vec::new();
        if by_letters {
            for letter in text.chars() {
                deltas.extend(parser.push(letter.encode_utf8(&mut [0; 4])));
            }
        } else {
            deltas.extend(parser.push(text));
        }
        let work = parser.work();
        deltas.extend(parser.finish());
        well_formed(&deltas);
        assert!(work <= WORK_PER_BYTE * text.len() as u64, "{formats:?}: {work} for {}", text.len());
        (work, joined(deltas).len())
    };
    for ((formats, short), (_, tall)) in long(16 << 10).into_iter().zip(long(64 << 10)) {
        for by_letters in [false, true] {
            let (little, _) = work(formats, &short, by_letters);
            let (much, _) = work(formats, &tall, by_letters);
            let bound = little * tall.len() as u64 / short.len() as u64 * 21 / 20;
            assert!(much <= bound, "{formats:?}: {little} for {}, {much} for {}", short.len(), tall.len());
        }
    }
}

#[test]
fn a_long_call_is_passed_on_in_fragments() {
    for (formats, text) in long(4 << 10) {
        // Skip calls that are emitted only when they are complete, and texts that are not calls.
        if !text.contains("city=") && !text.starts_with("<tool_call>{\"name\": \"f\"") {
            continue;
        }
        let case = Case { formats, tools: tools(), prompt: "" };
        let mut parser = case.parser();
        let mut fragments = 0;
        for letter in text.chars() {
            fragments += parser.push(letter.encode_utf8(&mut [0; 4])).len();
        }
        assert!(fragments > 1000, "{formats:?}: {fragments}");
    }
}

#[test]
fn reasoning_survives_a_cut_off() {
    for reasoning in [ReasoningFormat::Qwen3, ReasoningFormat::DeepSeek, ReasoningFormat::MiniCpm5] {
        both(ToolFormat::Hermes3, reasoning)
            .reads("<think>\nHm </thi", &[Delta::Reasoning("Hm </thi".to_owned())]);
    }
}

#[test]
fn no_text_is_lost() {
    for case in cases() {
        for seed in 0..400 {
            let mut random = StdRng::seed_from_u64(seed);
            let text =
                if seed % 2 == 0 { garbage(&mut random) } else { likely(case.formats.tool, &mut random) };
            // Skip texts with several tagged arguments: if two of them have the same name, only the first is returned.
            let repeats = |tag: &str| text.matches(tag).count() > 1;
            if repeats("<parameter=") || repeats("<param name=") {
                continue;
            }
            let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            let (head, tail) = text.split_at(ends[random.random_range(0..ends.len())]);
            let _print = PrintOnPanic(format!("seed {seed}, {:?}: {head:?} {tail:?}", case.formats));
            let deltas = case.read([head, "§", tail]);
            let found = deltas.iter().any(|delta| match delta {
                Delta::Content(text) | Delta::Reasoning(text) | Delta::ToolCallArguments { text, .. } => {
                    text.contains('§')
                }
                Delta::ToolCallBegin { name, .. } => name.contains('§'),
                Delta::ToolCallEnd { .. } => false,
            });
            // A Python word that is cut off, such as `Non`, is dropped unless it is a number or the beginning of a
            // Boolean. A word in a header is dropped, too, because headers are markup.
            let is_cut = matches!(case.formats.tool, ToolFormat::Llama3 | ToolFormat::Lfm2)
                && !matches!(deltas.last(), Some(Delta::ToolCallEnd { .. } | Delta::Content(_)));
            let is_header =
                case.formats.tool == ToolFormat::Gptoss || case.formats.reasoning == ReasoningFormat::Gptoss;
            assert!(found || is_cut || is_header, "{deltas:?}");
        }
    }
}
