//! Locates the part of a form that cannot be compiled, by compiling its parts separately, from the outermost to
//! the innermost.

use serde_json::Value;

use crate::schema::{subschemas, with_definitions};
use crate::{Form, FormError};

/// Compiles a form and returns the problem if that fails.
type Compile<'a> = dyn FnMut(&Form) -> Result<(), String> + 'a;

/// Largest number of parts to compile.
const ATTEMPTS_MAX: usize = 64;
/// Largest number of characters of a reported problem.
const PROBLEM_CHARS_MAX: usize = 1000;

/// The remaining attempts to compile parts of a form.
struct Attempts<'a, 'c> {
    remaining: usize,
    compile: &'a mut Compile<'c>,
}

impl Attempts<'_, '_> {
    /// Returns the problem of a part that does not compile, or `None` if it compiles or no attempts remain.
    fn problem(&mut self, form: &Form) -> Option<String> {
        self.remaining = self.remaining.checked_sub(1)?;
        (self.compile)(form).err()
    }
}

/// Locates the error of a form that failed to compile with `problem`. `compile` compiles a part of the form.
pub(crate) fn locate(form: &Form, problem: &str, compile: &mut Compile<'_>) -> FormError {
    let mut attempts = Attempts { remaining: ATTEMPTS_MAX, compile };
    let mut leaves = Vec::new();
    add_leaves(form, &mut leaves);
    let is_single = leaves.len() == 1 && std::ptr::eq(leaves[0].0, form);
    for (leaf, at) in leaves {
        let found = if is_single { Some(problem.to_owned()) } else { attempts.problem(leaf) };
        let Some(found) = found else { continue };
        return match leaf {
            Form::Json { schema, .. } => descend(schema, at, &found, &mut attempts),
            _ => FormError::new(at, shorten(&found)),
        };
    }
    FormError::new("", shorten(problem))
}

/// Returns the path of the only schema, regular expression or grammar in a form, or an empty path if the form contains
/// none or several.
pub(crate) fn path(form: &Form) -> &str {
    let mut leaves = Vec::new();
    add_leaves(form, &mut leaves);
    match leaves[..] {
        [(_, at)] => at,
        _ => "",
    }
}

fn add_leaves<'f>(form: &'f Form, leaves: &mut Vec<(&'f Form, &'f str)>) {
    match form {
        Form::Json { at, .. }
        | Form::Value { at, .. }
        | Form::Regex { at, .. }
        | Form::Grammar { at, .. } => leaves.push((form, at)),
        Form::Sequence(parts) | Form::Choice(parts) => {
            parts.iter().for_each(|part| add_leaves(part, leaves));
        }
        Form::Repeat { form, .. } => add_leaves(form, leaves),
        Form::TriggeredTags(form) => {
            form.tags.iter().for_each(|tag| add_leaves(&tag.rest, leaves));
        }
        Form::Text { .. } | Form::Literal(_) | Form::Token(_) | Form::Until(_) => {}
    }
}

/// Descends to the innermost schema that fails by itself with the same problem.
fn descend(root: &Value, at: &str, problem: &str, attempts: &mut Attempts<'_, '_>) -> FormError {
    let (mut schema, mut at) = (root, at.to_owned());
    'deeper: loop {
        for (path, inner) in subschemas(schema) {
            if attempts.remaining == 0 {
                break 'deeper;
            }
            let alone = Form::Json { schema: with_definitions(inner, root), at: String::new() };
            if attempts.problem(&alone).is_some_and(|found| core(&found) == core(problem)) {
                at.push_str(&path);
                schema = inner;
                continue 'deeper;
            }
        }
        break;
    }
    FormError::new(at, shorten(problem))
}

/// The problem without the description of where it occurred.
fn core(problem: &str) -> &str {
    problem.split_once("while processing").map_or(problem, |(core, _)| core).trim()
}

fn shorten(problem: &str) -> String {
    let line = core(problem);
    match line.char_indices().nth(PROBLEM_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    }
}
