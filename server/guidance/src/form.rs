//! The forms that the output of a model can be constrained to.

use serde_json::Value;

/// A constraint on the output of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Any text without special tokens.
    Text {
        /// The texts that this text must not contain.
        excludes: Vec<String>,
        /// The largest number of characters.
        chars_max: Option<u32>,
    },
    /// Exactly this text. Parts that spell a special token of the vocabulary become that token.
    Literal(String),
    /// Exactly the token with this ID.
    Token(u32),
    /// A JSON value that is valid under a schema.
    Json {
        /// The schema of the value.
        schema: Value,
        /// The path of the schema in the request.
        at: String,
    },
    /// A value in a notation other than JSON.
    Value {
        /// The notation of the value.
        dialect: Dialect,
        /// The JSON schema of the value.
        schema: Value,
        /// The path of the schema in the request.
        at: String,
    },
    /// A text that matches a regular expression as a whole.
    Regex {
        /// The source of the regular expression.
        pattern: String,
        /// The path of the regular expression in the request.
        at: String,
    },
    /// A text that matches a grammar in Lark or EBNF (with `::=`).
    Grammar {
        /// The text of the grammar.
        text: String,
        /// The path of the grammar in the request.
        at: String,
    },
    /// Any text up to and including the first occurrence of this string.
    Until(String),
    /// All of these forms, one after the other.
    Sequence(Vec<Form>),
    /// Any one of these forms.
    Choice(Vec<Form>),
    /// A form that is repeated.
    Repeat {
        /// The form to repeat.
        form: Box<Form>,
        /// The smallest number of repetitions.
        min: u32,
        /// The largest number of repetitions; `None` means unlimited.
        max: Option<u32>,
    },
    /// Text in which triggers begin tags.
    TriggeredTags(TriggeredTags),
}

/// The notation of the arguments of a tool call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Python keyword arguments, between the parentheses of a call: `a="x", b=1`.
    Python,
    /// The notation of Gemma, between braces: `a:<|"|>x<|"|>,b:1`.
    Gemma,
    /// The tags of Qwen, one for each argument: `<parameter=a>\nx\n</parameter>\n`.
    Qwen,
    /// The tags of MiniCPM, one for each argument: `<param name="a">x</param>`.
    MiniCpm,
}

/// Free text in which certain texts, the triggers, begin tags.
#[derive(Clone, Debug, PartialEq)]
pub struct TriggeredTags {
    /// The texts that begin a tag.
    pub triggers: Vec<String>,
    /// The tags; each begins with one of the triggers.
    pub tags: Vec<Tag>,
    /// Whether the text must begin with a tag. More text and tags may follow it unless `stop_after_first` is set.
    pub at_least_one: bool,
    /// Whether the text must end after the first tag.
    pub stop_after_first: bool,
    /// The texts that must not occur between tags. Compilation fails unless the list is empty.
    pub excludes: Vec<String>,
    /// The path of this form in the request.
    pub at: String,
}

/// A form that begins with a fixed text.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// The text that the tag begins with.
    pub begin: String,
    /// The form of the text after `begin`.
    pub rest: Form,
}

impl Tag {
    /// Creates a tag from a form between `begin` and one of `ends`. An empty list of `ends` is the same as a
    /// single empty end.
    pub fn new(begin: impl Into<String>, content: Form, ends: &[String]) -> Self {
        Self { begin: begin.into(), rest: content.ended_by(ends) }
    }
}

impl Form {
    /// Creates a form that matches any text without special tokens.
    pub fn text() -> Self {
        Self::Text { excludes: Vec::new(), chars_max: None }
    }

    /// Creates a form that matches exactly `text`.
    pub fn literal(text: impl Into<String>) -> Self {
        Self::Literal(text.into())
    }

    /// Returns this form, followed by one of `ends`.
    #[must_use]
    pub fn ended_by(self, ends: &[String]) -> Self {
        let ended = |end: &String| Self::Sequence(vec![self.clone(), Self::Literal(end.clone())]);
        match ends {
            [] => self,
            [end] => ended(end),
            ends => Self::Choice(ends.iter().map(ended).collect()),
        }
    }

    /// Returns a form that matches this form or the empty text.
    #[must_use]
    pub fn optional(self) -> Self {
        Self::Repeat { form: Box::new(self), min: 0, max: Some(1) }
    }

    /// Returns this form, repeated at least `min` times.
    #[must_use]
    pub fn repeated(self, min: u32) -> Self {
        Self::Repeat { form: Box::new(self), min, max: None }
    }

    /// Creates a form that matches an arbitrary JSON object.
    pub fn json_object(at: impl Into<String>) -> Self {
        Self::Json { schema: serde_json::json!({"type": "object"}), at: at.into() }
    }
}
