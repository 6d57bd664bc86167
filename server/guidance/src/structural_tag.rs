//! XGrammar's structural tags, as requests have them: a tree of formats.
//!
//! What counts tokens or excludes them by number has no counterpart here and is refused.

use serde_json::{Map, Value};

use crate::limits::{ELEMENTS_MAX, FORM_DEPTH_MAX};
use crate::{Dialect, Form, Invalid, Tag, Triggered};

/// The types of formats.
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

/// The form that a structural tag, or one of its formats, describes.
///
/// # Errors
/// It is none, or is of a kind that is not supported, and where.
pub fn structural_tag(tag: &Map<String, Value>, at: &str) -> Result<Form, Invalid> {
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

/// The older kind: tags with schemas, and what triggers them.
fn structures_of(tag: &Map<String, Value>, structures: &Value, at: &str) -> Result<Form, Invalid> {
    let part = Part { map: tag, at };
    let triggers = part.texts("triggers")?;
    let mut tags = Vec::new();
    for (index, structure) in list(structures, &part.place("structures"))?.iter().enumerate() {
        let at = format!("{at}.structures[{index}]");
        let map = structure.as_object().ok_or_else(|| Invalid::new(&at, "is no object"))?;
        let part = Part { map, at: &at };
        let schema = map.get("schema").cloned().unwrap_or(Value::Bool(true));
        let content = Form::Json { schema, at: part.place("schema") };
        tags.push(Tag::new(part.text("begin")?, content, &[part.text("end")?.to_owned()]));
    }
    Ok(Form::Triggered(Triggered {
        triggers,
        tags,
        at_least_one: false,
        stop_after_first: false,
        excludes: Vec::new(),
        at: at.to_owned(),
    }))
}

fn format(map: &Map<String, Value>, at: &str, depth: usize) -> Result<Form, Invalid> {
    if depth > FORM_DEPTH_MAX {
        return Err(Invalid::new(at, format!("nests deeper than {FORM_DEPTH_MAX}")));
    }
    let part = Part { map, at };
    let repeated = |min, max| Ok(Form::Repeat { form: Box::new(part.format("content", depth)?), min, max });
    match part.text("type")? {
        "const_string" => Ok(Form::literal(part.text("value")?)),
        "json_schema" => json_schema(&part),
        "qwen_xml_parameter" => Ok(Form::Value {
            dialect: Dialect::Qwen,
            schema: part.value("json_schema")?.clone(),
            at: part.place("json_schema"),
        }),
        "regex" => Ok(Form::Regex { pattern: part.text("pattern")?.to_owned(), at: part.place("pattern") }),
        "grammar" => Ok(Form::Grammar { text: part.text("grammar")?.to_owned(), at: part.place("grammar") }),
        "any_text" => any_text(&part),
        "sequence" => Ok(Form::Sequence(part.formats("elements", depth)?)),
        "or" => Ok(Form::Choice(part.formats("elements", depth)?)),
        "optional" => repeated(0, Some(1)),
        "plus" => repeated(1, None),
        "star" => repeated(0, None),
        "repeat" => {
            let min = part.count("min")?.unwrap_or(0);
            let max =
                if map.get("max").and_then(Value::as_i64) == Some(-1) { None } else { part.count("max")? };
            repeated(min, max)
        }
        "tag" => {
            let Tag { begin, rest } = tag(&part, depth)?;
            Ok(Form::Sequence(vec![Form::Literal(begin), rest]))
        }
        "triggered_tags" => triggered(&part, "triggers", depth),
        "token_triggered_tags" => triggered(&part, "trigger_tokens", depth),
        "tags_with_separator" => separated(&part, depth),
        "dispatch" | "token_dispatch" => dispatch(&part, depth),
        "token" => Ok(match part.value("token")? {
            Value::Number(token) => match token.as_u64().and_then(|token| u32::try_from(token).ok()) {
                Some(token) => Form::Token(token),
                None => return Err(Invalid::new(part.place("token"), "is no token")),
            },
            _ => Form::literal(part.text("token")?),
        }),
        other => {
            let problem = format!("{other:?} is not supported; these are: {}", TYPES[1..].join(", "));
            Err(Invalid::new(part.place("type"), problem))
        }
    }
}

fn json_schema(part: &Part<'_>) -> Result<Form, Invalid> {
    let (schema, at) = (part.value("json_schema")?.clone(), part.place("json_schema"));
    part.refuse("any_order", &[Value::Bool(false)])?;
    match part.map.get("style").and_then(Value::as_str) {
        None | Some("json") => Ok(Form::Json { schema, at }),
        Some("qwen_xml") => Ok(Form::Value { dialect: Dialect::Qwen, schema, at }),
        Some(other) => {
            let problem = format!("{other:?} is not supported; these are: json, qwen_xml");
            Err(Invalid::new(part.place("style"), problem))
        }
    }
}

fn any_text(part: &Part<'_>) -> Result<Form, Invalid> {
    part.refuse("max_tokens", &[])?;
    let excludes = if part.map.contains_key("excludes") { part.texts("excludes")? } else { Vec::new() };
    Ok(Form::Text { excludes, chars_max: part.count("max_chars")? })
}

/// What is between two texts. Either may be a token by its text.
fn tag(part: &Part<'_>, depth: usize) -> Result<Tag, Invalid> {
    let ends = match part.value("end")? {
        Value::Array(ends) => {
            let text = |(index, end): (usize, &Value)| marker(end, &format!("{}.end[{index}]", part.at));
            ends.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?
        }
        end => vec![marker(end, &part.place("end"))?],
    };
    let begin = marker(part.value("begin")?, &part.place("begin"))?;
    Ok(Tag::new(begin, part.format("content", depth)?, &ends))
}

fn marker(marker: &Value, at: &str) -> Result<String, Invalid> {
    let text = match marker {
        Value::String(text) => Some(text.clone()),
        Value::Object(token) if token.get("type").is_some_and(|kind| kind == "token") => {
            token.get("token").and_then(Value::as_str).map(str::to_owned)
        }
        _ => None,
    };
    text.ok_or_else(|| Invalid::new(at, "is neither a string nor a token by its text"))
}

fn tags(part: &Part<'_>, depth: usize) -> Result<Vec<Tag>, Invalid> {
    let mut tags = Vec::new();
    for (index, one) in list(part.value("tags")?, &part.place("tags"))?.iter().enumerate() {
        let at = format!("{}.tags[{index}]", part.at);
        let map = one.as_object().ok_or_else(|| Invalid::new(&at, "is no object"))?;
        tags.push(tag(&Part { map, at: &at }, depth + 1)?);
    }
    Ok(tags)
}

fn triggered(part: &Part<'_>, triggers: &str, depth: usize) -> Result<Form, Invalid> {
    let nothing = [Value::Array(Vec::new())];
    part.refuse("excludes", &nothing)?;
    Ok(Form::Triggered(Triggered {
        triggers: part.texts(triggers)?,
        tags: tags(part, depth)?,
        at_least_one: part.flag("at_least_one", false)?,
        stop_after_first: part.flag("stop_after_first", false)?,
        excludes: Vec::new(),
        at: part.at.to_owned(),
    }))
}

fn separated(part: &Part<'_>, depth: usize) -> Result<Form, Invalid> {
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

/// Texts, each with the format of what follows it.
fn dispatch(part: &Part<'_>, depth: usize) -> Result<Form, Invalid> {
    part.refuse("excludes", &[Value::Array(Vec::new())])?;
    let (mut triggers, mut tags) = (Vec::new(), Vec::new());
    for (index, rule) in list(part.value("rules")?, &part.place("rules"))?.iter().enumerate() {
        let at = format!("{}.rules[{index}]", part.at);
        let problem = || Invalid::new(&at, "is no array of a string and a format");
        let [Value::String(text), Value::Object(map)] = &list(rule, &at)?[..] else { return Err(problem()) };
        triggers.push(text.clone());
        tags.push(Tag { begin: text.clone(), rest: format(map, &format!("{at}[1]"), depth + 1)? });
    }
    Ok(Form::Triggered(Triggered {
        triggers,
        tags,
        at_least_one: false,
        stop_after_first: !part.flag("loop", true)?,
        excludes: Vec::new(),
        at: part.at.to_owned(),
    }))
}

fn list<'v>(value: &'v Value, at: &str) -> Result<&'v Vec<Value>, Invalid> {
    match value {
        Value::Array(list) if list.len() > ELEMENTS_MAX => {
            Err(Invalid::new(at, format!("has more than {ELEMENTS_MAX} elements")))
        }
        Value::Array(list) => Ok(list),
        _ => Err(Invalid::new(at, "is no array")),
    }
}

/// A format, to read its fields.
struct Part<'a> {
    map: &'a Map<String, Value>,
    at: &'a str,
}

impl<'a> Part<'a> {
    fn place(&self, field: &str) -> String {
        format!("{}.{field}", self.at)
    }

    fn value(&self, field: &str) -> Result<&'a Value, Invalid> {
        self.map.get(field).ok_or_else(|| Invalid::new(self.place(field), "is missing"))
    }

    fn text(&self, field: &str) -> Result<&'a str, Invalid> {
        self.value(field)?.as_str().ok_or_else(|| Invalid::new(self.place(field), "is no string"))
    }

    fn texts(&self, field: &str) -> Result<Vec<String>, Invalid> {
        let texts = list(self.value(field)?, &self.place(field))?.iter();
        let texts = texts.map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
        texts.ok_or_else(|| Invalid::new(self.place(field), "is no array of strings"))
    }

    fn flag(&self, field: &str, default: bool) -> Result<bool, Invalid> {
        match self.map.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(Invalid::new(self.place(field), "is no boolean")),
        }
    }

    fn count(&self, field: &str) -> Result<Option<u32>, Invalid> {
        match self.map.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(count) => match count.as_u64().and_then(|count| u32::try_from(count).ok()) {
                Some(count) => Ok(Some(count)),
                None => Err(Invalid::new(self.place(field), "is no integer from 0")),
            },
        }
    }

    fn object(&self, field: &str) -> Result<(&'a Map<String, Value>, String), Invalid> {
        let object = self.value(field)?.as_object();
        let at = self.place(field);
        match object {
            Some(object) => Ok((object, at)),
            None => Err(Invalid::new(at, "is no object")),
        }
    }

    fn format(&self, field: &str, depth: usize) -> Result<Form, Invalid> {
        let (map, at) = self.object(field)?;
        format(map, &at, depth + 1)
    }

    fn formats(&self, field: &str, depth: usize) -> Result<Vec<Form>, Invalid> {
        let at = self.place(field);
        let each = list(self.value(field)?, &at)?.iter().enumerate();
        each.map(|(index, one)| {
            let at = format!("{at}[{index}]");
            let map = one.as_object().ok_or_else(|| Invalid::new(&at, "is no object"))?;
            format(map, &at, depth + 1)
        })
        .collect()
    }

    /// Refuses a field unless it is absent, null or says what is so anyway.
    fn refuse(&self, field: &str, silent: &[Value]) -> Result<(), Invalid> {
        match self.map.get(field) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if silent.contains(value) => Ok(()),
            Some(_) => Err(Invalid::new(self.place(field), "is not supported")),
        }
    }
}
