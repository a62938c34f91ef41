//! A setting of one's own that cannot be used: which key of its section, what it is, and what would do.

/// What is wrong with a setting. Whoever knows the section puts its name before the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("key `{key}` is {found}, expected {expected}")]
pub struct BadSetting {
    /// The key, from the section on.
    pub key: String,
    /// Its value.
    pub found: String,
    /// What would be right.
    pub expected: String,
}

impl BadSetting {
    /// A text that cannot be used.
    pub fn text(key: &str, found: &str, expected: impl Into<String>) -> BadSetting {
        BadSetting { key: key.into(), found: format!("{found:?}"), expected: expected.into() }
    }
}

/// A regular expression, matched in time linear in the text.
pub fn pattern(key: &str, text: &str) -> Result<regex::Regex, BadSetting> {
    regex::Regex::new(text).map_err(|error| {
        // The last line says what is wrong, those before it point at the place.
        let reason = error.to_string();
        let reason = reason.lines().last().unwrap_or_default().trim_start_matches("error: ").to_string();
        BadSetting::text(key, text, format!("a regular expression: {reason}"))
    })
}
