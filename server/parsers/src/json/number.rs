//! The grammar of a JSON number.

/// The state of parsing a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Number {
    /// Returns the state after the first character of a number, or `None` if no number begins with `letter`.
    pub(crate) fn begin(letter: char) -> Option<Self> {
        match letter {
            '-' => Some(Self::Minus),
            '0' => Some(Self::Zero),
            '1'..='9' => Some(Self::Digits),
            _ => None,
        }
    }

    /// Returns the state after one more character, or `None` if the number cannot continue with it.
    pub(crate) fn next(self, letter: char) -> Option<Self> {
        match (self, letter) {
            (Self::Minus, '0') => Some(Self::Zero),
            (Self::Minus, '1'..='9') | (Self::Digits, '0'..='9') => Some(Self::Digits),
            (Self::Zero | Self::Digits, '.') => Some(Self::Point),
            (Self::Point | Self::Fraction, '0'..='9') => Some(Self::Fraction),
            (Self::Zero | Self::Digits | Self::Fraction, 'e' | 'E') => Some(Self::Exponent),
            (Self::Exponent, '+' | '-') => Some(Self::ExponentSign),
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => {
                Some(Self::ExponentDigits)
            }
            _ => None,
        }
    }

    /// Whether the number may end here.
    pub(crate) fn is_whole(self) -> bool {
        matches!(self, Self::Zero | Self::Digits | Self::Fraction | Self::ExponentDigits)
    }

    /// Whether all of `text` is a number.
    pub(crate) fn is(text: &str) -> bool {
        let mut letters = text.chars();
        let begun = letters.next().and_then(Self::begin);
        letters
            .try_fold(begun, |number, letter| Some(number?.next(letter)))
            .flatten()
            .is_some_and(Self::is_whole)
    }
}
