//! Rewards for the form of a text: elements in tags, and its length.

use crate::grader::rule::element;
use crate::setting::BadSetting;

/// A response that is some elements one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tags {
    /// Opening and closing tags.
    elements: Vec<[String; 2]>,
    /// Whether the prompt has the first opening tag.
    opened: bool,
}

impl Tags {
    /// Elements by their names.
    pub fn new(names: &[String], opened: bool) -> Result<Tags, BadSetting> {
        let numbered = names.iter().enumerate();
        let elements = numbered.map(|(i, name)| element(&format!("tags[{i}]"), name));
        let elements: Vec<[String; 2]> = elements.collect::<Result<_, _>>()?;
        if elements.is_empty() {
            let (key, found) = ("tags".to_string(), "empty".to_string());
            return Err(BadSetting { key, found, expected: "at least one name".into() });
        }
        Ok(Tags { elements, opened })
    }

    /// Whether a response is these elements, each once and with something in it, and nothing else but space.
    pub fn hold(&self, response: &str) -> bool {
        let mut rest = response.trim();
        for (i, [open, close]) in self.elements.iter().enumerate() {
            if !(i == 0 && self.opened) {
                let Some(inside) = rest.strip_prefix(open.as_str()) else { return false };
                rest = inside;
            }
            let Some((content, after)) = rest.split_once(close.as_str()) else { return false };
            let nested = self.elements.iter().flatten().any(|tag| content.contains(tag.as_str()));
            if nested || content.trim().is_empty() {
                return false;
            }
            rest = after.trim_start();
        }
        rest.is_empty()
    }
}

/// From 1 at one length to 0 at another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Length {
    full_at: f64,
    zero_at: f64,
}

impl Length {
    /// Two different lengths in tokens.
    pub fn new(full_at: u64, zero_at: u64) -> Result<Length, BadSetting> {
        let (key, found) = ("zero_at".to_string(), zero_at.to_string());
        let expected = format!("another number than `full_at` = {full_at}");
        match full_at == zero_at {
            true => Err(BadSetting { key, found, expected }),
            false => Ok(Length { full_at: full_at as f64, zero_at: zero_at as f64 }),
        }
    }

    /// The value of a length.
    pub fn value(&self, tokens: usize) -> f64 {
        ((tokens as f64 - self.zero_at) / (self.full_at - self.zero_at)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_in_order_and_nothing_else() {
        let names = ["think", "answer"].map(String::from);
        let tags = Tags::new(&names, false).expect("names");
        assert!(tags.hold("<think>so</think>\n<answer> 4 </answer>\n"));
        for wrong in [
            "",
            "4",
            "so</think><answer>4</answer>",
            "<think>so</think>4",
            "<think>so</think><answer></answer>",
            "<think> </think><answer>4</answer>",
            "<think>so</think><answer>4</answer> and more",
            "well <think>so</think><answer>4</answer>",
            "<answer>4</answer><think>so</think>",
            "<think>a<think>b</think><answer>4</answer>",
            "<think>a</think><think>b</think><answer>4</answer>",
            "<think>a</think><answer>3</answer><answer>4</answer>",
        ] {
            assert!(!tags.hold(wrong), "{wrong}");
        }
        let opened = Tags::new(&names, true).expect("names");
        assert!(opened.hold("so</think><answer>4</answer>"));
        assert!(!opened.hold("<think>so</think><answer>4</answer>"), "the prompt has it already");
        let wrong = Tags::new(&["<think>".to_string()], false).expect_err("no name");
        assert_eq!(wrong.key, "tags[0]");
        assert_eq!(Tags::new(&[], false).expect_err("no names").found, "empty");
    }

    #[test]
    fn lengths_fall_and_rise() {
        let of = |full, zero, tokens| Length::new(full, zero).expect("two lengths").value(tokens);
        let short: Vec<f64> = [0, 100, 150, 200, 300].map(|tokens| of(100, 200, tokens)).to_vec();
        assert_eq!(short, [1.0, 1.0, 0.5, 0.0, 0.0]);
        let long: Vec<f64> = [0, 10, 15, 20, 30].map(|tokens| of(20, 10, tokens)).to_vec();
        assert_eq!(long, [0.0, 0.0, 0.5, 1.0, 1.0]);
        assert!(Length::new(5, 5).is_err());
    }
}
