//! Looks ahead to determine whether a quote ends its string, and where a list element that is not a call ends. Models
//! forget to escape quotes within strings (`code='sed -n '1,5p' x'`), so a quote ends a string only if the text after
//! it can continue the call.

use crate::literal::is_space;
use crate::python::ClosingContext;
use crate::tool::json_arguments::is_of_name;

/// The text between a quote and the character that shows whether the quote ends the string. This text contains no
/// quotes, so no other lookahead reads it again.
#[derive(Debug)]
pub(super) struct Lookahead {
    pub(super) quote: char,
    pub(super) held: String,
    state: LookaheadState,
    /// The number of closing parentheses that the call still needs: initially two if the call is the argument of
    /// `print`, otherwise one.
    parentheses: u8,
    is_list: bool,
}

#[derive(Clone, Copy, Debug)]
enum LookaheadState {
    /// The lookahead has read nothing but whitespace.
    Quote(ClosingContext),
    /// The lookahead has read a comma between arguments.
    Comma,
    Key,
    AfterKey,
    /// The lookahead has read a comma within brackets.
    ItemComma,
    /// The lookahead has read a parenthesis that closes the call.
    Call,
    /// The lookahead has read a comma between calls.
    CallComma,
    Name,
}

/// Whether a quote ends its string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QuoteRole {
    /// More characters are needed to decide.
    Undecided,
    /// The quote ends the string.
    Closes,
    /// The quote is part of the string.
    IsText,
}

impl Lookahead {
    pub(super) fn new(quote: char, closing: ClosingContext, parentheses: u8, is_list: bool) -> Self {
        Self { quote, held: String::new(), state: LookaheadState::Quote(closing), parentheses, is_list }
    }

    /// Reads the next character after the quote.
    pub(super) fn step(&mut self, letter: char) -> QuoteRole {
        let role = self.role(letter);
        if role == QuoteRole::Undecided {
            self.held.push(letter);
        }
        role
    }

    fn role(&mut self, letter: char) -> QuoteRole {
        self.state = match (self.state, letter) {
            (LookaheadState::Key, ' ' | '\t' | '\n' | '\r') => LookaheadState::AfterKey,
            (state, letter) if is_space(letter) && !matches!(state, LookaheadState::Name) => state,
            (LookaheadState::Quote(ClosingContext::Argument), ',') => LookaheadState::Comma,
            (
                LookaheadState::Quote(ClosingContext::Argument)
                | LookaheadState::Comma
                | LookaheadState::Call,
                ')',
            ) if self.parentheses > 0 => {
                self.parentheses -= 1;
                LookaheadState::Call
            }
            (LookaheadState::Quote(ClosingContext::Key), ':')
            | (LookaheadState::Key | LookaheadState::AfterKey, '=') => return QuoteRole::Closes,
            (LookaheadState::Quote(ClosingContext::Item(close)), letter) if letter == close => {
                return QuoteRole::Closes;
            }
            (LookaheadState::Quote(ClosingContext::Item(_)), ',') => LookaheadState::ItemComma,
            (LookaheadState::ItemComma, letter)
                if letter.is_alphanumeric() || "'\"-+._[]{}()".contains(letter) =>
            {
                return QuoteRole::Closes;
            }
            (LookaheadState::Comma, letter) if begins_key(letter) => LookaheadState::Key,
            (LookaheadState::Key, letter) if continues_key(letter) => LookaheadState::Key,
            (LookaheadState::Call, ',') if self.is_list && self.parentheses == 0 => LookaheadState::CallComma,
            // A marker or a code fence ends the calls, even if the closing bracket of a list is missing.
            (LookaheadState::Call, '<' | '`') => return QuoteRole::Closes,
            (LookaheadState::Call | LookaheadState::CallComma, ']') if self.is_list => {
                return QuoteRole::Closes;
            }
            (LookaheadState::Call, letter) if !self.is_list && begins_next_call(letter) => {
                return QuoteRole::Closes;
            }
            (LookaheadState::CallComma | LookaheadState::Name, letter) if is_of_name(letter) => {
                LookaheadState::Name
            }
            (LookaheadState::Name, '(') => return QuoteRole::Closes,
            _ => return QuoteRole::IsText,
        };
        QuoteRole::Undecided
    }
}

/// A list element that is not a call. The parser skips it by matching its brackets.
#[derive(Debug, Default)]
pub(super) struct SkippedMember {
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
}

/// The effect of a character on a skipped element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Member {
    More,
    /// The character is the comma after the element.
    Over,
    /// The character ends the list, is an unmatched closing bracket, or may begin a marker.
    Last,
}

impl SkippedMember {
    pub(super) fn step(&mut self, letter: char) -> Member {
        if std::mem::take(&mut self.is_escaped) {
            return Member::More;
        }
        match (self.quote, letter) {
            // A marker, which takes precedence over a skipped element, may begin here.
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

/// Whether a call that only whitespace separates from the previous one may begin with `letter`. The other characters
/// that names may contain are excluded: after `)`, they continue an expression or a sentence.
pub(super) fn begins_next_call(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// Whether the name of an argument may begin with `letter`.
pub(super) fn begins_key(letter: char) -> bool {
    letter.is_alphanumeric() || matches!(letter, '_' | '$' | '@')
}

/// Whether the name of an argument may contain `letter`. Structured outputs allow only names that consist of such
/// characters.
pub(super) fn continues_key(letter: char) -> bool {
    begins_key(letter) || is_of_name(letter)
}
