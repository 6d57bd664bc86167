//! Searches the last output of a process for the reason why the process has exited: the line with the error, which is
//! rarely the last line. This module is pure.

use serde_json::Value;

/// The prefix of the line in which a program reports the error that ends it.
const ERROR: &str = "error:";
/// The text before the location of a panic. The message of the panic is on the next line.
const PANIC: &str = "panicked at ";
/// The prefixes of lines that only refer to further help.
const HINTS: [&str; 2] = ["note:", "For more information"];

/// Returns the reason why a process that wrote `output` has exited; an empty string if the output contains none. From a
/// panic and from a JSON log entry, the returned text omits the parts that differ between two exits for the same
/// reason, such as timestamps and thread IDs.
pub(crate) fn exit_reason(output: &str) -> String {
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    if let Some(at) = lines.iter().rposition(|line| line.starts_with(ERROR)) {
        // The usage message follows an empty line and is not part of the error.
        let paragraph = lines[at..].iter().take_while(|line| !line.is_empty()).copied();
        let words = paragraph.collect::<Vec<_>>().join(" ");
        return words[ERROR.len()..].trim().to_owned();
    }
    if let Some(at) = lines.iter().rposition(|line| line.contains(PANIC)) {
        let place = lines[at].split_once(PANIC).map_or("", |(_, place)| place);
        let words = lines.get(at + 1).copied().unwrap_or_default();
        return format!("{PANIC}{place} {words}").trim().to_owned();
    }
    let is_reason = |line: &&&str| !line.is_empty() && !HINTS.iter().any(|hint| line.starts_with(hint));
    lines.iter().rev().find(is_reason).map(|line| message(line)).unwrap_or_default()
}

/// The reason why a container has exited, from its last output and its exit code.
pub(super) fn exit_message(output: &str, code: i32) -> String {
    /// Length of the part of a container's last output that a condition repeats, in characters.
    ///
    /// If exceeded: the text is truncated.
    const LENGTH_MAX: usize = 400;
    let reason: String = exit_reason(output).chars().take(LENGTH_MAX).collect();
    if reason.is_empty() {
        format!("exited with code {code}")
    } else {
        format!("{reason} (exit code {code})")
    }
}

/// The message of a log line, which may be a JSON object.
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
    use super::exit_reason;

    #[test]
    fn the_line_with_the_reason_is_found_anywhere_in_the_output() {
        for (output, reason) in [
            ("", ""),
            (
                "loading\nerror: failed to read a.gguf: it is not there\n",
                "failed to read a.gguf: it is not there",
            ),
            (
                "error: unexpected argument '--max-itll' found\n\n  tip: a similar argument exists: '--max-itl'\n\nUsage: server [OPTIONS]\n\nFor more information, try '--help'.\n",
                "unexpected argument '--max-itll' found",
            ),
            (
                "error: invalid value 'tiny' for '--backend <BACKEND>'\n  [possible values: openvino, sim]\n\nFor more information, try '--help'.",
                "invalid value 'tiny' for '--backend <BACKEND>' [possible values: openvino, sim]",
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
            assert_eq!(exit_reason(output), reason, "{output}");
        }
    }
}
