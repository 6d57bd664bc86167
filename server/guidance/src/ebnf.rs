//! Translates EBNF, in the dialect of llama.cpp and XGrammar, to Lark.
//!
//! EBNF rules describe sequences of characters. Lark distinguishes terminals, which the lexer matches as a whole, from
//! rules, which describe sequences of terminals. EBNF rules that are not recursive and do not refer to recursive rules
//! become terminals. In all other rules, the longest possible parts become terminals. The lexer always uses the longest
//! match, so it does not allow a text that matches the EBNF grammar only if a terminal ends earlier.

mod parse;

use std::collections::HashMap;

use crate::lark::{choice, join, quote, quote_regex, repeat};
use parse::{Node, Rules};

/// The name of the rule that a grammar starts with.
const ROOT: &str = "root";

/// Whether a grammar is treated as EBNF, because it contains `::=`.
pub(crate) fn is_ebnf(text: &str) -> bool {
    text.contains("::=")
}

/// Translates a grammar from EBNF to Lark.
///
/// # Errors
/// The grammar is invalid. The message contains the line number, unless a rule is missing.
pub(crate) fn to_lark(text: &str) -> Result<String, String> {
    let rules = parse::rules(text)?;
    let Some(&root) = rules.by_name.get(ROOT) else {
        return Err(format!("the grammar has no rule named {ROOT}"));
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

/// Returns, for each rule, whether it refers to itself or to a recursive rule, directly or through other rules.
fn recursive(rules: &Rules) -> Vec<bool> {
    let references: Vec<Vec<usize>> = rules.bodies.iter().map(Node::references).collect();
    // A rule is not recursive if all rules it refers to are known not to be recursive. Start with rules without
    // references.
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
    /// The names of terminals by their definitions, so that equal terminals share one name.
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

    /// Returns the Lark text of a part of a terminal.
    fn word(&self, node: &Node) -> String {
        match node {
            Node::Literal(text) if text.is_empty() => String::new(),
            Node::Literal(text) => quote(text),
            Node::Class(class) => format!("/{}/", quote_regex(class)),
            Node::Rule(rule) => self.name(*rule),
            Node::Sequence(parts) => join(parts.iter().map(|part| self.word(part))),
            Node::Choice(parts) => choice(&parts.iter().map(|part| self.word(part)).collect::<Vec<_>>()),
            Node::Repeat(part, min, max) => repeat(&self.word(part), *min, *max),
        }
    }

    /// Returns the Lark text of a part of a rule. Everything in it that can be a terminal becomes a terminal.
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
                        let word = join(rest[..words].iter().map(|part| self.word(part)));
                        if !word.is_empty() {
                            written.push(self.terminal(word));
                        }
                        rest = &rest[words..];
                    } else {
                        written.push(self.expression(part));
                        rest = &rest[1..];
                    }
                }
                join(written)
            }
            Node::Choice(parts) => {
                let parts: Vec<String> = parts.iter().map(|part| self.expression(part)).collect();
                choice(&parts)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_do_not_refer_to_themselves_become_terminals() {
        let lark = to_lark("root ::= greeting \" \" name\ngreeting ::= \"hi\" | \"hello\"\nname ::= [a-z]+")
            .unwrap();
        assert_eq!(
            lark,
            "start: R0\nR0: R1 \" \" R2\nR1: (\"hi\" | \"hello\")\nR2: (/[\\x{61}-\\x{7a}]/)+\n"
        );
    }

    #[test]
    fn recursive_rules_consist_of_terminals_that_are_as_long_as_possible() {
        let lark = to_lark("root ::= \"(\" ws root? ws \")\" [0-9]\nws ::= \" \"*").unwrap();
        assert_eq!(
            lark,
            "start: r0\nT1: \"(\" R1\nT2: R1 \")\" /[\\x{30}-\\x{39}]/\nr0: T1 (r0)? T2\nR1: (\" \")*\n"
        );
    }

    #[test]
    fn a_grammar_without_a_root_is_rejected() {
        assert_eq!(to_lark("a ::= \"b\"").unwrap_err(), "the grammar has no rule named root");
    }
}
