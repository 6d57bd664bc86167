//! What an answer can be held to.

use serde_json::Value;

use crate::Dialect;

/// Where something is: a path from the request's root.
pub type Place = String;

/// What an answer has to look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Any text without special tokens.
    Text {
        /// Texts that are not in it.
        excludes: Vec<String>,
        /// Its characters at most.
        chars_max: Option<u32>,
    },
    /// This text. What spells a special token of the vocabulary is that token.
    Literal(String),
    /// This token.
    Token(u32),
    /// A JSON value.
    Json {
        /// The schema that it is valid by.
        schema: Value,
        /// Where the schema is.
        at: Place,
    },
    /// A value written in another way than JSON.
    Value {
        /// How.
        dialect: Dialect,
        /// The JSON schema of what is meant.
        schema: Value,
        /// Where the schema is.
        at: Place,
    },
    /// The whole of it matches a regular expression.
    Regex {
        /// The expression.
        pattern: String,
        /// Where it is.
        at: Place,
    },
    /// What a grammar in Lark or EBNF (with `::=`) describes.
    Grammar {
        /// The grammar.
        text: String,
        /// Where it is.
        at: Place,
    },
    /// Any text, and this, where it comes first.
    Until(String),
    /// One after the other.
    Sequence(Vec<Form>),
    /// One of them.
    Choice(Vec<Form>),
    /// The same several times.
    Repeat {
        /// What.
        form: Box<Form>,
        /// How often at least.
        min: u32,
        /// How often at most.
        max: Option<u32>,
    },
    /// Text in which certain words begin something of a form.
    Triggered(Triggered),
}

/// Text in which certain words begin something of a form.
#[derive(Clone, Debug, PartialEq)]
pub struct Triggered {
    /// The words.
    pub triggers: Vec<String>,
    /// What they begin; each begins with one of the triggers.
    pub tags: Vec<Tag>,
    /// Whether a tag comes at once. More text may come after it.
    pub at_least_one: bool,
    /// Whether nothing comes after the first tag.
    pub stop_after_first: bool,
    /// Texts that are not in the text between.
    pub excludes: Vec<String>,
    /// Where this is.
    pub at: Place,
}

/// A form that begins with a certain text.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// The text.
    pub begin: String,
    /// What comes after it.
    pub rest: Form,
}

impl Tag {
    /// A form between two texts, of which the second is one of `ends`. None is the same as one without text.
    pub fn new(begin: impl Into<String>, content: Form, ends: &[String]) -> Self {
        Self { begin: begin.into(), rest: content.ended_by(ends) }
    }
}

impl Form {
    /// Any text.
    pub fn text() -> Self {
        Self::Text { excludes: Vec::new(), chars_max: None }
    }

    /// This text.
    pub fn literal(text: impl Into<String>) -> Self {
        Self::Literal(text.into())
    }

    /// It, and then one of some texts.
    #[must_use]
    pub fn ended_by(self, ends: &[String]) -> Self {
        let ended = |end: &String| Self::Sequence(vec![self.clone(), Self::Literal(end.clone())]);
        match ends {
            [] => self,
            [end] => ended(end),
            ends => Self::Choice(ends.iter().map(ended).collect()),
        }
    }

    /// It, or nothing.
    #[must_use]
    pub fn optional(self) -> Self {
        Self::Repeat { form: Box::new(self), min: 0, max: Some(1) }
    }

    /// The same any number of times, but at least so often.
    #[must_use]
    pub fn repeated(self, min: u32) -> Self {
        Self::Repeat { form: Box::new(self), min, max: None }
    }

    /// Any JSON object.
    pub fn json_object(at: impl Into<Place>) -> Self {
        Self::Json { schema: serde_json::json!({"type": "object"}), at: at.into() }
    }
}
