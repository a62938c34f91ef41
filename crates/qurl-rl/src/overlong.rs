//! Overlong shaping: answers that come close to the length limit lose reward little by little, so that the
//! limit is not a cliff whose reward depends on where the text was cut.

use crate::error::{RlError, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The stretch before the length limit in which the penalty grows (`overlong_buffer`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlongBuffer {
    /// Tokens before `data.max_response_length` over which the penalty grows.
    pub len: usize,
    /// What the reward has lost at the limit.
    #[serde(default = "default_penalty")]
    pub penalty_factor: f64,
}

fn default_penalty() -> f64 {
    1.0
}

impl OverlongBuffer {
    /// Checks the settings against the longest response allowed.
    pub fn check(&self, max_response_length: usize) -> Result<(), RlError> {
        setting(
            self.len > 0 && self.len <= max_response_length,
            "overlong_buffer.len",
            self.len as f64,
            "a number from 1 to `max_response_length`",
        )?;
        setting(
            self.penalty_factor.is_finite() && self.penalty_factor >= 0.0,
            "overlong_buffer.penalty_factor",
            self.penalty_factor,
            "a finite number not below 0",
        )
    }

    /// What is added to the reward of a response: 0 up to the stretch, then falling linearly to
    /// −`penalty_factor` at `max_response_length`.
    pub fn penalty(&self, response_length: usize, max_response_length: usize) -> f64 {
        let free = max_response_length as f64 - self.len as f64;
        let exceeded = response_length as f64 - free;
        (-exceeded / self.len.max(1) as f64 * self.penalty_factor).min(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_linearly_to_the_limit() {
        let buffer = OverlongBuffer { len: 4, penalty_factor: 2.0 };
        let at = |length| buffer.penalty(length, 20);
        assert_eq!([at(0), at(15), at(16)], [0.0; 3]);
        assert_eq!([at(17), at(18), at(20)], [-0.5, -1.0, -2.0]);
    }

    #[test]
    fn settings_are_checked() {
        let parsed: OverlongBuffer = serde_json::from_str(r#"{"len":4096}"#).unwrap();
        assert_eq!(parsed, OverlongBuffer { len: 4096, penalty_factor: 1.0 });
        assert!(parsed.check(20480).is_ok());
        assert!(parsed.check(4095).is_err());
        assert!(OverlongBuffer { len: 0, penalty_factor: 1.0 }.check(10).is_err());
        assert!(OverlongBuffer { len: 1, penalty_factor: f64::NAN }.check(10).is_err());
    }
}
