//! Durations in the notation of the resource.

use std::borrow::Cow;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// A duration: a whole number and a unit, such as `500ms`, `30s`, `10m` or `1h`.
///
/// It is stored as text, so that a resource with an invalid duration, stored under an older schema, can still be
/// deserialized. [`Period::duration`] parses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Period(pub String);

/// The error for a text that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidPeriod(pub String);

impl std::fmt::Display for InvalidPeriod {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "{:?} is not a duration: it must be a whole number and a unit (ms, s, m, h), such as 30s",
            self.0
        )
    }
}

impl Period {
    /// Returns a period of this number of seconds.
    #[must_use]
    pub fn seconds(seconds: u32) -> Self {
        Self(format!("{seconds}s"))
    }

    /// Parses the text of the period.
    ///
    /// # Errors
    /// The text is not a duration.
    pub fn duration(&self) -> Result<Duration, InvalidPeriod> {
        let wrong = || InvalidPeriod(self.0.clone());
        let end = self.0.find(|letter: char| !letter.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = self.0[..end].parse().map_err(|_| wrong())?;
        let milliseconds = match &self.0[end..] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(wrong()),
        };
        number.checked_mul(milliseconds).map(Duration::from_millis).ok_or_else(wrong)
    }
}

impl JsonSchema for Period {
    fn schema_name() -> Cow<'static, str> {
        "Period".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": 16,
            "x-kubernetes-validations": crate::formats::duration(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_with_a_unit_is_a_duration() {
        let length = |text: &str| Period(text.to_owned()).duration();
        assert_eq!(length("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(length("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(length("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(length("1h"), Ok(Duration::from_secs(3600)));
        for wrong in ["", "10", "s", "1.5s", "-1s", "10 s", "10d", "99999999999999999999h"] {
            assert_eq!(length(wrong), Err(InvalidPeriod(wrong.to_owned())));
        }
    }
}
