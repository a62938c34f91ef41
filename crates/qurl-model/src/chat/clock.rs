//! `strftime_now` for templates that tell the model today's date. Times are UTC.

use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const SUPPORTED: &str = "%Y %y %m %d %H %M %S %B %b %A %a %%";

/// Where the time comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Clock {
    System,
    /// Seconds since 1970.
    Fixed(u64),
}

impl Clock {
    /// The time in C's `strftime` notation.
    pub fn format(self, format: &str) -> Result<String, String> {
        let seconds = match self {
            Clock::Fixed(seconds) => seconds,
            Clock::System => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        };
        let days = seconds / 86_400;
        let (year, month, day) = date(days);
        let month_name = MONTHS[(month - 1) as usize];
        let day_name = DAYS[(days % 7) as usize];
        let mut text = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            match characters.next() {
                Some('Y') => text.push_str(&year.to_string()),
                Some('y') => text.push_str(&format!("{:02}", year % 100)),
                Some('m') => text.push_str(&format!("{month:02}")),
                Some('d') => text.push_str(&format!("{day:02}")),
                Some('H') => text.push_str(&format!("{:02}", seconds / 3600 % 24)),
                Some('M') => text.push_str(&format!("{:02}", seconds / 60 % 60)),
                Some('S') => text.push_str(&format!("{:02}", seconds % 60)),
                Some('B') => text.push_str(month_name),
                Some('b') => text.push_str(&month_name[..3]),
                Some('A') => text.push_str(day_name),
                Some('a') => text.push_str(&day_name[..3]),
                Some('%') => text.push('%'),
                other => {
                    let other = other.map_or(String::new(), String::from);
                    return Err(format!("strftime_now does not know %{other}, supported: {SUPPORTED}"));
                }
            }
        }
        Ok(text)
    }
}

/// Year, month and day of a day counted from 1970-01-01: whole 400-year periods of the Gregorian
/// calendar from 1600-01-01, then year by year.
fn date(days: u64) -> (u64, u64, u64) {
    const DAYS_1600_TO_1970: u64 = 135_140;
    let mut left = days + DAYS_1600_TO_1970;
    let mut year = 1600 + 400 * (left / 146_097);
    left %= 146_097;
    loop {
        let leap = year.is_multiple_of(if year.is_multiple_of(100) { 400 } else { 4 });
        let length = if leap { 366 } else { 365 };
        if left >= length {
            left -= length;
            year += 1;
            continue;
        }
        let february = if leap { 29 } else { 28 };
        let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        for (month, length) in (1..).zip(lengths) {
            if left < length {
                return (year, month, left + 1);
            }
            left -= length;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        let text = |seconds, format: &str| Clock::Fixed(seconds).format(format).unwrap();
        assert_eq!(text(0, "%A %d %B %Y %H:%M:%S"), "Thursday 01 January 1970 00:00:00");
        assert_eq!(text(951_782_399, "%d %b %Y %H:%M:%S"), "28 Feb 2000 23:59:59");
        assert_eq!(text(951_782_400, "%a %d %b %y"), "Tue 29 Feb 00");
        assert_eq!(text(1_732_579_200, "%Y-%m-%d 100%%"), "2024-11-26 100%");
        assert_eq!(text(4_107_542_400, "%d %b %Y"), "01 Mar 2100");
        assert!(Clock::Fixed(0).format("%Q").unwrap_err().contains("%Q"));
        assert!(Clock::System.format("%Y").unwrap().parse::<u64>().unwrap() > 2000);
    }
}
