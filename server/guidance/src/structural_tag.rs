//! Structural tags in the format of XGrammar: a tree of formats.
//!
//! Formats that count tokens or exclude tokens by ID are not supported and are rejected.

use serde_json::{Map, Value};

use crate::limits::{ELEMENTS_MAX, FORM_DEPTH_MAX, REPEAT_MAX};
use crate::{Dialect, Form, FormError, Tag, TriggeredTags};

/// The types of formats, and of a structural tag itself.
const TYPES: [&str; 20] = [
    "structural_tag",
    "const_string",
    "json_schema",
    "regex",
    "grammar",
    "any_text",
    "sequence",
    "or",
    "optional",
    "plus",
    "star",
    "repeat",
    "tag",
    "triggered_tags",
    "tags_with_separator",
    "dispatch",
    "token",
    "token_triggered_tags",
    "qwen_xml_parameter",
    "token_dispatch",
];

/// Whether `name` is the type of a format, or of a structural tag itself.
pub fn is_structural_tag_type(name: &str) -> bool {
    TYPES.contains(&name)
}

/// Converts a structural tag, or one of its formats, to a form.
///
/// # Errors
/// The tag is invalid or its type is not supported; the error contains the path of the invalid part.
pub fn structural_tag(tag: &Map<String, Value>, at: &str) -> Result<Form, FormError> {
    if tag.get("type").and_then(Value::as_str) != Some("structural_tag") {
        return format(tag, at, 0);
    }
    if let Some(structures) = tag.get("structures") {
        return structures_of(tag, structures, at);
    }
    let inner = Part { map: tag, at };
    let (inner, at) = inner.object("format")?;
    format(inner, &at, 0)
}

/// Converts the older kind of structural tag, which consists of schemas and the triggers of their tags.
fn structures_of(tag: &Map<String, Value>, structures: &Value, at: &str) -> Result<Form, FormError> {
    let part = Part { map: tag, at };
    let triggers = part.texts("triggers")?;
    let mut tags = Vec::new();
    for (index, structure) in list(structures, &part.path("structures"))?.iter().enumerate() {
        let at = format!("{at}.structures[{index}]");
        let map = structure.as_object().ok_or_else(|| FormError::new(&at, "must be an object"))?;
        let part = Part { map, at: &at };
        let schema = map.get("schema").cloned().unwrap_or(Value::Bool(true));
        let content = Form::Json { schema, at: part.path("schema") };
        tags.push(Tag::new(part.text("begin")?, content, &[part.text("end")?.to_owned()]));
    }
    Ok(Form::TriggeredTags(TriggeredTags {
        triggers,
        tags,
        at_least_one: false,
        stop_after_first: false,
        excludes: Vec::new(),
        at: at.to_owned(),
    }))
}

fn format(map: &Map<String, Value>, at: &str, depth: usize) -> Result<Form, FormError> {
    if depth > FORM_DEPTH_MAX {
        return Err(FormError::new(at, format!("is nested deeper than {FORM_DEPTH_MAX} levels")));
    }
    let part = Part { map, at };
    let repeated = |min, max| Ok(Form::Repeat { form: Box::new(part.format("content", depth)?), min, max });
    match part.text("type")? {
        "const_string" => Ok(Form::literal(part.text("value")?)),
        "json_schema" => json_schema(&part),
        "qwen_xml_parameter" => Ok(Form::Value {
            dialect: Dialect::Qwen,
            schema: part.value("json_schema")?.clone(),
            at: part.path("json_schema"),
        }),
        "regex" => Ok(Form::Regex { pattern: part.text("pattern")?.to_owned(), at: part.path("pattern") }),
        "grammar" => Ok(Form::Grammar { text: part.text("grammar")?.to_owned(), at: part.path("grammar") }),
        "any_text" => any_text(&part),
        "sequence" => Ok(Form::Sequence(part.formats("elements", depth)?)),
        "or" => Ok(Form::Choice(part.formats("elements", depth)?)),
        "optional" => repeated(0, Some(1)),
        "plus" => repeated(1, None),
        "star" => repeated(0, None),
        "repeat" => repeated(part.count("min")?.unwrap_or(0), part.repeat_max()?),
        "tag" => {
            let Tag { begin, rest } = tag(&part, depth)?;
            Ok(Form::Sequence(vec![Form::Literal(begin), rest]))
        }
        "triggered_tags" => triggered_tags(&part, "triggers", depth),
        "token_triggered_tags" => triggered_tags(&part, "trigger_tokens", depth),
        "tags_with_separator" => separated(&part, depth),
        "dispatch" | "token_dispatch" => dispatch(&part, depth),
        "token" => Ok(match part.value("token")? {
            Value::Number(token) => match token.as_u64().and_then(|token| u32::try_from(token).ok()) {
                Some(token) => Form::Token(token),
                None => return Err(FormError::new(part.path("token"), "must be a string or a token ID")),
            },
            _ => Form::literal(part.text("token")?),
        }),
        other => {
            let problem = format!("{other:?} is not supported; supported types: {}", TYPES[1..].join(", "));
            Err(FormError::new(part.path("type"), problem))
        }
    }
}

fn json_schema(part: &Part<'_>) -> Result<Form, FormError> {
    let (schema, at) = (part.value("json_schema")?.clone(), part.path("json_schema"));
    part.reject("any_order", &[Value::Bool(false)])?;
    match part.map.get("style").and_then(Value::as_str) {
        None | Some("json") => Ok(Form::Json { schema, at }),
        Some("qwen_xml") => Ok(Form::Value { dialect: Dialect::Qwen, schema, at }),
        Some(other) => {
            let problem = format!("{other:?} is not supported; supported styles: json, qwen_xml");
            Err(FormError::new(part.path("style"), problem))
        }
    }
}

fn any_text(part: &Part<'_>) -> Result<Form, FormError> {
    part.reject("max_tokens", &[])?;
    let excludes = if part.map.contains_key("excludes") { part.texts("excludes")? } else { Vec::new() };
    let chars_max = part.count("max_chars")?;
    if chars_max.is_some_and(|max| max > REPEAT_MAX) {
        return Err(FormError::new(part.path("max_chars"), format!("must be at most {REPEAT_MAX}")));
    }
    Ok(Form::Text { excludes, chars_max })
}

/// Converts a tag: a format between a begin and one of its ends. The begin and each end may be a token, identified by
/// its text.
fn tag(part: &Part<'_>, depth: usize) -> Result<Tag, FormError> {
    let ends = match part.value("end")? {
        Value::Array(ends) => {
            let text = |(index, end): (usize, &Value)| marker(end, &format!("{}.end[{index}]", part.at));
            ends.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?
        }
        end => vec![marker(end, &part.path("end"))?],
    };
    let begin = marker(part.value("begin")?, &part.path("begin"))?;
    Ok(Tag::new(begin, part.format("content", depth)?, &ends))
}

fn marker(marker: &Value, at: &str) -> Result<String, FormError> {
    let text = match marker {
        Value::String(text) => Some(text.clone()),
        Value::Object(token) if token.get("type").is_some_and(|kind| kind == "token") => {
            token.get("token").and_then(Value::as_str).map(str::to_owned)
        }
        _ => None,
    };
    text.ok_or_else(|| {
        FormError::new(at, "must be a string or an object with the type \"token\" and the text of a token")
    })
}

fn tags(part: &Part<'_>, depth: usize) -> Result<Vec<Tag>, FormError> {
    let mut tags = Vec::new();
    for (index, one) in list(part.value("tags")?, &part.path("tags"))?.iter().enumerate() {
        let at = format!("{}.tags[{index}]", part.at);
        let map = one.as_object().ok_or_else(|| FormError::new(&at, "must be an object"))?;
        tags.push(tag(&Part { map, at: &at }, depth + 1)?);
    }
    Ok(tags)
}

fn triggered_tags(part: &Part<'_>, triggers: &str, depth: usize) -> Result<Form, FormError> {
    let nothing = [Value::Array(Vec::new())];
    part.reject("excludes", &nothing)?;
    Ok(Form::TriggeredTags(TriggeredTags {
        triggers: part.texts(triggers)?,
        tags: tags(part, depth)?,
        at_least_one: part.flag("at_least_one", false)?,
        stop_after_first: part.flag("stop_after_first", false)?,
        excludes: Vec::new(),
        at: part.at.to_owned(),
    }))
}

fn separated(part: &Part<'_>, depth: usize) -> Result<Form, FormError> {
    let whole = |Tag { begin, rest }| Form::Sequence(vec![Form::Literal(begin), rest]);
    let one = Form::Choice(tags(part, depth)?.into_iter().map(whole).collect());
    let separator = Form::literal(part.text("separator")?);
    let some = if part.flag("stop_after_first", false)? {
        one
    } else {
        let more = Form::Sequence(vec![separator, one.clone()]).repeated(0);
        Form::Sequence(vec![one, more])
    };
    Ok(if part.flag("at_least_one", false)? { some } else { some.optional() })
}

/// Converts the rules of a dispatch format, each of which is a trigger and the format that follows it.
fn dispatch(part: &Part<'_>, depth: usize) -> Result<Form, FormError> {
    part.reject("excludes", &[Value::Array(Vec::new())])?;
    let (mut triggers, mut tags) = (Vec::new(), Vec::new());
    for (index, rule) in list(part.value("rules")?, &part.path("rules"))?.iter().enumerate() {
        let at = format!("{}.rules[{index}]", part.at);
        let problem = || FormError::new(&at, "must be an array of a string and a format");
        let [Value::String(text), Value::Object(map)] = &list(rule, &at)?[..] else { return Err(problem()) };
        triggers.push(text.clone());
        tags.push(Tag { begin: text.clone(), rest: format(map, &format!("{at}[1]"), depth + 1)? });
    }
    Ok(Form::TriggeredTags(TriggeredTags {
        triggers,
        tags,
        at_least_one: false,
        stop_after_first: !part.flag("loop", true)?,
        excludes: Vec::new(),
        at: part.at.to_owned(),
    }))
}

fn list<'v>(value: &'v Value, at: &str) -> Result<&'v Vec<Value>, FormError> {
    match value {
        Value::Array(list) if list.len() > ELEMENTS_MAX => {
            Err(FormError::new(at, format!("has more than {ELEMENTS_MAX} elements")))
        }
        Value::Array(list) => Ok(list),
        _ => Err(FormError::new(at, "must be an array")),
    }
}

/// A format or another part of a structural tag, with methods that read its fields.
struct Part<'a> {
    map: &'a Map<String, Value>,
    at: &'a str,
}

impl<'a> Part<'a> {
    fn path(&self, field: &str) -> String {
        format!("{}.{field}", self.at)
    }

    fn value(&self, field: &str) -> Result<&'a Value, FormError> {
        self.map.get(field).ok_or_else(|| FormError::new(self.path(field), "is missing"))
    }

    fn text(&self, field: &str) -> Result<&'a str, FormError> {
        self.value(field)?.as_str().ok_or_else(|| FormError::new(self.path(field), "must be a string"))
    }

    fn texts(&self, field: &str) -> Result<Vec<String>, FormError> {
        let texts = list(self.value(field)?, &self.path(field))?.iter();
        let texts = texts.map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
        texts.ok_or_else(|| FormError::new(self.path(field), "must be an array of strings"))
    }

    fn flag(&self, field: &str, default: bool) -> Result<bool, FormError> {
        match self.map.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(FormError::new(self.path(field), "must be a boolean")),
        }
    }

    fn count(&self, field: &str) -> Result<Option<u32>, FormError> {
        self.count_or(field, "must be a non-negative integer")
    }

    /// Returns the maximum number of repetitions, or `None` if it is unlimited.
    fn repeat_max(&self) -> Result<Option<u32>, FormError> {
        match self.map.get("max").and_then(Value::as_i64) {
            Some(-1) => Ok(None),
            _ => self.count_or("max", "must be a non-negative integer, or -1 for no maximum"),
        }
    }

    /// Returns the number in a field, if the field is present. `problem` is the message for a field with an invalid
    /// value.
    fn count_or(&self, field: &str, problem: &str) -> Result<Option<u32>, FormError> {
        match self.map.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(count) => match count.as_u64().and_then(|count| u32::try_from(count).ok()) {
                Some(count) => Ok(Some(count)),
                None => Err(FormError::new(self.path(field), problem)),
            },
        }
    }

    fn object(&self, field: &str) -> Result<(&'a Map<String, Value>, String), FormError> {
        let object = self.value(field)?.as_object();
        let at = self.path(field);
        match object {
            Some(object) => Ok((object, at)),
            None => Err(FormError::new(at, "must be an object")),
        }
    }

    fn format(&self, field: &str, depth: usize) -> Result<Form, FormError> {
        let (map, at) = self.object(field)?;
        format(map, &at, depth + 1)
    }

    fn formats(&self, field: &str, depth: usize) -> Result<Vec<Form>, FormError> {
        let at = self.path(field);
        let each = list(self.value(field)?, &at)?.iter().enumerate();
        each.map(|(index, one)| {
            let at = format!("{at}[{index}]");
            let map = one.as_object().ok_or_else(|| FormError::new(&at, "must be an object"))?;
            format(map, &at, depth + 1)
        })
        .collect()
    }

    /// Rejects a field unless it is absent, null or has a value without effect.
    fn reject(&self, field: &str, neutral: &[Value]) -> Result<(), FormError> {
        match self.map.get(field) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if neutral.contains(value) => Ok(()),
            Some(_) => Err(FormError::new(self.path(field), "is not supported")),
        }
    }
}
