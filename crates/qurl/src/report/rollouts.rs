//! Sampled responses, from `rollouts/step-N.jsonl`: some of the steps, as much text as a page can hold.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::io::ErrorKind;
use std::path::Path;

/// Most steps in the page; the first and the last are among them.
const STEPS: usize = 8;
/// Most samples of a step.
const SAMPLES: usize = 16;
/// Most tokens of a sample, and of all samples of a step.
const TOKENS: usize = 1500;
const STEP_TOKENS: usize = 8000;

/// The samples of one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRollouts {
    /// Number of the step.
    pub step: u64,
    /// Some of its responses.
    pub samples: Vec<Sample>,
}

/// One response. Fields that a file does not have are left empty.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    problem: String,
    prompt: String,
    finish: String,
    /// The right answer, and the one that was found in the response.
    answer: Option<String>,
    extracted: Option<String>,
    /// Whether it is right; rewards are another matter.
    correct: Option<bool>,
    reward: Option<f64>,
    reward_parts: Map<String, Value>,
    /// Mean over the tokens.
    advantage: Option<f64>,
    /// One a token, where they differ.
    advantages: Vec<Option<f64>>,
    /// Text of the first tokens.
    tokens: Vec<String>,
    rho: Vec<Option<f64>>,
    behav: Vec<Option<f64>>,
    prox: Vec<Option<f64>>,
    /// Tokens of the whole response.
    length: usize,
}

/// The files of the folder as (step, bytes), in the order of the steps; none where the folder is not there.
pub fn list(dir: &Path) -> std::io::Result<Vec<(u64, u64)>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let step =
            name.to_str().and_then(|n| n.strip_prefix("step-")?.strip_suffix(".jsonl")?.parse::<u64>().ok());
        if let (Some(step), Ok(facts)) = (step, entry.metadata()) {
            files.push((step, facts.len()));
        }
    }
    files.sort_unstable();
    Ok(files)
}

/// Steps to show: evenly spread, the first and the last among them.
pub fn choose(files: &[(u64, u64)]) -> Vec<u64> {
    let count = files.len().min(STEPS);
    (0..count).map(|i| files[if count < 2 { 0 } else { i * (files.len() - 1) / (count - 1) }].0).collect()
}

/// Reads the samples of a step; lines that are not whole are passed over.
pub fn read(dir: &Path, step: u64) -> std::io::Result<StepRollouts> {
    let named = [format!("step-{step:06}.jsonl"), format!("step-{step}.jsonl")];
    let path = named.iter().map(|name| dir.join(name)).find(|path| path.exists());
    let path = path.ok_or_else(|| std::io::Error::from(ErrorKind::NotFound))?;
    let text = String::from_utf8_lossy(&qurl_files::read(&path, 1024 * qurl_files::MIB)?).into_owned();
    let mut left = STEP_TOKENS;
    let mut samples = Vec::new();
    for mut sample in text.lines().filter_map(|line| serde_json::from_str::<Sample>(line).ok()).take(SAMPLES)
    {
        sample.shorten(TOKENS.min(left));
        left -= sample.tokens.len();
        samples.push(sample);
    }
    Ok(StepRollouts { step, samples })
}

impl Sample {
    /// Keeps the first `most` tokens and four digits of their figures; arrays that are too short are filled
    /// up.
    fn shorten(&mut self, most: usize) {
        self.length = self.tokens.len();
        let kept = self.length.min(most);
        self.tokens.truncate(kept);
        if !self.advantages.is_empty() {
            self.advantages.resize(kept, None);
        }
        for figures in [&mut self.rho, &mut self.behav, &mut self.prox] {
            figures.resize(kept, None);
        }
        for figures in [&mut self.rho, &mut self.behav, &mut self.prox, &mut self.advantages] {
            for figure in figures.iter_mut() {
                *figure = figure.filter(|f| f.is_finite()).and_then(|f| format!("{f:.3e}").parse().ok());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_spread_from_first_to_last() {
        let files: Vec<(u64, u64)> = (1..=100).map(|i| (i * 10, 1)).collect();
        let steps = choose(&files);
        assert_eq!((steps.len(), steps[0], steps[7]), (STEPS, 10, 1000));
        assert_eq!(choose(&files[..3]), [10, 20, 30]);
        assert_eq!(choose(&files[..1]), [10]);
        assert!(choose(&[]).is_empty());
    }

    #[test]
    fn long_responses_are_cut_and_short_arrays_filled() {
        let tokens = vec!["a".to_string(); 5];
        let mut sample = Sample { tokens, rho: vec![Some(1.00004321), None], ..Sample::default() };
        sample.shorten(3);
        assert_eq!((sample.length, sample.tokens.len()), (5, 3));
        assert_eq!(sample.rho, [Some(1.0), None, None]);
        assert_eq!(sample.prox.len(), 3);
    }
}
