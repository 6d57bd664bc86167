//! Parses sizes, durations and fractions on the command line.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::policy::Policy;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// The units of a size, largest first.
const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid =
            || format!("{text:?} is not a size: use a number of bytes or a unit, e.g. 64KiB, 8MiB, 1GiB");
        let text = text.trim();
        let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        let unit = text[digits.len()..].to_ascii_lowercase();
        let bytes = match unit.as_str() {
            "" | "b" => 1,
            unit => UNITS
                .iter()
                .find(|(name, _)| {
                    let name = name.to_ascii_lowercase();
                    name == unit || name.strip_suffix('b') == Some(unit)
                })
                .map(|(_, bytes)| *bytes)
                .ok_or_else(invalid)?,
        };
        let number: u64 = digits.trim_end().parse().map_err(|_| invalid())?;
        number.checked_mul(bytes).map(Self).ok_or_else(invalid)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().find(|(_, bytes)| self.0 >= *bytes && self.0.is_multiple_of(*bytes));
        match unit {
            Some((name, bytes)) => write!(formatter, "{}{name}", self.0 / bytes),
            None => write!(formatter, "{}", self.0),
        }
    }
}

/// Parses a duration such as `30s`, `20ms` or `2m`. Without a unit it is in seconds.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration: use a number with a unit, e.g. 30s, 500ms, 2m");
    let digits = text.trim_end_matches(|letter: char| letter.is_alphabetic());
    let seconds = match &text[digits.len()..] {
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(invalid()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| invalid())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| invalid())
}

/// Parses a number from 0 to 1.
pub(super) fn fraction(text: &str) -> Result<f32, String> {
    let fraction = text.parse().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.ok_or_else(|| format!("{text:?} is not a number from 0 to 1"))
}

pub(super) fn policy(text: &str) -> Result<Policy, String> {
    text.parse().map_err(|error: crate::policy::UnknownPolicy| error.to_string())
}
