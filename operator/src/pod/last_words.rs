//! Why a process has ended, out of what it wrote last: the line that says so, which is seldom the very last. Pure.

use serde_json::Value;

/// How programs begin the line that says why they end.
const ERROR: &str = "error:";
/// What precedes the place of a panic, and its words on the next line.
const PANIC: &str = "panicked at ";
/// Lines that tell what could be done to learn more.
const HINTS: [&str; 2] = ["note:", "For more information"];

/// Why a process has ended that wrote `text`: nothing if that says nothing. What changes from one such end to the next,
/// times and numbers of threads, is left out.
pub(crate) fn last_words(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    if let Some(at) = lines.iter().rposition(|line| line.starts_with(ERROR)) {
        // Until the empty line before the usage, which is no part of it.
        let paragraph = lines[at..].iter().take_while(|line| !line.is_empty()).copied();
        let words = paragraph.collect::<Vec<_>>().join(" ");
        return words[ERROR.len()..].trim().to_owned();
    }
    if let Some(at) = lines.iter().rposition(|line| line.contains(PANIC)) {
        let place = lines[at].split_once(PANIC).map_or("", |(_, place)| place);
        let words = lines.get(at + 1).copied().unwrap_or_default();
        return format!("{PANIC}{place} {words}").trim().to_owned();
    }
    let says_why = |line: &&&str| !line.is_empty() && !HINTS.iter().any(|hint| line.starts_with(hint));
    lines.iter().rev().find(says_why).map(|line| message(line)).unwrap_or_default()
}

/// What a line of a log says.
fn message(line: &str) -> String {
    let Ok(entry) = serde_json::from_str::<Value>(line) else { return line.to_owned() };
    match (entry["message"].as_str(), entry["error"].as_str()) {
        (Some(message), Some(error)) => format!("{message}: {error}"),
        (Some(message), None) => message.to_owned(),
        (None, _) => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::last_words;

    #[test]
    fn the_line_that_says_why_is_found_wherever_it_is() {
        for (text, words) in [
            ("", ""),
            (
                "loading\nerror: failed to read a.gguf: it is not there\n",
                "failed to read a.gguf: it is not there",
            ),
            (
                "error: unexpected argument '--wieghts' found\n\n  tip: a similar argument exists: '--weights'\n\nUsage: server [OPTIONS]\n\nFor more information, try '--help'.\n",
                "unexpected argument '--wieghts' found",
            ),
            (
                "error: invalid value 'tiny' for '--weights <FORM>'\n  [possible values: auto, fine]\n\nFor more information, try '--help'.",
                "invalid value 'tiny' for '--weights <FORM>' [possible values: auto, fine]",
            ),
            (
                "\nthread 'engine' (4711) panicked at server/engine/src/engine.rs:9:5:\nthe pool is broken\nnote: run with `RUST_BACKTRACE=1`\n",
                "panicked at server/engine/src/engine.rs:9:5: the pool is broken",
            ),
            (
                r#"{"timestamp":"2026-11-21T10:00:00Z","level":"ERROR","message":"the engine died","error":"no memory"}"#,
                "the engine died: no memory",
            ),
            ("one\ntwo\n\n", "two"),
        ] {
            assert_eq!(last_words(text), words, "{text}");
        }
    }
}
