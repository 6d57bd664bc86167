//! Generates the tables of flags and metrics in `docs/reference`, and updates generated sections of handwritten pages.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::{Arg, Command};

const FLAG_HEADER: &str = "| flag | environment | default | |\n|---|---|---|---|\n";

/// Formats the flags of `command` that have an environment variable, with a section and a table for each help heading.
/// Flags without a heading are listed under `default_heading`.
#[must_use]
pub fn flag_sections(command: &Command, default_heading: &str) -> String {
    let mut sections: Vec<(&str, Vec<&Arg>)> = Vec::new();
    for argument in command.get_arguments().filter(|argument| argument.get_env().is_some()) {
        let heading = argument.get_help_heading().unwrap_or(default_heading);
        match sections.iter_mut().find(|(known, _)| *known == heading) {
            Some((_, arguments)) => arguments.push(argument),
            None => sections.push((heading, vec![argument])),
        }
    }
    let section = |(heading, arguments)| format!("\n## {heading}\n\n{}", flag_table(arguments));
    sections.into_iter().map(section).collect()
}

/// Formats a table of the flags among `arguments`. Returns an empty string if there are none.
#[must_use]
pub fn flag_table<'a>(arguments: impl IntoIterator<Item = &'a Arg>) -> String {
    let rows: String =
        arguments.into_iter().filter_map(|argument| Some(flag(argument, argument.get_long()?))).collect();
    if rows.is_empty() { rows } else { FLAG_HEADER.to_owned() + &rows }
}

fn flag(argument: &Arg, name: &str) -> String {
    let environment = argument.get_env().map(|name| format!("`{}`", name.to_string_lossy()));
    let defaults: Vec<_> =
        argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = if defaults.is_empty() { String::new() } else { format!("`{}`", defaults.join(" ")) };
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut help = help.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    for value in argument.get_possible_values().iter().filter(|_| argument.get_action().takes_values()) {
        let Some(meaning) = value.get_help() else { continue };
        let end = if help.ends_with('.') { "" } else { "." };
        let _ = write!(help, "{end} `{}`: {meaning}", value.get_name());
    }
    format!("| `--{name}` | {} | {default} | {help} |\n", environment.unwrap_or_default())
}

/// Formats a table of the metrics in `exposition`, a text in the OpenMetrics format.
#[must_use]
pub fn metric_table(exposition: &str) -> String {
    let fields = |prefix| {
        move |line: &'_ str| -> Option<(String, String)> {
            let (name, value) = line.strip_prefix(prefix)?.split_once(' ')?;
            Some((name.to_owned(), value.to_owned()))
        }
    };
    let kinds: BTreeMap<_, _> = exposition.lines().filter_map(fields("# TYPE ")).collect();
    let mut text = "| name | type | |\n|---|---|---|\n".to_owned();
    for (name, help) in exposition.lines().filter_map(fields("# HELP ")) {
        let kind = kinds.get(&name).map_or("unknown", String::as_str);
        // In OpenMetrics, the names of samples have these suffixes, but the names after `# HELP` and `# TYPE` do not.
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let _ = writeln!(text, "| `{name}{suffix}` | {kind} | {} |", help.trim_end_matches('.'));
    }
    text
}

/// Replaces the text between the lines `<!-- NAME: begin -->` and `<!-- NAME: end -->` of the page `path` with `text`,
/// which ends with a line break.
///
/// # Errors
/// The page cannot be read or written, or lacks one of the lines.
pub fn update_section(path: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let page = std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))?;
    let page =
        replace_section(&page, name, text).with_context(|| format!("failed to update {}", path.display()))?;
    std::fs::write(path, page).with_context(|| format!("failed to write {}", path.display()))
}

fn replace_section(page: &str, name: &str, text: &str) -> anyhow::Result<String> {
    let begin = format!("<!-- {name}: begin -->\n");
    let end = format!("<!-- {name}: end -->\n");
    let (before, rest) =
        page.split_once(&begin).with_context(|| format!("the page lacks the line {begin:?}"))?;
    let (_, after) = rest.split_once(&end).with_context(|| format!("no line {end:?} follows {begin:?}"))?;
    Ok(format!("{before}{begin}{text}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use clap::builder::PossibleValue;

    use super::*;

    #[test]
    fn flags_have_sections_by_heading() {
        let flag = |name: &'static str| Arg::new(name).long(name);
        let levels = [PossibleValue::new("high").help("More."), PossibleValue::new("low")];
        let command = Command::new("program")
            .arg(flag("port").env("PORT").default_value("80").help("Port to listen on."))
            .arg(flag("mode").env("MODE").help_heading("Modes").help("One | two."))
            .arg(flag("hidden").help_heading("Modes"))
            .arg(flag("level").env("LEVEL").help_heading("Modes").value_parser(levels).help("The level"))
            .arg(flag("version"));
        let expected = format!(
            "\n## Network\n\n{FLAG_HEADER}| `--port` | `PORT` | `80` | Port to listen on. |\n\
             \n## Modes\n\n{FLAG_HEADER}| `--mode` | `MODE` |  | One \\| two. |\n\
             | `--level` | `LEVEL` |  | The level. `high`: More. |\n"
        );
        assert_eq!(flag_sections(&command, "Network"), expected);
    }

    #[test]
    fn metrics_have_the_names_of_their_samples() {
        let exposition =
            "# HELP a Requests.\n# TYPE a counter\na_total 1\n# HELP b Size.\n# TYPE b gauge\nb 1\n";
        let expected =
            "| name | type | |\n|---|---|---|\n| `a_total` | counter | Requests |\n| `b` | gauge | Size |\n";
        assert_eq!(metric_table(exposition), expected);
    }

    #[test]
    fn replaces_only_the_text_of_the_named_section() {
        let page =
            |text: &str| format!("1\n<!-- a: begin -->\n{text}<!-- a: end -->\n<!-- b: begin -->\n2\n");
        assert_eq!(replace_section(&page("old\n"), "a", "new\n").unwrap(), page("new\n"));
        for (name, line) in [("b", "b: end"), ("c", "c: begin")] {
            let error = replace_section(&page(""), name, "").unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }
}
