//! EBNF, as llama.cpp and XGrammar have it, to Lark.
//!
//! EBNF describes characters, Lark words and what is made of them. What of an EBNF grammar does not refer to itself
//! becomes words, as long as they can be, since a word is matched as a whole; only what does becomes rules. Between
//! words the longest counts, which is not what a grammar of characters says where one could end earlier.

mod parse;

use std::collections::HashMap;

use crate::lark::{quote, quote_regex};
use parse::{Node, Rules};

/// The rule that a grammar begins with.
const ROOT: &str = "root";

/// Whether a grammar is in EBNF.
pub(crate) fn is_ebnf(text: &str) -> bool {
    text.contains("::=")
}

/// A grammar in EBNF as one in Lark.
///
/// # Errors
/// What is wrong with it, and in which line.
pub(crate) fn to_lark(text: &str) -> Result<String, String> {
    let rules = parse::rules(text)?;
    let Some(&root) = rules.by_name.get(ROOT) else {
        return Err(format!("there is no rule named {ROOT}"));
    };
    let recursive = recursive(&rules);
    let mut writer =
        Writer { rules: &rules, recursive, lark: String::new(), terminals: 0, written: HashMap::new() };
    let start = writer.name(root);
    let mut lark = format!("start: {start}\n");
    for index in 0..rules.bodies.len() {
        writer.rule(index);
    }
    lark.push_str(&writer.lark);
    Ok(lark)
}

/// Which rules refer to themselves, directly or by others, or to one that does.
fn recursive(rules: &Rules) -> Vec<bool> {
    let references: Vec<Vec<usize>> = rules.bodies.iter().map(Node::references).collect();
    // A rule is not recursive once all it refers to is known not to be: leaves first.
    let mut users = vec![Vec::new(); references.len()];
    let mut open: Vec<usize> = Vec::with_capacity(references.len());
    for (rule, references) in references.iter().enumerate() {
        open.push(references.len());
        references.iter().for_each(|&used| users[used].push(rule));
    }
    let mut recursive = vec![true; references.len()];
    let mut done: Vec<usize> = (0..open.len()).filter(|&rule| open[rule] == 0).collect();
    while let Some(rule) = done.pop() {
        recursive[rule] = false;
        for &user in &users[rule] {
            open[user] -= 1;
            if open[user] == 0 {
                done.push(user);
            }
        }
    }
    recursive
}

struct Writer<'a> {
    rules: &'a Rules,
    recursive: Vec<bool>,
    lark: String,
    terminals: usize,
    /// Terminals by what they are, so that equal ones are one.
    written: HashMap<String, String>,
}

impl Writer<'_> {
    fn name(&self, rule: usize) -> String {
        if self.recursive[rule] { format!("r{rule}") } else { format!("R{rule}") }
    }

    fn rule(&mut self, rule: usize) {
        let rules = self.rules;
        let body = &rules.bodies[rule];
        let written = if self.recursive[rule] { self.expression(body) } else { self.word(body) };
        let written = if written.is_empty() { "\"\"".to_owned() } else { written };
        let name = self.name(rule);
        self.lark.push_str(&format!("{name}: {written}\n"));
    }

    fn is_word(&self, node: &Node) -> bool {
        node.references().iter().all(|&rule| !self.recursive[rule])
    }

    /// A part of a word.
    fn word(&self, node: &Node) -> String {
        match node {
            Node::Literal(text) if text.is_empty() => String::new(),
            Node::Literal(text) => quote(text),
            Node::Class(class) => format!("/{}/", quote_regex(class)),
            Node::Rule(rule) => self.name(*rule),
            Node::Sequence(parts) => crate::lark::join(parts.iter().map(|part| self.word(part))),
            Node::Choice(parts) => {
                crate::lark::choice(&parts.iter().map(|part| self.word(part)).collect::<Vec<_>>())
            }
            Node::Repeat(part, min, max) => repeat(&self.word(part), *min, *max),
        }
    }

    /// A part of a rule, in which what can be words are words.
    fn expression(&mut self, node: &Node) -> String {
        if self.is_word(node) {
            let word = self.word(node);
            return if word.is_empty() { word } else { self.terminal(word) };
        }
        match node {
            Node::Rule(rule) => self.name(*rule),
            Node::Sequence(parts) => {
                let mut written = Vec::new();
                let mut rest = &parts[..];
                while let Some(part) = rest.first() {
                    let words = rest.iter().take_while(|part| self.is_word(part)).count();
                    if words > 0 {
                        let word = crate::lark::join(rest[..words].iter().map(|part| self.word(part)));
                        if !word.is_empty() {
                            written.push(self.terminal(word));
                        }
                        rest = &rest[words..];
                    } else {
                        written.push(self.expression(part));
                        rest = &rest[1..];
                    }
                }
                crate::lark::join(written)
            }
            Node::Choice(parts) => {
                let parts: Vec<String> = parts.iter().map(|part| self.expression(part)).collect();
                crate::lark::choice(&parts)
            }
            Node::Repeat(part, min, max) => {
                let part = self.expression(part);
                repeat(&part, *min, *max)
            }
            Node::Literal(_) | Node::Class(_) => self.word(node),
        }
    }

    fn terminal(&mut self, body: String) -> String {
        if let Some(name) = self.written.get(&body) {
            return name.clone();
        }
        self.terminals += 1;
        let name = format!("T{}", self.terminals);
        self.lark.push_str(&format!("{name}: {body}\n"));
        self.written.insert(body, name.clone());
        name
    }
}

fn repeat(part: &str, min: u32, max: Option<u32>) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_refer_to_itself_is_words() {
        let lark = to_lark("root ::= greeting \" \" name\ngreeting ::= \"hi\" | \"hello\"\nname ::= [a-z]+")
            .unwrap();
        assert_eq!(
            lark,
            "start: R0\nR0: R1 \" \" R2\nR1: (\"hi\" | \"hello\")\nR2: (/[\\x{61}-\\x{7a}]/)+\n"
        );
    }

    #[test]
    fn what_does_is_rules_of_words_that_are_as_long_as_they_can_be() {
        let lark = to_lark("root ::= \"(\" ws root? ws \")\" [0-9]\nws ::= \" \"*").unwrap();
        assert_eq!(
            lark,
            "start: r0\nT1: \"(\" R1\nT2: R1 \")\" /[\\x{30}-\\x{39}]/\nr0: T1 (r0)? T2\nR1: (\" \")*\n"
        );
    }

    #[test]
    fn a_grammar_without_a_root_is_refused() {
        assert_eq!(to_lark("a ::= \"b\"").unwrap_err(), "there is no rule named root");
    }
}
