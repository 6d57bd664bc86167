//! Where a form cannot be compiled: its parts are tried by themselves, from the whole to what is within it.

use serde_json::Value;

use crate::schema::{by_itself, within};
use crate::{Form, Invalid};

/// Says what is wrong with a form.
type Compile<'a> = dyn FnMut(&Form) -> Result<(), String> + 'a;

/// Most parts that are tried.
const TRIES_MAX: usize = 64;
/// Characters of a problem that are told.
const PROBLEM_CHARS_MAX: usize = 1000;

/// Tells what is wrong and where, of a form of which `problem` was said when it was compiled. `compile` says what is
/// wrong with another.
pub(crate) fn locate(form: &Form, problem: &str, compile: &mut Compile<'_>) -> Invalid {
    let mut tries = TRIES_MAX;
    let mut leaves = Vec::new();
    add_leaves(form, &mut leaves);
    let alone = leaves.len() == 1 && std::ptr::eq(leaves[0].0, form);
    for (leaf, at) in leaves {
        let found = if alone {
            Some(problem.to_owned())
        } else if tries == 0 {
            None
        } else {
            tries -= 1;
            compile(leaf).err()
        };
        let Some(found) = found else { continue };
        return match leaf {
            Form::Json { schema, .. } => descend(schema, at, &found, (&mut tries, compile)),
            _ => Invalid::new(at, cut(&found)),
        };
    }
    Invalid::new("", cut(problem))
}

/// The place of a form that has one part with a place.
pub(crate) fn place(form: &Form) -> &str {
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
        Form::Triggered(triggered) => {
            triggered.tags.iter().for_each(|tag| add_leaves(&tag.rest, leaves));
        }
        Form::Text { .. } | Form::Literal(_) | Form::Token(_) | Form::Until(_) => {}
    }
}

/// Goes to the innermost schema that fails by itself as the whole does.
fn descend(
    root: &Value,
    at: &str,
    problem: &str,
    (tries, compile): (&mut usize, &mut Compile<'_>),
) -> Invalid {
    let (mut schema, mut at) = (root, at.to_owned());
    'deeper: loop {
        for (path, inner) in within(schema) {
            if *tries == 0 {
                break 'deeper;
            }
            *tries -= 1;
            let alone = Form::Json { schema: by_itself(inner, root), at: String::new() };
            if compile(&alone).is_err_and(|found| core(&found) == core(problem)) {
                at.push_str(&path);
                schema = inner;
                continue 'deeper;
            }
        }
        break;
    }
    Invalid::new(at, cut(problem))
}

/// A problem without the way to where it is.
fn core(problem: &str) -> &str {
    problem.split_once("while processing").map_or(problem, |(core, _)| core).trim()
}

fn cut(problem: &str) -> String {
    let line = core(problem);
    match line.char_indices().nth(PROBLEM_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    }
}
