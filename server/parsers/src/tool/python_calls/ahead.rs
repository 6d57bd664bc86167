//! What follows: whether a quote ends its string, and where a call that is none ends. Models forget to escape quotes
//! within strings (`code='sed -n '1,5p' x'`), so a quote ends a string only if what follows it goes on as a call does.

use super::{begins_name, continues_name};
use crate::literal::is_space;
use crate::python::Closing;

/// What follows a quote, up to the character that decides. It holds no quotes, so that no character is held twice.
#[derive(Debug)]
pub(super) struct Ahead {
    pub(super) quote: char,
    pub(super) held: String,
    place: Place,
    /// Parentheses that close the call: two if it is printed.
    parentheses: u8,
    is_list: bool,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// After the quote.
    Quote(Closing),
    /// After a comma between arguments.
    Comma,
    Key,
    AfterKey,
    /// After a comma within brackets.
    ItemComma,
    /// After the call.
    Call,
    /// After a comma between calls.
    CallComma,
    Name,
}

/// What a character says of the quote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// Nothing yet.
    More,
    /// It ends the string.
    Closes,
    /// It is text.
    IsText,
}

impl Ahead {
    pub(super) fn new(quote: char, closing: Closing, parentheses: u8, is_list: bool) -> Self {
        Self { quote, held: String::new(), place: Place::Quote(closing), parentheses, is_list }
    }

    /// Takes the next character after the quote.
    pub(super) fn step(&mut self, letter: char) -> Sight {
        let sight = self.sight(letter);
        if sight == Sight::More {
            self.held.push(letter);
        }
        sight
    }

    fn sight(&mut self, letter: char) -> Sight {
        self.place = match (self.place, letter) {
            (Place::Key, ' ' | '\t' | '\n' | '\r') => Place::AfterKey,
            (place, letter) if is_space(letter) && !matches!(place, Place::Name) => place,
            (Place::Quote(Closing::Argument), ',') => Place::Comma,
            (Place::Quote(Closing::Argument) | Place::Comma | Place::Call, ')') if self.parentheses > 0 => {
                self.parentheses -= 1;
                Place::Call
            }
            (Place::Quote(Closing::Key), ':') | (Place::Key | Place::AfterKey, '=') => return Sight::Closes,
            (Place::Quote(Closing::Item(close)), letter) if letter == close => return Sight::Closes,
            (Place::Quote(Closing::Item(_)), ',') => Place::ItemComma,
            (Place::ItemComma, letter) if letter.is_alphanumeric() || "'\"-+._[]{}()".contains(letter) => {
                return Sight::Closes;
            }
            (Place::Comma, letter) if begins_name(letter) => Place::Key,
            (Place::Key, letter) if continues_name(letter) => Place::Key,
            (Place::Call, ',') if self.is_list && self.parentheses == 0 => Place::CallComma,
            // A marker or a fence that follows makes good for a bracket that is missing.
            (Place::Call, '<' | '`') => return Sight::Closes,
            (Place::Call | Place::CallComma, ']') if self.is_list => return Sight::Closes,
            (Place::Call, letter) if !self.is_list && begins_name(letter) => return Sight::Closes,
            (Place::CallComma, letter) if begins_name(letter) => Place::Name,
            (Place::Name, letter) if continues_name(letter) => Place::Name,
            (Place::Name, '(') => return Sight::Closes,
            _ => return Sight::IsText,
        };
        Sight::More
    }
}

/// A member of a list that is no call, by its brackets.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
}

/// What a character makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Member {
    More,
    /// It is the comma after the member.
    Over,
    /// It ends the list, or there is no telling where the member ends.
    Last,
}

impl Skipped {
    pub(super) fn step(&mut self, letter: char) -> Member {
        if std::mem::take(&mut self.is_escaped) {
            return Member::More;
        }
        match (self.quote, letter) {
            // A marker may begin here, which counts for more than a member that is no call.
            (_, '<') => return Member::Last,
            (Some(_), '\\') => self.is_escaped = true,
            (Some(quote), letter) if letter == quote => self.quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => self.quote = Some(letter),
            (None, '(' | '[' | '{') => self.depth += 1,
            (None, ')' | ']' | '}') if self.depth == 0 => return Member::Last,
            (None, ')' | ']' | '}') => self.depth -= 1,
            (None, ',') if self.depth == 0 => return Member::Over,
            (None, _) => {}
        }
        Member::More
    }
}
