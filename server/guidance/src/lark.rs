//! A form as a grammar in the Lark dialect that llguidance reads.
//!
//! JSON that is all of a form may be laid out with space, within bounds. JSON within something else is written as most
//! models write it, with at most one space after a comma or a colon: the parts then share one lexer, which looks at
//! all that may come at once. (With space of its own, a part has a lexer of its own, and at a place where two parts
//! may begin only one would be looked at.)

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};

use crate::limits::{
    ELEMENTS_MAX, FORM_BYTES_MAX, FORM_DEPTH_MAX, GRAMMAR_BYTES_MAX, REGEX_BYTES_MAX, REPEAT_MAX,
};
use crate::locate::place;
use crate::schema::{self, Layout};
use crate::{Form, Invalid, Tag, Triggered, Vocabulary, dialect, ebnf};

/// Any text.
const ANY: &str = "/(?s:.*)/";

/// The grammar of `form`.
pub(crate) fn grammar(form: &Form, vocabulary: &Vocabulary) -> Result<TopLevelGrammar, Invalid> {
    match form {
        Form::Json { schema, at } => {
            let schema = schema::prepare(schema, at, Layout::Free)?;
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        Form::Grammar { text, at } => Ok(TopLevelGrammar::from_lark(lark_of(text, at)?)),
        form => {
            let mut writer = Writer::new(vocabulary);
            let start = writer.form(form, 0)?;
            if start.is_empty() {
                return Err(Invalid::new(place(form), "nothing but an empty answer fits the form"));
            }
            writer.rules.push_str(&format!("start: {start}\n"));
            let mut grammar = TopLevelGrammar::from_lark(writer.rules);
            grammar.grammars.extend(writer.grammars);
            Ok(grammar)
        }
    }
}

/// A user's grammar in Lark.
fn lark_of(text: &str, at: &str) -> Result<String, Invalid> {
    if text.len() > GRAMMAR_BYTES_MAX {
        return Err(Invalid::new(at, format!("has more than {GRAMMAR_BYTES_MAX} bytes")));
    }
    if text.trim().is_empty() {
        return Err(Invalid::new(at, "is empty"));
    }
    if ebnf::is_ebnf(text) {
        return ebnf::to_lark(text).map_err(|problem| Invalid::new(at, problem));
    }
    Ok(text.to_owned())
}

/// Writes rules. What it answers is an expression: empty for nothing.
pub(crate) struct Writer<'a> {
    vocabulary: &'a Vocabulary,
    pub(crate) rules: String,
    /// Users' grammars, which the rules refer to by name.
    grammars: Vec<GrammarWithLexer>,
    count: usize,
    bytes: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(vocabulary: &'a Vocabulary) -> Self {
        Self { vocabulary, rules: String::new(), grammars: Vec::new(), count: 0, bytes: 0 }
    }

    /// Adds a rule, and answers its name.
    pub(crate) fn rule(&mut self, body: &str) -> String {
        self.named("r", "", body)
    }

    /// Adds a terminal: what is matched as one.
    pub(crate) fn terminal(&mut self, body: &str) -> String {
        self.named("T", "", body)
    }

    fn named(&mut self, prefix: &str, options: &str, body: &str) -> String {
        let name = self.reserve(prefix);
        self.rules.push_str(&format!("{name}{options}: {body}\n"));
        name
    }

    /// The name of a rule that is yet to be written.
    pub(crate) fn reserve(&mut self, prefix: &str) -> String {
        self.count += 1;
        format!("{prefix}{}", self.count)
    }

    /// Writes the rule of a name.
    pub(crate) fn define(&mut self, name: &str, body: &str) {
        let body = if body.is_empty() { "\"\"" } else { body };
        self.rules.push_str(&format!("{name}: {body}\n"));
    }

    fn form(&mut self, form: &Form, depth: usize) -> Result<String, Invalid> {
        if depth > FORM_DEPTH_MAX {
            return Err(Invalid::new("", format!("the form nests deeper than {FORM_DEPTH_MAX}")));
        }
        match form {
            Form::Text { excludes, chars_max } => self.text(excludes, *chars_max),
            Form::Literal(text) => self.literal(text),
            Form::Token(token) => Ok(format!("<[{token}]>")),
            Form::Json { schema, at } => self.json(schema, at),
            Form::Value { dialect, schema, at } => dialect::value(self, *dialect, schema, at),
            Form::Regex { pattern, at } => self.regex(pattern, at),
            Form::Grammar { text, at } => self.grammar(text, at),
            Form::Until(end) => self.until(end),
            Form::Sequence(parts) => self.sequence(parts, depth),
            Form::Choice(parts) => {
                self.count_elements(parts.len())?;
                let parts = parts.iter().map(|part| self.form(part, depth + 1));
                let parts = parts.collect::<Result<Vec<_>, _>>()?;
                Ok(choice(&parts))
            }
            Form::Repeat { form, min, max } => self.repeat(form, (*min, *max), depth),
            Form::Triggered(triggered) => self.triggered(triggered, depth),
        }
    }

    fn text(&mut self, excludes: &[String], chars_max: Option<u32>) -> Result<String, Invalid> {
        if chars_max == Some(0) {
            return Ok(String::new());
        }
        let pattern = self.text_pattern(excludes, chars_max)?;
        Ok(self.terminal(&pattern))
    }

    fn text_pattern(&mut self, excludes: &[String], chars_max: Option<u32>) -> Result<String, Invalid> {
        self.count_elements(excludes.len())?;
        let text = match chars_max {
            None => ANY.to_owned(),
            Some(most) => format!("/(?s:.{{0,{}}})/", most.min(REPEAT_MAX)),
        };
        let excluded = excludes.iter().filter(|text| !text.is_empty());
        let excluded: Vec<String> = excluded.map(|text| escape_regex(text)).collect();
        self.count_bytes(excluded.iter().map(String::len).sum())?;
        Ok(match excluded.is_empty() {
            true => text,
            false => format!("{text} & ~/(?s:.*({}).*)/", excluded.join("|")),
        })
    }

    /// Text of some kind, and `end`, where it comes first.
    fn text_until(
        &mut self,
        (excludes, chars_max): (&[String], Option<u32>),
        end: &str,
    ) -> Result<String, Invalid> {
        // The end is not in the text in any case.
        let others: Vec<String> = excludes.iter().filter(|text| *text != end).cloned().collect();
        if others.is_empty() && chars_max.is_none() {
            return self.until(end);
        }
        let pattern = self.text_pattern(&others, chars_max)?;
        let text = self.terminal(&pattern);
        let plain = self.leading_plain(end);
        if plain.is_empty() {
            let end = self.literal(end)?;
            return Ok(format!("{text} {end}"));
        }
        let whole = self.terminal(&format!("{text} /{}/", escape_regex(plain)));
        let lazy = self.named("r", "[lazy]", &whole);
        let rest = self.literal(&end[plain.len()..])?;
        Ok(join([lazy, rest]))
    }

    /// A literal text, special tokens of which are tokens.
    pub(crate) fn literal(&mut self, text: &str) -> Result<String, Invalid> {
        self.count_bytes(text.len())?;
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(letter) = rest.chars().next() {
            match self.vocabulary.leading_special(rest) {
                Some((token, end)) => {
                    flush(&mut plain, &mut parts);
                    parts.push(format!("<[{token}]>"));
                    rest = &rest[end..];
                }
                None => {
                    plain.push(letter);
                    rest = &rest[letter.len_utf8()..];
                }
            }
        }
        flush(&mut plain, &mut parts);
        Ok(parts.join(" "))
    }

    /// A JSON value within something else.
    pub(crate) fn json(&mut self, schema: &serde_json::Value, at: &str) -> Result<String, Invalid> {
        let schema = schema::prepare(schema, at, Layout::Tight)?.to_string();
        self.count_bytes(schema.len())?;
        Ok(self.rule(&format!("%json {schema}")))
    }

    fn regex(&mut self, pattern: &str, at: &str) -> Result<String, Invalid> {
        if pattern.len() > REGEX_BYTES_MAX {
            return Err(Invalid::new(at, format!("has more than {REGEX_BYTES_MAX} bytes")));
        }
        self.count_bytes(pattern.len())?;
        let whole = whole_pattern(pattern);
        if whole.is_empty() {
            return Ok(String::new());
        }
        Ok(self.terminal(&format!("/{}/", quote_regex(whole))))
    }

    fn grammar(&mut self, text: &str, at: &str) -> Result<String, Invalid> {
        let lark = lark_of(text, at)?;
        self.count_bytes(lark.len())?;
        let name = self.reserve("grammar");
        let mut grammar = GrammarWithLexer::from_lark(lark);
        grammar.name = Some(name.clone());
        self.grammars.push(grammar);
        Ok(format!("@{name}"))
    }

    /// Any text, and `end`, where it comes first.
    pub(crate) fn until(&mut self, end: &str) -> Result<String, Invalid> {
        if end.is_empty() {
            return Ok(String::new());
        }
        let plain = self.leading_plain(end);
        if plain.is_empty() {
            // No text has the token in it.
            let text = self.terminal(ANY);
            let end = self.literal(end)?;
            return Ok(format!("{text} {end}"));
        }
        self.count_bytes(plain.len())?;
        let pattern = format!("/(?s:.*){}/", escape_regex(plain));
        let text = self.named("r", "[lazy]", &pattern);
        let rest = self.literal(&end[plain.len()..])?;
        Ok(join([text, rest]))
    }

    /// What of `text` comes before its first special token.
    fn leading_plain<'t>(&self, text: &'t str) -> &'t str {
        let special =
            text.char_indices().find(|(at, _)| self.vocabulary.leading_special(&text[*at..]).is_some());
        &text[..special.map_or(text.len(), |(at, _)| at)]
    }

    fn sequence(&mut self, parts: &[Form], depth: usize) -> Result<String, Invalid> {
        self.count_elements(parts.len())?;
        let mut written = Vec::with_capacity(parts.len());
        let mut parts = parts.iter().peekable();
        while let Some(part) = parts.next() {
            match (part, parts.peek()) {
                // The text would take the literal for its own.
                (Form::Text { excludes, chars_max }, Some(Form::Literal(end))) if !end.is_empty() => {
                    written.push(self.text_until((excludes, *chars_max), end)?);
                    parts.next();
                }
                _ => written.push(self.form(part, depth + 1)?),
            }
        }
        Ok(join(written))
    }

    fn repeat(
        &mut self,
        form: &Form,
        (min, max): (u32, Option<u32>),
        depth: usize,
    ) -> Result<String, Invalid> {
        if min > REPEAT_MAX || max.is_some_and(|max| max > REPEAT_MAX || max < min) {
            let problem =
                format!("a repetition is not of at most {REPEAT_MAX} times, or of less than its least");
            return Err(Invalid::new("", problem));
        }
        let body = self.form(form, depth + 1)?;
        if body.is_empty() || max == Some(0) {
            return Ok(String::new());
        }
        Ok(match (min, max) {
            (0, None) => format!("({body})*"),
            (1, None) => format!("({body})+"),
            (min, None) => format!("({body}){{{min},}}"),
            (0, Some(1)) => format!("({body})?"),
            (min, Some(max)) => format!("({body}){{{min},{max}}}"),
        })
    }

    fn triggered(&mut self, triggered: &Triggered, depth: usize) -> Result<String, Invalid> {
        let Triggered { triggers, tags, at_least_one, stop_after_first, excludes, at } = triggered;
        self.count_elements(triggers.len() + tags.len())?;
        if !excludes.is_empty() {
            return Err(Invalid::new(at, "excludes are not supported beside triggers"));
        }
        let by_trigger = by_trigger(triggers, tags, at)?;
        let (mut items, mut firsts) = (Vec::new(), Vec::new());
        for (trigger, tags) in by_trigger {
            let mut tails = Vec::with_capacity(tags.len());
            for tag in tags {
                let begin = self.literal(&tag.begin[trigger.len()..])?;
                tails.push(join([begin, self.form(&tag.rest, depth + 1)?]));
            }
            let tails = choice(&tails);
            let head = self.until(trigger)?;
            items.push(join([head, tails.clone()]));
            firsts.push(join([self.literal(trigger)?, tails]));
        }
        let item = self.rule(&choice(&items));
        let first = self.rule(&choice(&firsts));
        let rest = self.terminal(ANY);
        Ok(match (at_least_one, stop_after_first) {
            (true, true) => first,
            (true, false) => format!("{first} {item}* {rest}"),
            (false, true) => format!("({item} | {rest})"),
            (false, false) => format!("{item}* {rest}"),
        })
    }

    fn count_elements(&mut self, count: usize) -> Result<(), Invalid> {
        if count > ELEMENTS_MAX {
            return Err(Invalid::new("", format!("there are more than {ELEMENTS_MAX} elements")));
        }
        self.count_bytes(count)
    }

    pub(crate) fn count_bytes(&mut self, bytes: usize) -> Result<(), Invalid> {
        self.bytes += bytes;
        if self.bytes + self.rules.len() > FORM_BYTES_MAX {
            return Err(Invalid::new("", format!("the form has more than {FORM_BYTES_MAX} bytes")));
        }
        Ok(())
    }
}

/// The tags of each trigger that has any. Each tag is of the first trigger it begins with.
fn by_trigger<'t>(
    triggers: &'t [String],
    tags: &'t [Tag],
    at: &str,
) -> Result<Vec<(&'t str, Vec<&'t Tag>)>, Invalid> {
    let mut grouped: Vec<(&str, Vec<&Tag>)> =
        triggers.iter().map(|text| (text.as_str(), Vec::new())).collect();
    for (index, tag) in tags.iter().enumerate() {
        let found =
            grouped.iter_mut().find(|(trigger, _)| !trigger.is_empty() && tag.begin.starts_with(trigger));
        match found {
            Some((_, tags)) => tags.push(tag),
            None => {
                let problem = format!("{:?} begins with none of the triggers", tag.begin);
                return Err(Invalid::new(format!("{at}.tags[{index}].begin"), problem));
            }
        }
    }
    grouped.retain(|(_, tags)| !tags.is_empty());
    if grouped.is_empty() {
        return Err(Invalid::new(format!("{at}.tags"), "is empty"));
    }
    Ok(grouped)
}

fn flush(plain: &mut String, parts: &mut Vec<String>) {
    if !plain.is_empty() {
        parts.push(quote(plain));
        plain.clear();
    }
}

/// A text as a literal of the grammar.
pub(crate) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Expressions one after the other.
pub(crate) fn join(parts: impl IntoIterator<Item = String>) -> String {
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

/// One of some expressions.
pub(crate) fn choice(parts: &[String]) -> String {
    let some: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    let optional = if some.len() < parts.len() { "?" } else { "" };
    match some[..] {
        [] => String::new(),
        [one] if optional.is_empty() => format!("({one})"),
        _ => format!("({}){optional}", some.join(" | ")),
    }
}

/// A regular expression without the anchors of its ends, which are implied.
fn whole_pattern(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    match pattern.strip_suffix('$') {
        // The dollar is itself escaped if an odd number of backslashes precedes it.
        Some(inner) if inner.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => inner,
        _ => pattern,
    }
}

/// A user's regular expression as it is written between slashes. `\d` and `\w` are of ASCII, as in JSON Schema.
pub(crate) fn quote_regex(pattern: &str) -> String {
    let pattern = &llguidance::regex_to_lark(pattern, "dw");
    let mut quoted = String::with_capacity(pattern.len());
    let mut letters = pattern.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '/' => quoted.push_str("\\x2f"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\\' => match letters.next() {
                Some('/') => quoted.push_str("\\x2f"),
                Some(next) => quoted.extend(['\\', next]),
                None => quoted.push('\\'),
            },
            letter => quoted.push(letter),
        }
    }
    quoted
}

/// A regular expression that matches `text`, as it is written between slashes.
pub(crate) fn escape_regex(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_ascii_alphanumeric() || letter == ' ' || letter == '_' || !letter.is_ascii() {
            escaped.push(letter);
        } else {
            escaped.push_str(&format!("\\x{:02x}", letter as u32));
        }
    }
    escaped
}
