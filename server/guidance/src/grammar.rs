//! Translates a form to a grammar.

use llguidance::api::TopLevelGrammar;

use crate::lark::{ANY_TEXT, TextLimits, Writer, choice, join, repeat};
use crate::limits::{FORM_DEPTH_MAX, GRAMMAR_BYTES_MAX, REPEAT_MAX};
use crate::locate::path;
use crate::nesting::check_grammar;
use crate::schema::{self, JsonWhitespace};
use crate::{Form, FormError, Tag, TriggeredTags, Vocabulary, dialect, ebnf};

pub(crate) fn grammar(form: &Form, vocabulary: &Vocabulary) -> Result<TopLevelGrammar, FormError> {
    match form {
        Form::Json { schema, at } => {
            let schema = schema::prepare(schema, at, JsonWhitespace::Flexible)?;
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        Form::Grammar { text, at } => Ok(TopLevelGrammar::from_lark(to_lark(text, at)?)),
        form => {
            let mut writer = Writer::new(vocabulary);
            let start = write(&mut writer, form, 0)?;
            if start.is_empty() {
                return Err(FormError::new(path(form), "the form allows only empty output"));
            }
            Ok(writer.finish(&start))
        }
    }
}

/// Converts a user's grammar to Lark, and checks that it is within the limits.
fn to_lark(text: &str, at: &str) -> Result<String, FormError> {
    if text.len() > GRAMMAR_BYTES_MAX {
        return Err(FormError::new(at, format!("has more than {GRAMMAR_BYTES_MAX} bytes")));
    }
    if text.trim().is_empty() {
        return Err(FormError::new(at, "must not be empty"));
    }
    let lark = match ebnf::is_ebnf(text) {
        true => ebnf::to_lark(text).map_err(|problem| FormError::new(at, problem))?,
        false => text.to_owned(),
    };
    check_grammar(&lark, at)?;
    Ok(lark)
}

/// Writes a form as an expression.
fn write(writer: &mut Writer<'_>, form: &Form, depth: usize) -> Result<String, FormError> {
    if depth > FORM_DEPTH_MAX {
        return Err(FormError::new("", format!("the form is nested deeper than {FORM_DEPTH_MAX} levels")));
    }
    match form {
        Form::Text { excludes, chars_max } => writer.text(TextLimits { excludes, chars_max: *chars_max }),
        Form::Literal(text) => writer.literal(text),
        Form::Token(token) => Ok(format!("<[{token}]>")),
        Form::Json { schema, at } => writer.json(schema, at),
        Form::Value { dialect, schema, at } => dialect::arguments(writer, *dialect, schema, at),
        Form::Regex { pattern, at } => writer.regex(pattern, at),
        Form::Grammar { text, at } => writer.grammar(to_lark(text, at)?),
        Form::Until(end) => writer.until(end),
        Form::Sequence(parts) => sequence(writer, parts, depth),
        Form::Choice(parts) => {
            writer.count_elements(parts.len())?;
            let parts = parts.iter().map(|part| write(writer, part, depth + 1));
            let parts = parts.collect::<Result<Vec<_>, _>>()?;
            Ok(choice(&parts))
        }
        Form::Repeat { form, min, max } => {
            if *min > REPEAT_MAX || max.is_some_and(|max| max > REPEAT_MAX || max < *min) {
                let max = max.map_or_else(|| "none".to_owned(), |max| max.to_string());
                let problem = format!(
                    "the bounds of a repetition (min: {min}, max: {max}) must be at most {REPEAT_MAX}, and min must not \
                     exceed max"
                );
                return Err(FormError::new("", problem));
            }
            Ok(repeat(&write(writer, form, depth + 1)?, *min, *max))
        }
        Form::TriggeredTags(tags) => triggered_tags(writer, tags, depth),
    }
}

fn sequence(writer: &mut Writer<'_>, parts: &[Form], depth: usize) -> Result<String, FormError> {
    writer.count_elements(parts.len())?;
    let mut written = Vec::with_capacity(parts.len());
    let mut parts = parts.iter().peekable();
    while let Some(part) = parts.next() {
        match (part, parts.peek()) {
            // End the free text at the first occurrence of the literal. Otherwise, the text could consume the literal.
            (Form::Text { excludes, chars_max }, Some(Form::Literal(end))) if !end.is_empty() => {
                let limits = TextLimits { excludes, chars_max: *chars_max };
                written.push(writer.text_until(limits, end)?);
                parts.next();
            }
            _ => written.push(write(writer, part, depth + 1)?),
        }
    }
    Ok(join(written))
}

fn triggered_tags(writer: &mut Writer<'_>, form: &TriggeredTags, depth: usize) -> Result<String, FormError> {
    let TriggeredTags { triggers, tags, at_least_one, stop_after_first, excludes, at } = form;
    writer.count_elements(triggers.len() + tags.len())?;
    if !excludes.is_empty() {
        return Err(FormError::new(at, "excludes is not supported together with triggers"));
    }
    let (mut items, mut firsts) = (Vec::new(), Vec::new());
    for (trigger, tags) in by_trigger(triggers, tags, at)? {
        let mut tails = Vec::with_capacity(tags.len());
        for tag in tags {
            let begin = writer.literal(&tag.begin[trigger.len()..])?;
            tails.push(join([begin, write(writer, &tag.rest, depth + 1)?]));
        }
        let tails = choice(&tails);
        let head = writer.until(trigger)?;
        items.push(join([head, tails.clone()]));
        firsts.push(join([writer.literal(trigger)?, tails]));
    }
    let item = writer.rule(&choice(&items));
    let first = writer.rule(&choice(&firsts));
    let rest = writer.terminal(ANY_TEXT);
    Ok(match (at_least_one, stop_after_first) {
        (true, true) => first,
        (true, false) => format!("{first} {item}* {rest}"),
        (false, true) => format!("({item} | {rest})"),
        (false, false) => format!("{item}* {rest}"),
    })
}

/// Groups tags by the first trigger that they begin with, and omits triggers without tags.
fn by_trigger<'t>(
    triggers: &'t [String],
    tags: &'t [Tag],
    at: &str,
) -> Result<Vec<(&'t str, Vec<&'t Tag>)>, FormError> {
    let mut grouped: Vec<(&str, Vec<&Tag>)> =
        triggers.iter().map(|text| (text.as_str(), Vec::new())).collect();
    for (index, tag) in tags.iter().enumerate() {
        let group =
            grouped.iter_mut().find(|(trigger, _)| !trigger.is_empty() && tag.begin.starts_with(trigger));
        match group {
            Some((_, tags)) => tags.push(tag),
            None => {
                let problem = format!("{:?} does not begin with any non-empty trigger", tag.begin);
                return Err(FormError::new(format!("{at}.tags[{index}].begin"), problem));
            }
        }
    }
    grouped.retain(|(_, tags)| !tags.is_empty());
    if grouped.is_empty() {
        return Err(FormError::new(format!("{at}.tags"), "must not be empty"));
    }
    Ok(grouped)
}
