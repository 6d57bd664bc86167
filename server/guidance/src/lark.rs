//! Writes rules, terminals and expressions in the Lark dialect that llguidance reads.
//!
//! JSON that is the whole output may be laid out with whitespace, within bounds. JSON within another form is written as
//! most models write it, with at most one space after a comma or a colon. Without rules for other whitespace, all JSON
//! parts share the lexer of the form, which considers everything that may follow. (A part with its own rule for
//! whitespace would have its own lexer, and where two such parts may begin, llguidance would consider only one of
//! them.)

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::Value;

use crate::limits::{ELEMENTS_MAX, FORM_BYTES_MAX, REGEX_BYTES_MAX};
use crate::schema::{self, JsonWhitespace};
use crate::{FormError, Vocabulary};

/// A regular expression that matches any text.
pub(crate) const ANY_TEXT: &str = "/(?s:.*)/";

/// The limits on the content of free text.
#[derive(Clone, Copy)]
pub(crate) struct TextLimits<'a> {
    /// The texts that the free text must not contain.
    pub(crate) excludes: &'a [String],
    pub(crate) chars_max: Option<u32>,
}

/// Collects the rules of a grammar. Its methods return expressions; an expression that matches only the empty text is
/// an empty string.
pub(crate) struct Writer<'a> {
    vocabulary: &'a Vocabulary,
    rules: String,
    /// The grammars of users, which the rules refer to by name.
    grammars: Vec<GrammarWithLexer>,
    count: usize,
    bytes: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(vocabulary: &'a Vocabulary) -> Self {
        Self { vocabulary, rules: String::new(), grammars: Vec::new(), count: 0, bytes: 0 }
    }

    /// Finishes the grammar, which begins with the expression `start`.
    pub(crate) fn finish(mut self, start: &str) -> TopLevelGrammar {
        self.define("start", start);
        let mut grammar = TopLevelGrammar::from_lark(self.rules);
        grammar.grammars.extend(self.grammars);
        grammar
    }

    /// Adds a rule and returns its name.
    pub(crate) fn rule(&mut self, body: &str) -> String {
        self.named("r", "", body)
    }

    /// Adds a terminal, which is matched as a whole, and returns its name.
    pub(crate) fn terminal(&mut self, body: &str) -> String {
        self.named("T", "", body)
    }

    fn named(&mut self, prefix: &str, options: &str, body: &str) -> String {
        let name = self.reserve(prefix);
        self.rules.push_str(&format!("{name}{options}: {body}\n"));
        name
    }

    /// Returns a new name for a rule that is defined later.
    pub(crate) fn reserve(&mut self, prefix: &str) -> String {
        self.count += 1;
        format!("{prefix}{}", self.count)
    }

    /// Defines the rule with this name.
    pub(crate) fn define(&mut self, name: &str, body: &str) {
        let body = if body.is_empty() { "\"\"" } else { body };
        self.rules.push_str(&format!("{name}: {body}\n"));
    }

    /// Returns an expression for a text within `limits`.
    pub(crate) fn text(&mut self, limits: TextLimits<'_>) -> Result<String, FormError> {
        if limits.chars_max == Some(0) {
            return Ok(String::new());
        }
        let pattern = self.text_pattern(limits)?;
        Ok(self.terminal(&pattern))
    }

    fn text_pattern(&mut self, limits: TextLimits<'_>) -> Result<String, FormError> {
        self.count_elements(limits.excludes.len())?;
        let text = match limits.chars_max {
            None => ANY_TEXT.to_owned(),
            Some(chars_max) => format!("/(?s:.{{0,{chars_max}}})/"),
        };
        let excluded = limits.excludes.iter().filter(|text| !text.is_empty());
        let excluded: Vec<String> = excluded.map(|text| escape_regex(text)).collect();
        self.count_bytes(excluded.iter().map(String::len).sum())?;
        Ok(match excluded.is_empty() {
            true => text,
            false => format!("{text} & ~/(?s:.*({}).*)/", excluded.join("|")),
        })
    }

    /// Returns an expression for a text within `limits`, up to and including the first occurrence of `end`.
    pub(crate) fn text_until(&mut self, limits: TextLimits<'_>, end: &str) -> Result<String, FormError> {
        // The text never contains `end`, so `end` does not need to be excluded.
        let excludes: Vec<String> = limits.excludes.iter().filter(|text| *text != end).cloned().collect();
        if excludes.is_empty() && limits.chars_max.is_none() {
            return self.until(end);
        }
        let pattern = self.text_pattern(TextLimits { excludes: &excludes, ..limits })?;
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

    /// Returns an expression for exactly `text`, in which parts that spell special tokens become those tokens.
    pub(crate) fn literal(&mut self, text: &str) -> Result<String, FormError> {
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

    /// Returns an expression for a JSON value that is part of a larger text.
    pub(crate) fn json(&mut self, schema: &Value, at: &str) -> Result<String, FormError> {
        let schema = schema::prepare(schema, at, JsonWhitespace::Compact)?.to_string();
        self.count_bytes(schema.len())?;
        Ok(self.rule(&format!("%json {schema}")))
    }

    /// Returns an expression for a text that matches `pattern` as a whole.
    pub(crate) fn regex(&mut self, pattern: &str, at: &str) -> Result<String, FormError> {
        if pattern.len() > REGEX_BYTES_MAX {
            return Err(FormError::new(at, format!("has more than {REGEX_BYTES_MAX} bytes")));
        }
        self.count_bytes(pattern.len())?;
        let whole = whole_pattern(pattern);
        if whole.is_empty() {
            return Ok(String::new());
        }
        Ok(self.terminal(&format!("/{}/", quote_regex(whole))))
    }

    /// Adds a grammar in Lark and returns a reference to it.
    pub(crate) fn grammar(&mut self, lark: String) -> Result<String, FormError> {
        self.count_bytes(lark.len())?;
        let name = self.reserve("grammar");
        let mut grammar = GrammarWithLexer::from_lark(lark);
        grammar.name = Some(name.clone());
        self.grammars.push(grammar);
        Ok(format!("@{name}"))
    }

    /// Returns an expression for any text up to and including the first occurrence of `end`.
    pub(crate) fn until(&mut self, end: &str) -> Result<String, FormError> {
        if end.is_empty() {
            return Ok(String::new());
        }
        let plain = self.leading_plain(end);
        if plain.is_empty() {
            // `end` begins with a special token, which no text contains.
            let text = self.terminal(ANY_TEXT);
            let end = self.literal(end)?;
            return Ok(format!("{text} {end}"));
        }
        self.count_bytes(plain.len())?;
        let pattern = format!("/(?s:.*){}/", escape_regex(plain));
        let text = self.named("r", "[lazy]", &pattern);
        let rest = self.literal(&end[plain.len()..])?;
        Ok(join([text, rest]))
    }

    /// The part of `text` before its first special token.
    fn leading_plain<'t>(&self, text: &'t str) -> &'t str {
        let special =
            text.char_indices().find(|(at, _)| self.vocabulary.leading_special(&text[*at..]).is_some());
        &text[..special.map_or(text.len(), |(at, _)| at)]
    }

    /// Rejects a part of a form with more than [`ELEMENTS_MAX`] elements.
    pub(crate) fn count_elements(&mut self, count: usize) -> Result<(), FormError> {
        if count > ELEMENTS_MAX {
            return Err(FormError::new(
                "",
                format!("a part of the form has more than {ELEMENTS_MAX} elements"),
            ));
        }
        self.count_bytes(count)
    }

    fn count_bytes(&mut self, bytes: usize) -> Result<(), FormError> {
        self.bytes += bytes;
        if self.bytes + self.rules.len() > FORM_BYTES_MAX {
            let problem = format!(
                "the form and the grammar generated from it have more than {FORM_BYTES_MAX} bytes in total"
            );
            return Err(FormError::new("", problem));
        }
        Ok(())
    }
}

fn flush(plain: &mut String, parts: &mut Vec<String>) {
    if !plain.is_empty() {
        parts.push(quote(plain));
        plain.clear();
    }
}

/// Quotes a text as a literal of the grammar.
pub(crate) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Joins expressions into a sequence.
pub(crate) fn join(parts: impl IntoIterator<Item = String>) -> String {
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

/// Joins expressions into a choice.
pub(crate) fn choice(parts: &[String]) -> String {
    let some: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    let optional = if some.len() < parts.len() { "?" } else { "" };
    match some[..] {
        [] => String::new(),
        [one] if optional.is_empty() => format!("({one})"),
        _ => format!("({}){optional}", some.join(" | ")),
    }
}

/// Repeats an expression.
pub(crate) fn repeat(part: &str, min: u32, max: Option<u32>) -> String {
    match (min, max) {
        _ if part.is_empty() => String::new(),
        (_, Some(0)) => String::new(),
        (0, None) => format!("({part})*"),
        (1, None) => format!("({part})+"),
        (min, None) => format!("({part}){{{min},}}"),
        (0, Some(1)) => format!("({part})?"),
        (min, Some(max)) => format!("({part}){{{min},{max}}}"),
    }
}

/// A regular expression without the anchors at its ends, which are implied.
fn whole_pattern(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    match pattern.strip_suffix('$') {
        // An odd number of backslashes before the dollar escapes it.
        Some(inner) if inner.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 0 => inner,
        _ => pattern,
    }
}

/// Quotes a regular expression for use between slashes. `\d` and `\w` match ASCII only, as in JSON Schema.
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

/// A regular expression that matches exactly `text`, for use between slashes.
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
