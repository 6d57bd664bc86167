//! `strftime` in UTC, with the directives that chat templates use.

use std::{
    fmt::Write as _,
    time::{SystemTime, UNIX_EPOCH},
};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A point in time as calendar fields.
struct Date {
    year: i64,
    month: usize,
    day: i64,
    day_of_year: i64,
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

impl Date {
    fn of(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => after.as_secs() as i64,
            Err(before) => -(before.duration().as_secs() as i64),
        };
        let days = seconds.div_euclid(86_400);
        let of_day = seconds.rem_euclid(86_400);
        // Count days from 1 March of year 0, in eras of 400 years, so that leap days come last.
        let shifted = days + 719_468;
        let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = (month_from_march + 2) % 12;
        let year = year_of_era + era * 400 + i64::from(month < 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before_month = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize];
        Self {
            year,
            month: month as usize,
            day,
            day_of_year: before_month + day + i64::from(leap && month > 1),
            weekday: (days + 4).rem_euclid(7) as usize,
            hour: of_day / 3_600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
        }
    }
}

/// Formats `time` in UTC. The error describes an invalid format.
pub(super) fn utc(time: SystemTime, format: &str) -> Result<String, String> {
    let date = Date::of(time);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(c) = characters.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let known = directive.and_then(|directive| write(&date, directive, padded, &mut text));
        known.ok_or_else(|| format!("strftime_now does not support all directives in {format:?}"))?;
    }
    Ok(text)
}

fn write(date: &Date, directive: char, padded: bool, text: &mut String) -> Option<()> {
    let number = |value: i64, width: usize, text: &mut String| {
        let width = if padded { width } else { 1 };
        let _ = write!(text, "{value:0width$}");
    };
    let twelve = (date.hour + 11) % 12 + 1;
    match directive {
        'Y' => number(date.year, 4, text),
        'y' => number(date.year.rem_euclid(100), 2, text),
        'm' => number(date.month as i64 + 1, 2, text),
        'd' => number(date.day, 2, text),
        'e' if padded => drop(write!(text, "{:2}", date.day)),
        'e' => number(date.day, 1, text),
        'j' => number(date.day_of_year, 3, text),
        'H' => number(date.hour, 2, text),
        'I' => number(twelve, 2, text),
        'M' => number(date.minute, 2, text),
        'S' => number(date.second, 2, text),
        'w' => number(date.weekday as i64, 1, text),
        'B' => text.push_str(MONTHS[date.month]),
        'b' | 'h' => text.push_str(&MONTHS[date.month][..3]),
        'A' => text.push_str(DAYS[date.weekday]),
        'a' => text.push_str(&DAYS[date.weekday][..3]),
        'p' => text.push_str(if date.hour < 12 { "AM" } else { "PM" }),
        'Z' => text.push_str("UTC"),
        'z' => text.push_str("+0000"),
        'F' => "Y-m-d".chars().for_each(|c| part(date, c, text)),
        'D' => "m/d/y".chars().for_each(|c| part(date, c, text)),
        'T' | 'X' => "H:M:S".chars().for_each(|c| part(date, c, text)),
        'R' => "H:M".chars().for_each(|c| part(date, c, text)),
        '%' => text.push('%'),
        _ => return None,
    }
    Some(())
}

/// Writes a letter of a composed directive, or a separator.
fn part(date: &Date, c: char, text: &mut String) {
    if c.is_ascii_alphabetic() {
        let _ = write(date, c, true, text);
    } else {
        text.push(c);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(seconds: u64, format: &str, expected: &str) {
        assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds), format).as_deref(), Ok(expected));
    }

    #[test]
    fn dates_match_the_calendar() {
        check(0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001");
        check(951_782_399, "%F %T %a", "2000-02-28 23:59:59 Mon");
        check(951_782_400, "%d %B %Y", "29 February 2000");
        check(951_868_800, "%e %b %y %j", " 1 Mar 00 061");
        check(1_735_603_200, "%d %b %Y|%-d|%-m|%p %I", "31 Dec 2024|31|12|AM 12");
        check(1_735_689_599, "%j %w", "366 2");
        check(4_107_542_400, "%F %%", "2100-03-01 %");
    }

    #[test]
    fn unknown_directives_are_rejected() {
        assert!(utc(UNIX_EPOCH, "%Q").is_err());
        assert!(utc(UNIX_EPOCH, "50%").is_err());
    }
}
