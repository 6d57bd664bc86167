//! Generates the reference of limits from the code. A limit is a constant or a flag whose documentation states the
//! status code or another effect after `If exceeded:`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::tidy::Tree;

/// The text before the effect of exceeding a limit.
const MARK: &str = "If exceeded: ";

/// The sections of the page, with prefixes of the paths of the sources whose limits they list. The longest matching
/// prefix determines the section.
const SECTIONS: &[(&str, &[&str])] = &[
    ("Flags of the server", &["server/src/args"]),
    ("Requests to the server", &["server/src/", "server/parsers/"]),
    (
        "Stored responses and conversations",
        &[
            "server/src/prepare/responses",
            "server/src/responses/",
            "server/src/routes/conversations",
            "server/src/routes/responses/",
            "server/src/store",
        ],
    ),
    ("Structured outputs", &["server/guidance/", "server/engine/src/guides"]),
    ("Tokenizers and chat templates", &["server/text/"]),
    ("Images", &["server/images/", "server/openvino/src/vision"]),
    ("Model files and adapters", &["server/gguf/", "server/openvino/", "server/engine/src/runner.rs"]),
    ("Engine and caches", &["server/engine/", "server/scheduler/", "server/openvino/src/model_cache/"]),
    ("Fetching, draining and shutdown", &["server/src/fetch", "server/src/drain.rs", "server/src/run.rs"]),
    ("Flags of the router", &["router/src/args"]),
    ("Other limits of the router", &["router/"]),
    ("Replica tokens", &["proto/src/replica_token"]),
    ("Operator", &["operator/"]),
];

/// A limit with its documentation.
#[derive(Debug, PartialEq, Eq)]
pub struct Limit {
    /// The heading of the section that lists the limit.
    pub section: &'static str,
    /// The limited quantity, as the first sentence of the documentation describes it.
    pub what: String,
    /// The flag that sets the limit, with its dashes.
    pub flag: Option<String>,
    /// The value of the constant, or the default of the flag.
    pub default: String,
    /// The effect of exceeding the limit.
    pub beyond: String,
}

/// Collects the limits in the sources that belong to a section of the page, in the order of files and lines.
#[must_use]
pub fn limits(tree: &Tree) -> Vec<Limit> {
    let sources = tree.files.iter().filter(|file| file.path.ends_with(".rs") && file.path.contains("/src/"));
    sources
        .filter_map(|file| section(&file.path).map(|section| in_file(section, &file.text)))
        .flatten()
        .collect()
}

/// Returns the section that lists the limits of a source file.
fn section(path: &str) -> Option<&'static str> {
    let matching = SECTIONS.iter().filter_map(|(section, prefixes)| {
        let longest =
            prefixes.iter().filter(|prefix| path.starts_with(**prefix)).map(|prefix| prefix.len()).max()?;
        Some((longest, *section))
    });
    matching.max_by_key(|(length, _)| *length).map(|(_, section)| section)
}

fn in_file(section: &'static str, text: &str) -> Vec<Limit> {
    let constants = constants(text);
    let mut found = Vec::new();
    let mut documentation = String::new();
    let mut code = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix("///") {
            if !code.is_empty() {
                (documentation, code) = (String::new(), String::new());
            }
            documentation.push_str(words.trim());
            documentation.push('\n');
        } else if !documentation.is_empty() {
            code.push_str(line);
            code.push(' ');
            // The lines of an attribute do not complete the code: its item follows the closing bracket.
            let is_whole = line.ends_with(';') || line.ends_with(',') && !code.trim_end().ends_with("(,");
            let is_attribute = code.matches('[').count() > code.matches(']').count();
            if is_whole && !is_attribute && !code.trim_end().ends_with(")]") {
                found.extend(limit(section, &documentation, &code, &constants));
                (documentation, code) = (String::new(), String::new());
            } else if line.is_empty() || line == "}" {
                (documentation, code) = (String::new(), String::new());
            }
        }
    }
    found
}

/// The expression of each constant in a file, by the name of the constant.
type Constants<'a> = BTreeMap<&'a str, &'a str>;

fn constants(text: &str) -> Constants<'_> {
    let constant = |line| {
        let (head, value) = str::split_once(line, " = ")?;
        let name = head.split_once("const ")?.1.split(':').next()?;
        Some((name, value.strip_suffix(';')?))
    };
    text.lines().filter_map(constant).collect()
}

fn limit(section: &'static str, documentation: &str, code: &str, constants: &Constants<'_>) -> Option<Limit> {
    let (before, beyond) = documentation.split_once(MARK)?;
    let before = before.split_whitespace().collect::<Vec<_>>().join(" ");
    let beyond = beyond.split("\n\n").next().unwrap_or_default();
    let beyond = beyond.split_whitespace().collect::<Vec<_>>().join(" ");
    let (flag, default) = if code.contains("#[arg(") {
        flag(code, &before, constants)?
    } else {
        (None, constant(code, constants)?)
    };
    Some(Limit {
        section,
        what: first_sentence(&before).to_owned(),
        flag,
        default,
        beyond: beyond.trim_end_matches('.').to_owned(),
    })
}

/// The first sentence of `text`, without its full stop.
fn first_sentence(text: &str) -> &str {
    text.split(". ").next().unwrap_or_default().trim_end_matches('.')
}

/// The flag that a field of the arguments defines, and the flag's default, from the attribute or else from the
/// documentation.
fn flag(code: &str, documentation: &str, constants: &Constants<'_>) -> Option<(Option<String>, String)> {
    let (attribute, field) = code.rsplit_once(")]")?;
    let name = match attribute.split_once("long = \"") {
        Some((_, rest)) => rest.split('"').next()?.to_owned(),
        None => field.trim().trim_start_matches("pub ").split(':').next()?.trim().replace('_', "-"),
    };
    let default = match attribute.split_once("default_value") {
        Some((_, rest)) => {
            let value = rest.split_once('=')?.1.trim();
            match value.strip_prefix('"') {
                Some(quoted) => spaced(quoted.split('"').next().unwrap_or_default()),
                None => {
                    let value = value.split([',', ')']).next().unwrap_or_default().trim();
                    evaluate(value, constants)
                        .map_or_else(|| format!("`{value}`"), |number| number.to_string())
                }
            }
        }
        None => match documentation.split_once("Default: ") {
            Some((_, rest)) => first_sentence(rest).to_owned(),
            None => "none".to_owned(),
        },
    };
    Some((Some(format!("--{name}")), default))
}

/// Formats `8MiB` as `8 MiB` and `10m` as `10 min`; `1024` is unchanged.
fn spaced(value: &str) -> String {
    let end = value.find(|letter: char| !letter.is_ascii_digit() && letter != '_' && letter != '.');
    let (number, unit) = value.split_at(end.unwrap_or(value.len()));
    match (number, unit) {
        ("", _) | (_, "") => value.replace('_', ""),
        (number, "m") => format!("{number} min"),
        (number, unit) => format!("{number} {unit}"),
    }
}

/// The value of a constant, with its unit.
fn constant(code: &str, constants: &Constants<'_>) -> Option<String> {
    let (head, value) = code.split_once('=')?;
    let name = head.split("const ").nth(1)?.split(':').next()?.trim();
    let value = value.trim().trim_end_matches(';').trim();
    if let Some(number) = value.strip_prefix("Duration::from_millis(") {
        return Some(format!("{} ms", number.trim_end_matches(')')));
    }
    if let Some(number) = value.strip_prefix("Duration::from_secs(") {
        return evaluate(number.strip_suffix(')')?, constants).map(seconds);
    }
    if let Some(number) =
        value.strip_suffix(".0").filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    {
        return Some(number.to_owned());
    }
    let Some(number) = evaluate(value, constants) else { return Some(format!("`{value}`")) };
    Some(if name.contains("BYTES") { bytes(number) } else { grouped(number) })
}

/// Evaluates a number, a constant, a product, a shift or a difference.
fn evaluate(text: &str, constants: &Constants<'_>) -> Option<u64> {
    let text = text.trim();
    if let Some(value) = constants.get(text) {
        return evaluate(value, constants);
    }
    if let Some((left, right)) = text.rsplit_once(" - ") {
        return evaluate(left, constants)?.checked_sub(evaluate(right, constants)?);
    }
    let text = text.trim_start_matches('(').trim_end_matches(')');
    if let Some((left, right)) = text.split_once("<<") {
        return evaluate(left, constants)?.checked_shl(u32::try_from(evaluate(right, constants)?).ok()?);
    }
    if let Some((left, right)) = text.split_once('*') {
        return evaluate(left, constants)?.checked_mul(evaluate(right, constants)?);
    }
    text.replace('_', "").parse().ok()
}

/// Formats `16777216` as `16,777,216`; `1024` is unchanged.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    if number < 10_000 {
        return digits;
    }
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}

fn seconds(number: u64) -> String {
    const DAY: u64 = 24 * 3600;
    if number > 0 && number.is_multiple_of(DAY) {
        return format!("{} days", number / DAY);
    }
    format!("{number} s")
}

fn bytes(number: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = units.iter().find(|(shift, _)| number >= 1 << shift && number.is_multiple_of(1 << shift));
    fits.map_or_else(|| format!("{number} bytes"), |(shift, unit)| format!("{} {unit}", number >> shift))
}

/// The beginning of the page.
const INTRODUCTION: &str = "\
# Limits

For operators of a fleet and developers of clients: this page lists the limits of ovfleet, their values or defaults, and
the effect of exceeding them.

A number such as 429 is the HTTP status of the response, and the name after it is the `code` of the error object in its
body. [api.md](api.md) lists the ranges of request parameters; [flags-server.md](flags-server.md),
[flags-router.md](flags-router.md) and [flags-operator.md](flags-operator.md) list the flags. A *form* is the constraint
on a [structured output](structured-output.md), such as a JSON schema, a grammar or a choice.

The tables list the defaults of the programs. An LLMDeployment has the same defaults, except for `drain.timeout`, which
is 2 minutes.

This page is generated from the code: `UPDATE_EXPECT=1 cargo test -p tests --test limits`.
";

/// Renders the page of the reference that lists `limits`.
#[must_use]
pub fn reference(limits: &[Limit]) -> String {
    let mut text = INTRODUCTION.to_owned();
    for (section, _) in SECTIONS {
        let rows: Vec<_> = limits.iter().filter(|limit| limit.section == *section).collect();
        if rows.is_empty() {
            continue;
        }
        let has_flags = rows.iter().any(|limit| limit.flag.is_some());
        let header = if has_flags {
            "| limit | flag | default | if exceeded |\n|---|---|---|---|"
        } else {
            "| limit | value | if exceeded |\n|---|---|---|"
        };
        let _ = write!(text, "\n## {section}\n\n{header}\n");
        for Limit { what, flag, default, beyond, .. } in rows {
            let (what, beyond) = (what.replace('|', "\\|"), beyond.replace('|', "\\|"));
            let flag = flag.as_ref().map(|flag| format!("`{flag}`")).unwrap_or_default();
            let flag = if has_flags { format!(" {flag} |") } else { String::new() };
            let _ = writeln!(text, "| {what} |{flag} {default} | {beyond} |");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn found(text: &str) -> Vec<Limit> {
        limits(&Tree { files: vec![File::new("server/src/x.rs", text)] })
    }

    fn limit(what: &str, flag: Option<&str>, default: &str, beyond: &str) -> Limit {
        Limit {
            section: "Requests to the server",
            what: what.to_owned(),
            flag: flag.map(str::to_owned),
            default: default.to_owned(),
            beyond: beyond.to_owned(),
        }
    }

    #[test]
    fn reads_constants_with_their_units() {
        let text = "/// Bytes of a body. It is read whole.\n///\n/// If exceeded: 413.\npub const BODY_BYTES_MAX: usize = 8 << 20;\n\
                    /// Most tools\n/// of a request. If exceeded: 400.\nconst TOOLS_MAX: usize = 512;\n\
                    /// Time to write. If exceeded: the rest is lost.\nconst FLUSH_MAX: Duration = Duration::from_secs(5);\n\
                    /// No limit.\nconst OTHER: u32 = 1;\n";
        assert_eq!(
            found(text),
            [
                limit("Bytes of a body", None, "8 MiB", "413"),
                limit("Most tools of a request", None, "512", "400"),
                limit("Time to write", None, "5 s", "the rest is lost"),
            ]
        );
    }

    #[test]
    fn reads_flags_with_their_defaults() {
        let text = "    /// Requests in flight.\n    ///\n    /// If exceeded: 429 with `Retry-After`.\n    \
                    #[arg(long, env = \"X\", default_value_t = 1024, help_heading = \"Limits\")]\n    \
                    pub max_concurrent_requests: usize,\n\n    /// Bytes of a body. If exceeded: 413.\n    #[arg(\n        \
                    long = \"max-body-bytes\",\n        default_value = \"8MiB\"\n    )]\n    pub body: ByteSize,\n";
        assert_eq!(
            found(text),
            [
                limit(
                    "Requests in flight",
                    Some("--max-concurrent-requests"),
                    "1024",
                    "429 with `Retry-After`"
                ),
                limit("Bytes of a body", Some("--max-body-bytes"), "8 MiB", "413"),
            ]
        );
    }

    #[test]
    fn evaluates_named_constants_products_shifts_and_differences() {
        let text = "/// Most elements.\npub const ELEMENTS_MAX: usize = 8192;\n\
                    /// Items. If exceeded: 400.\npub const ITEMS_MAX: usize = 4 * ELEMENTS_MAX;\n\
                    /// Tokens. If exceeded: 500.\nconst TOKENS_MAX: usize = (1 << 22) - 1;\n\
                    /// Greatest penalty. If exceeded: 400.\nconst PENALTY_MAX: f64 = 1000.0;\n\
                    /// Length of a period. If exceeded: 400.\nconst LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);\n\
                    /// Elements. If exceeded: 400.\n#[arg(long, default_value_t = ELEMENTS_MAX)]\npub elements: usize,\n";
        assert_eq!(
            found(text),
            [
                limit("Items", None, "32,768", "400"),
                limit("Tokens", None, "4,194,303", "500"),
                limit("Greatest penalty", None, "1000", "400"),
                limit("Length of a period", None, "365 days", "400"),
                limit("Elements", Some("--elements"), "8192", "400"),
            ]
        );
    }

    #[test]
    fn a_default_that_is_not_constant_is_read_from_the_documentation() {
        let text = "    /// Tokens of a sequence. Default: the model's\n    /// context length.\n    ///\n    \
                    /// If exceeded: 400.\n    #[arg(long)]\n    pub max_model_len: Option<u32>,\n\n    \
                    /// Time to wait. If exceeded: 429.\n    #[arg(long, default_value = \"10m\")]\n    pub wait: Duration,\n";
        assert_eq!(
            found(text),
            [
                limit("Tokens of a sequence", Some("--max-model-len"), "the model's context length", "400"),
                limit("Time to wait", Some("--wait"), "10 min", "429"),
            ]
        );
    }

    #[test]
    fn the_most_specific_section_lists_a_limit() {
        assert_eq!(section("server/src/args/limits.rs"), Some("Flags of the server"));
        assert_eq!(section("server/src/limits.rs"), Some("Requests to the server"));
        assert_eq!(section("server/openvino/src/model_cache/directory.rs"), Some("Engine and caches"));
        assert_eq!(section("tests/src/limits.rs"), None);
    }
}
