//! Parses EBNF: rules, literals, character classes, groups and repetitions.

use std::collections::HashMap;
use std::iter::Peekable;
use std::str::CharIndices;

use crate::limits::REPEAT_MAX;

/// Nesting depth of a rule and its groups in an EBNF grammar.
///
/// If exceeded: 400, `invalid_value`.
const DEPTH_MAX: usize = 100;

/// Number of consecutive repetition operators in an EBNF grammar, as in `"a"?*`. Each of them is a level of nesting.
///
/// If exceeded: 400, `invalid_value`.
const REPETITIONS_MAX: usize = 10;

/// The rules of a grammar.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) bodies: Vec<Node>,
    pub(super) by_name: HashMap<String, usize>,
}

/// A part of a rule.
#[derive(Debug, PartialEq)]
pub(super) enum Node {
    Literal(String),
    /// A character class, as a regular expression.
    Class(String),
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
}

impl Node {
    /// The rules that the node refers to, possibly with duplicates.
    pub(super) fn references(&self) -> Vec<usize> {
        let mut references = Vec::new();
        self.add_references(&mut references);
        references
    }

    fn add_references(&self, references: &mut Vec<usize>) {
        match self {
            Self::Literal(_) | Self::Class(_) => {}
            Self::Rule(rule) => references.push(*rule),
            Self::Sequence(parts) | Self::Choice(parts) => {
                parts.iter().for_each(|part| part.add_references(references));
            }
            Self::Repeat(part, ..) => part.add_references(references),
        }
    }
}

/// Parses the rules of a grammar.
///
/// # Errors
/// The grammar is invalid. The message contains the line number, unless a rule is missing.
pub(super) fn rules(text: &str) -> Result<Rules, String> {
    let mut reader =
        Reader { text, letters: text.char_indices().peekable(), names: HashMap::new(), depth: 0 };
    let mut bodies: Vec<(usize, Node)> = Vec::new();
    let mut defined = HashMap::new();
    reader.skip_space();
    while !reader.is_at_end() {
        let Some(name) = reader.name() else { return Err(reader.expected("the name of a rule")) };
        reader.skip_space();
        if !reader.consume("::=") {
            return Err(reader.expected("::="));
        }
        let rule = reader.rule(&name);
        if defined.insert(rule, bodies.len()).is_some() {
            return Err(reader.error(&format!("the grammar has two rules named {name}")));
        }
        let body = reader.choice()?;
        bodies.push((rule, body));
    }
    let mut by_rule: Vec<Option<Node>> = (0..reader.names.len()).map(|_| None).collect();
    bodies.into_iter().for_each(|(rule, body)| by_rule[rule] = Some(body));
    let missing = reader.names.iter().find(|(_, rule)| by_rule[**rule].is_none());
    if let Some((name, _)) = missing {
        return Err(format!("the grammar has no rule named {name}"));
    }
    Ok(Rules { bodies: by_rule.into_iter().flatten().collect(), by_name: reader.names })
}

struct Reader<'a> {
    text: &'a str,
    letters: Peekable<CharIndices<'a>>,
    names: HashMap<String, usize>,
    depth: usize,
}

impl<'a> Reader<'a> {
    /// Returns the index of the rule with this name. A new name receives the next index.
    fn rule(&mut self, name: &str) -> usize {
        let next = self.names.len();
        *self.names.entry(name.to_owned()).or_insert(next)
    }

    fn position(&mut self) -> usize {
        self.letters.peek().map_or(self.text.len(), |(at, _)| *at)
    }

    fn rest(&mut self) -> &'a str {
        let position = self.position();
        &self.text[position..]
    }

    fn is_at_end(&mut self) -> bool {
        self.letters.peek().is_none()
    }

    fn peek(&mut self) -> Option<char> {
        self.letters.peek().map(|(_, letter)| *letter)
    }

    fn next(&mut self) -> Option<char> {
        self.letters.next().map(|(_, letter)| letter)
    }

    fn consume(&mut self, text: &str) -> bool {
        let matches = self.rest().starts_with(text);
        if matches {
            for _ in text.chars() {
                self.letters.next();
            }
        }
        matches
    }

    fn error(&mut self, problem: &str) -> String {
        let position = self.position();
        let line = 1 + self.text[..position].matches('\n').count();
        format!("line {line}: {problem}")
    }

    fn expected(&mut self, what: &str) -> String {
        match self.peek() {
            Some(letter) => self.error(&format!("expected {what}, found {letter:?}")),
            None => self.error(&format!("expected {what}, found the end of the grammar")),
        }
    }

    fn skip_space(&mut self) {
        while let Some(letter) = self.peek() {
            if letter == '#' {
                while self.next().is_some_and(|letter| letter != '\n') {}
            } else if letter.is_whitespace() {
                self.next();
            } else {
                return;
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == '-';
        let name: String = self.rest().chars().take_while(|&letter| is_part(letter)).collect();
        if name.is_empty() || name.starts_with(|letter: char| letter.is_ascii_digit() || letter == '-') {
            return None;
        }
        self.consume(&name);
        Some(name)
    }

    /// Whether a new rule begins here.
    fn is_at_rule(&mut self) -> bool {
        let rest = self.rest();
        let after = rest
            .trim_start_matches(|letter: char| letter.is_alphanumeric() || letter == '_' || letter == '-');
        after.len() < rest.len() && after.trim_start().starts_with("::=")
    }

    fn choice(&mut self) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            let problem = format!("the rule is nested deeper than {DEPTH_MAX} levels");
            return Err(self.error(&problem));
        }
        let mut parts = vec![self.sequence()?];
        while self.consume("|") {
            parts.push(self.sequence()?);
        }
        self.depth -= 1;
        Ok(if parts.len() == 1 { parts.remove(0) } else { Node::Choice(parts) })
    }

    fn sequence(&mut self) -> Result<Node, String> {
        let mut parts = Vec::new();
        loop {
            self.skip_space();
            match self.peek() {
                None | Some('|' | ')') => break,
                Some(_) if self.is_at_rule() => break,
                Some(_) => {
                    let part = self.part()?;
                    parts.push(self.repeated(part)?);
                }
            }
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Node::Sequence(parts) })
    }

    fn part(&mut self) -> Result<Node, String> {
        if let Some(name) = self.name() {
            return Ok(Node::Rule(self.rule(&name)));
        }
        match self.peek() {
            Some('"') => {
                self.next();
                self.literal().map(Node::Literal)
            }
            Some('[') => {
                self.next();
                self.class().map(Node::Class)
            }
            Some('.') => {
                self.next();
                Ok(Node::Class("(?s:.)".to_owned()))
            }
            Some('(') => {
                self.next();
                if self.peek() == Some('=') {
                    return Err(self.error("lookahead is not supported"));
                }
                let inner = self.choice()?;
                if self.consume(")") { Ok(inner) } else { Err(self.expected("a closing parenthesis")) }
            }
            _ => Err(self.expected("a name, a literal, a character class or a group")),
        }
    }

    fn repeated(&mut self, mut part: Node) -> Result<Node, String> {
        for repetitions in 0.. {
            let Some(operator) = self.peek().filter(|letter| "*+?{".contains(*letter)) else { break };
            if repetitions == REPETITIONS_MAX {
                let problem = format!("more than {REPETITIONS_MAX} consecutive repetition operators");
                return Err(self.error(&problem));
            }
            self.next();
            let (min, max) = match operator {
                '*' => (0, None),
                '+' => (1, None),
                '?' => (0, Some(1)),
                _ => self.bounds()?,
            };
            part = Node::Repeat(Box::new(part), min, max);
        }
        Ok(part)
    }

    /// Parses the bounds of a repetition, after the opening brace.
    fn bounds(&mut self) -> Result<(u32, Option<u32>), String> {
        let inner: String = self.rest().chars().take_while(|&letter| letter != '}').collect();
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&count| count <= REPEAT_MAX);
        let bounds = match inner.split_once(',') {
            None => number(&inner).map(|count| (count, Some(count))),
            Some((min, "")) => number(min).map(|min| (min, None)),
            Some((min, max)) => {
                let min = if min.trim().is_empty() { Some(0) } else { number(min) };
                let max = if max.trim().is_empty() { Some(None) } else { number(max).map(Some) };
                min.zip(max).filter(|(min, max)| max.is_none_or(|max| *min <= max))
            }
        };
        let problem =
            format!("expected {{n}}, {{min,}}, {{,max}} or {{min,max}} with min <= max <= {REPEAT_MAX}");
        let Some(bounds) = bounds else { return Err(self.error(&problem)) };
        if self.consume(&inner) && self.consume("}") { Ok(bounds) } else { Err(self.error(&problem)) }
    }

    fn literal(&mut self) -> Result<String, String> {
        let mut text = String::new();
        loop {
            // The newline is not consumed, because the error reports the line of the current position.
            let Some(letter) = self.peek().filter(|&letter| letter != '\n') else {
                return Err(self.error("the literal is not closed"));
            };
            self.next();
            match letter {
                '"' => return Ok(text),
                '\\' => text.push(self.escaped()?),
                letter => text.push(letter),
            }
        }
    }

    /// Parses a character class into a regular expression.
    fn class(&mut self) -> Result<String, String> {
        let mut class = String::from(if self.consume("^") { "[^" } else { "[" });
        let empty = class.len();
        loop {
            if self.consume("]") {
                break;
            }
            if self.rest().starts_with("\\d")
                || self.rest().starts_with("\\w")
                || self.rest().starts_with("\\s")
            {
                class.push('\\');
                self.next();
                class.extend(self.next());
                continue;
            }
            let first = self.class_letter()?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            if !is_range {
                class.push_str(&format!("\\x{{{:x}}}", first as u32));
                continue;
            }
            self.next();
            let last = self.class_letter()?;
            if last < first {
                return Err(self.error(&format!("the range from {first:?} to {last:?} is reversed")));
            }
            class.push_str(&format!("\\x{{{:x}}}-\\x{{{:x}}}", first as u32, last as u32));
        }
        match (class.len() == empty, empty) {
            (true, 1) => Err(self.error("the character class is empty")),
            // A negated empty class matches every character.
            (true, _) => Ok("(?s:.)".to_owned()),
            _ => Ok(class + "]"),
        }
    }

    fn class_letter(&mut self) -> Result<char, String> {
        match self.next() {
            None => Err(self.error("the character class is not closed")),
            Some('\\') => self.escaped(),
            Some(letter) => Ok(letter),
        }
    }

    /// Parses an escape sequence, after the backslash.
    fn escaped(&mut self) -> Result<char, String> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(letter) if !letter.is_alphanumeric() => return Ok(letter),
            Some(letter) => return Err(self.error(&format!("\\{letter} is not a valid escape"))),
            None => return Err(self.error("the grammar ends with a backslash")),
        };
        let code: String = self.rest().chars().take(digits).collect();
        // `from_str_radix` also accepts a sign.
        let is_code = code.len() == digits && code.bytes().all(|byte| byte.is_ascii_hexdigit());
        let letter = u32::from_str_radix(&code, 16).ok().and_then(char::from_u32);
        match letter.filter(|_| is_code) {
            Some(letter) => {
                self.consume(&code);
                Ok(letter)
            }
            None => {
                let problem = format!("expected {digits} hexadecimal digits that encode a Unicode character");
                Err(self.error(&problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(text: &str) -> Node {
        rules(text).unwrap().bodies.remove(0)
    }

    #[test]
    fn parses_all_parts_of_rules() {
        let literal = |text: &str| Node::Literal(text.to_owned());
        assert_eq!(body("root ::= \"a\\n\\x41\\\"\" # a comment\n"), literal("a\nA\""));
        assert_eq!(body("root ::= [^\\]a-z-]"), Node::Class("[^\\x{5d}\\x{61}-\\x{7a}\\x{2d}]".to_owned()));
        assert_eq!(
            body("root ::= (\"a\" |\n \"b\")* \"c\"{2,3}"),
            Node::Sequence(vec![
                Node::Repeat(Box::new(Node::Choice(vec![literal("a"), literal("b")])), 0, None),
                Node::Repeat(Box::new(literal("c")), 2, Some(3)),
            ])
        );
        assert_eq!(body("root ::= | \"a\""), Node::Choice(vec![Node::Sequence(vec![]), literal("a")]));
        let two = rules("root ::= other\nother ::= root \"x\"\n").unwrap();
        assert_eq!(two.bodies[0], Node::Rule(1));
        assert_eq!(two.bodies[1], Node::Sequence(vec![Node::Rule(0), literal("x")]));
    }

    #[test]
    fn errors_name_the_problem_and_the_line() {
        for (text, problem) in [
            ("root ::= \"a", "line 1: the literal is not closed"),
            ("root ::= \"a\nother ::= \"b\"", "line 1: the literal is not closed"),
            ("root ::= a", "the grammar has no rule named a"),
            ("root ::= \"a\"\n\nroot ::= \"b\"", "line 3: the grammar has two rules named root"),
            ("\nroot = \"a\"", "line 2: expected ::=, found '='"),
            ("root ::= (\"a\"", "line 1: expected a closing parenthesis, found the end of the grammar"),
            ("root ::= [z-a]", "line 1: the range from 'z' to 'a' is reversed"),
            ("root ::= []", "line 1: the character class is empty"),
            (
                "root ::= \"a\"{3,2}",
                "line 1: expected {n}, {min,}, {,max} or {min,max} with min <= max <= 65536",
            ),
            ("root ::= \"\\q\"", "line 1: \\q is not a valid escape"),
            ("root ::= \"\\x4\"", "line 1: expected 2 hexadecimal digits that encode a Unicode character"),
            ("root ::= \"\\x+4\"", "line 1: expected 2 hexadecimal digits that encode a Unicode character"),
            ("root ::= *", "line 1: expected a name, a literal, a character class or a group, found '*'"),
            ("root ::= \"a\")", "line 1: expected the name of a rule, found ')'"),
            ("root ::= (= \"a\")", "line 1: lookahead is not supported"),
        ] {
            assert_eq!(rules(text).unwrap_err(), problem, "{text}");
        }
        let deep = format!("root ::= {}", "(".repeat(1000));
        let problem = "line 1: the rule is nested deeper than 100 levels";
        assert_eq!(rules(&deep).unwrap_err(), problem);
        assert!(rules(&format!("root ::= \"a\"{}", "*?+{2}".repeat(2))).is_ok());
        let many = format!("root ::= \"a\"{}", "*".repeat(200_000));
        let problem = "line 1: more than 10 consecutive repetition operators";
        assert_eq!(rules(&many).unwrap_err(), problem);
    }
}
