//! Generates the tables of the reference in `docs/reference`: the flags of a program and the metrics of a process.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::{Arg, Command};

const FLAG_HEADER: &str = "| flag | environment | default | |\n|---|---|---|---|\n";

/// The flags of `command` that have an environment variable: a section with a table for each help heading. Flags without
/// a heading are listed under `default_heading`.
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

/// A table of the flags among `arguments`; empty if there is none.
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
        // List only the values that have a help text.
        let Some(meaning) = value.get_help() else { continue };
        let end = if help.ends_with('.') { "" } else { "." };
        let _ = write!(help, "{end} `{}`: {meaning}", value.get_name());
    }
    format!("| `--{name}` | {} | {default} | {help} |\n", environment.unwrap_or_default())
}

/// A table of the metrics in `exposition`, a text in the OpenMetrics format.
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
        // OpenMetrics adds these suffixes to the names of metrics.
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let _ = writeln!(text, "| `{name}{suffix}` | {kind} | {} |", help.trim_end_matches('.'));
    }
    text
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
}
