//! Kubernetes quantities, such as `500m` or `8Gi`. The grammar, the rounding and the largest value are those of
//! `resource.Quantity` in apimachinery, so that the operator accepts what the API server accepts. This module is pure.
//!
//! ```text
//! quantity = [ "+" | "-" ] ( digits [ "." [ digits ] ] | "." digits ) suffix
//! suffix   = "" | n | u | m | k | M | G | T | P | E | Ki | Mi | Gi | Ti | Pi | Ei | ( "e" | "E" ) integer
//! ```
//!
//! The CEL functions `isQuantity` and `quantity` also accept a text without digits, such as `Gi`, and interpret it as
//! 0. The grammar of apimachinery does not contain such a quantity.

use std::iter::repeat_n;
use std::str::FromStr;

/// The number of decimal places of a value. A quantity with more decimal places is rounded away from zero.
const DECIMAL_PLACES: i64 = 9;
/// The number of billionths in 1.
const BILLION: i128 = 1_000_000_000;
/// The largest value, 2^63 - 1, in billionths. A larger quantity is reduced to this value.
const BILLIONTHS_MAX: i128 = i64::MAX as i128 * BILLION;

/// The value of a quantity, exact to a billionth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QuantityValue {
    billionths: i128,
}

/// The error for a text that is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a quantity: it must be a number, such as 1.5, optionally followed by one of the suffixes n, u, m, k, \
     M, G, T, P, E, Ki, Mi, Gi, Ti, Pi and Ei, or by an exponent, such as e9"
)]
pub struct InvalidQuantity(pub String);

impl QuantityValue {
    /// The value of the quantity `1`.
    pub const ONE: Self = Self { billionths: BILLION };

    /// Returns the value in whole units, such as bytes, rounded away from zero.
    #[must_use]
    pub fn units(self) -> i128 {
        divide_away_from_zero(self.billionths, BILLION)
    }

    /// Returns the value in thousandths, rounded away from zero. The API server stores the resources of containers and
    /// volumes with this precision.
    #[must_use]
    pub fn thousandths(self) -> i128 {
        divide_away_from_zero(self.billionths, BILLION / 1000)
    }
}

impl FromStr for QuantityValue {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let billionths = billionths(text).ok_or_else(|| InvalidQuantity(text.to_owned()))?;
        Ok(Self { billionths })
    }
}

/// The factor by which the number before a suffix is multiplied.
#[derive(Clone, Copy)]
struct Factor {
    power_of_ten: i64,
    power_of_two: u32,
}

impl Factor {
    /// Returns the factor of a suffix; `None` if the text is not a suffix.
    fn new(suffix: &str) -> Option<Self> {
        let (power_of_ten, power_of_two) = match suffix {
            "n" => (-9, 0),
            "u" => (-6, 0),
            "m" => (-3, 0),
            "" => (0, 0),
            "k" => (3, 0),
            "M" => (6, 0),
            "G" => (9, 0),
            "T" => (12, 0),
            "P" => (15, 0),
            "E" => (18, 0),
            "Ki" => (0, 10),
            "Mi" => (0, 20),
            "Gi" => (0, 30),
            "Ti" => (0, 40),
            "Pi" => (0, 50),
            "Ei" => (0, 60),
            exponent => (exponent.strip_prefix(['e', 'E'])?.parse::<i64>().ok()?, 0),
        };
        Some(Self { power_of_ten, power_of_two })
    }
}

/// Returns the value of a quantity in billionths; `None` if the text is not a quantity.
fn billionths(text: &str) -> Option<i128> {
    let (sign, unsigned) = match text.strip_prefix('-') {
        Some(unsigned) => (-1, unsigned),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let end =
        unsigned.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let factor = Factor::new(suffix)?;
    let mut digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).map(|digit| digit - b'0').collect();
    if digits.iter().all(|digit| *digit == 0) {
        return Some(0);
    }
    for _ in 0..factor.power_of_two {
        double(&mut digits);
    }
    let whole_digits = digits.len() as i64 - fraction.len() as i64;
    let point = whole_digits.saturating_add(factor.power_of_ten).saturating_add(DECIMAL_PLACES);
    Some(sign * rounded_up(&digits, usize::try_from(point.max(0)).unwrap_or(usize::MAX)))
}

/// Doubles a number that consists of these decimal digits, the most significant one first.
fn double(digits: &mut Vec<u8>) {
    let mut carry = 0;
    for digit in digits.iter_mut().rev() {
        let doubled = 2 * *digit + carry;
        (*digit, carry) = (doubled % 10, doubled / 10);
    }
    if carry > 0 {
        digits.insert(0, carry);
    }
}

/// Returns the number that consists of the first `point` digits, padded with zeros if there are fewer digits. If one of
/// the remaining digits is not 0, the number is rounded up. A number above [`BILLIONTHS_MAX`] is reduced to this limit.
fn rounded_up(digits: &[u8], point: usize) -> i128 {
    let (counted, rest) = digits.split_at(point.min(digits.len()));
    let zeros = repeat_n(0, point - counted.len());
    let append = |number: i128, digit: u8| number.checked_mul(10)?.checked_add(digit.into());
    let number = counted.iter().copied().chain(zeros).try_fold(0, append);
    let is_inexact = rest.iter().any(|digit| *digit != 0);
    number.map_or(BILLIONTHS_MAX, |number| BILLIONTHS_MAX.min(number + i128::from(is_inexact)))
}

fn divide_away_from_zero(number: i128, divisor: i128) -> i128 {
    let rounding = if number % divisor == 0 { 0 } else { number.signum() };
    number / divisor + rounding
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> QuantityValue {
        text.parse().unwrap()
    }

    #[test]
    fn quantities_have_the_values_of_apimachinery() {
        // Each value is given as a number and the exponent of a power of ten.
        for (text, number, exponent) in [
            ("0", 0, 0),
            ("0Ki", 0, 0),
            ("0e999999999999", 0, 0),
            ("1", 1, 0),
            ("+1", 1, 0),
            ("0001", 1, 0),
            ("5.", 5, 0),
            ("5.G", 5, 9),
            (".5", 5, -1),
            ("1.50", 15, -1),
            ("5n", 5, -9),
            ("4u", 4, -6),
            ("500m", 5, -1),
            ("1000m", 1, 0),
            ("8k", 8, 3),
            ("7M", 7, 6),
            ("6G", 6, 9),
            ("5T", 5, 12),
            ("2.5P", 25, 14),
            ("1E", 1, 18),
            ("1Ki", 1024, 0),
            ("1.5Ki", 1536, 0),
            ("100.035Ki", 10_243_584, -2),
            ("7Mi", 7 << 20, 0),
            (".5Gi", 1 << 29, 0),
            ("0.05Gi", 536_870_912, -1),
            ("5Ti", 5 << 40, 0),
            ("4Pi", 4 << 50, 0),
            ("3Ei", 3 << 60, 0),
            ("1e3", 1, 3),
            ("1E3", 1, 3),
            ("1.3E+6", 13, 5),
            ("8e9", 8, 9),
            ("2000e-3", 2, 0),
            ("123456789012345678901234567890e-20", 1_234_567_890_123_456_790, -9),
            // Values are rounded away from zero, to billionths.
            ("0.1n", 1, -9),
            ("3.001n", 4, -9),
            ("0.00000012345", 124, -9),
            ("1e-400", 1, -9),
            ("0.000000000001Ki", 2, -9),
            ("1.0000000000000000000000000000000000000000001", 1_000_000_001, -9),
            // Values above the limit are reduced to it.
            ("9223372036854775807", i128::from(i64::MAX), 0),
            ("9Ei", i128::from(i64::MAX), 0),
            ("12E", i128::from(i64::MAX), 0),
            ("99999999999999999999999999999999999999999999", i128::from(i64::MAX), 0),
            ("1e9223372036854775807", i128::from(i64::MAX), 0),
        ] {
            let power = 10_i128.pow(u32::try_from(exponent + DECIMAL_PLACES).unwrap());
            assert_eq!(value(text).billionths, number * power, "{text}");
            if text.starts_with(|letter: char| letter.is_ascii_digit() || letter == '.') {
                assert_eq!(value(&format!("-{text}")).billionths, -number * power, "-{text}");
            }
        }
    }

    #[test]
    fn texts_that_are_not_quantities_are_rejected() {
        let numbers = "|.|+|-|--1|+-1|1+|1-1|1..|1.1.|1.1.M|1,5|1_000| 1|1 |0x10|1٣|one|inf|NaN";
        let suffixes = "Gi|.Gi|1 Gi|1x|1i|1K|.5i|0.1mi|8gi|8GI|8GB";
        let exponents = "e9|1e|1E+|-3.01e-|1e1.5|1e9Gi|1Gie9|1e99999999999999999999";
        for text in [numbers, suffixes, exponents].into_iter().flat_map(|texts| texts.split('|')) {
            assert_eq!(text.parse::<QuantityValue>(), Err(InvalidQuantity(text.to_owned())));
        }
        let message = InvalidQuantity("8GB".to_owned()).to_string();
        assert!(message.starts_with("\"8GB\" is not a quantity: it must be a number"), "{message}");
    }

    #[test]
    fn units_and_thousandths_are_rounded_away_from_zero() {
        for (text, units, thousandths) in [
            ("8Gi", 8 << 30, (8 << 30) * 1000),
            ("1.5", 2, 1500),
            ("-1.5", -2, -1500),
            ("100m", 1, 100),
            ("1n", 1, 1),
            ("-1n", -1, -1),
            ("1000.0001m", 2, 1001),
            ("0", 0, 0),
        ] {
            assert_eq!((value(text).units(), value(text).thousandths()), (units, thousandths), "{text}");
        }
    }
}
