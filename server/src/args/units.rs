//! How sizes, times and parts of a whole are written.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// The units of a size, largest first.
const UNITS: [(&str, u64); 8] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
];

impl ByteSize {
    /// As many bytes as this machine can address.
    pub(crate) fn to_usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no size: write bytes, or e.g. 512MiB, 2GiB, 1.5GiB");
        let text = text.trim();
        let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
        // `Gi` as Kubernetes writes it, `B` for bytes.
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
                .ok_or_else(wrong)?,
        };
        let digits = digits.trim_end();
        if let Ok(number) = digits.parse::<u64>() {
            return number.checked_mul(bytes).map(Self).ok_or_else(wrong);
        }
        let number: f64 = digits.parse().map_err(|_| wrong())?;
        let product = number * bytes as f64;
        // Beyond 2^53 the product is not exact, which a fraction need not be.
        if product >= 0.0 && product < u64::MAX as f64 { Ok(Self(product as u64)) } else { Err(wrong()) }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[..4].iter().find(|(_, bytes)| self.0 >= *bytes && self.0.is_multiple_of(*bytes));
        match unit {
            Some((name, bytes)) => write!(formatter, "{}{name}", self.0 / bytes),
            None => write!(formatter, "{}", self.0),
        }
    }
}

/// A part of a whole, neither nothing nor all.
pub(crate) fn share(text: &str) -> Result<f32, String> {
    let share = text.parse().ok().filter(|share: &f32| *share > 0.0 && *share < 1.0);
    share.ok_or_else(|| format!("{text:?} is not between 0 and 1, such as 0.95"))
}

/// `30s`, `20ms`, `250us`, `2m`; seconds without a unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time: write e.g. 30s, 500ms, 250us, 2m");
    let digits = text.trim_end_matches(|letter: char| letter.is_alphabetic());
    let seconds = match &text[digits.len()..] {
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())
}
