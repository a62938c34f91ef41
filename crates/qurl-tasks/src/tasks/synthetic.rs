//! Generated tasks behind one type: a kind, a level, and the rules they share.
//!
//! Every kind writes its worked solution as short steps that end in `#### answer`, so that a small model can
//! learn them from scratch and a response can be verified without guessing. Each kind has one file with its
//! generator.

use super::{arithmetic, countdown, mod_chain, sorting, word_problems};
use crate::grader::equivalent;
use crate::rng::{Rng, mix, mix_text};
use crate::task::{Problem, Prompt, RewardValues, Split, Task, Verdict, split_of};
use serde_json::Value;

/// Share of generated problems that is held out.
const HELD_OUT: f64 = 0.1;
/// How often a key is tried for a problem of the wanted split.
const MAX_ATTEMPTS: u64 = 10_000;

/// What is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Column addition of two numbers with `level` digits.
    Addition,
    /// Long multiplication.
    Multiplication,
    /// Chains of operations modulo a small number.
    ModChain,
    /// Sorting numbers.
    Sorting,
    /// Grade-school word problems.
    WordProblems,
    /// An expression over given numbers that hits a target.
    Countdown,
}

/// What a generator makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The prompt.
    pub prompt: String,
    /// The right answer.
    pub answer: String,
    /// The worked solution.
    pub solution: String,
    /// What else is needed to verify.
    pub extra: Value,
}

/// A task that does not exist.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// Unknown name.
    #[error("unknown task {name:?}, expected one of {}", Kind::names())]
    UnknownKind {
        /// The name that was given.
        name: String,
    },
    /// Level out of range.
    #[error("level {level} of task {kind:?}: expected 1 to {max}", kind = kind.name())]
    Level {
        /// The task.
        kind: Kind,
        /// The level that was given.
        level: u32,
        /// The highest level.
        max: u32,
    },
}

impl Kind {
    /// All kinds with their names.
    pub const ALL: [(&'static str, Kind); 6] = [
        ("addition", Kind::Addition),
        ("multiplication", Kind::Multiplication),
        ("mod_chain", Kind::ModChain),
        ("sorting", Kind::Sorting),
        ("word_problems", Kind::WordProblems),
        ("countdown", Kind::Countdown),
    ];

    /// All names, separated by commas.
    pub fn names() -> String {
        Kind::ALL.map(|(name, _)| name).join(", ")
    }

    /// The name in recipes.
    pub fn name(self) -> &'static str {
        Kind::ALL.iter().find(|(_, k)| *k == self).map_or("addition", |(name, _)| name)
    }

    /// The hardest level.
    pub fn max_level(self) -> u32 {
        match self {
            Kind::Addition => 12,
            Kind::Multiplication => 6,
            Kind::ModChain => 12,
            Kind::Sorting => 12,
            Kind::WordProblems => 6,
            Kind::Countdown => 4,
        }
    }

    /// Whether worked solutions can be those of a careless teacher.
    pub fn can_slip(self) -> bool {
        matches!(self, Kind::Addition | Kind::WordProblems)
    }

    fn generate(self, level: u32, slips: f64, rng: &mut Rng) -> Generated {
        match self {
            Kind::Addition => arithmetic::addition(level, slips, rng),
            Kind::Multiplication => arithmetic::multiplication(level, rng),
            Kind::ModChain => mod_chain::generate(level, rng),
            Kind::Sorting => sorting::generate(level, rng),
            Kind::WordProblems => word_problems::generate(level, slips, rng),
            Kind::Countdown => countdown::generate(level, rng),
        }
    }
}

impl std::str::FromStr for Kind {
    type Err = TaskError;

    fn from_str(name: &str) -> Result<Kind, TaskError> {
        let found = Kind::ALL.iter().find(|(n, _)| *n == name);
        found.map(|(_, k)| *k).ok_or_else(|| TaskError::UnknownKind { name: name.into() })
    }
}

/// A generated task at one level.
#[derive(Clone, Debug)]
pub struct Synthetic {
    kind: Kind,
    level: u32,
    format_weight: f64,
    teacher_slips: f64,
    reward: RewardValues,
}

impl Synthetic {
    /// A task of a kind at a level from 1 up.
    pub fn new(kind: Kind, level: u32) -> Result<Synthetic, TaskError> {
        let max = kind.max_level();
        if !(1..=max).contains(&level) {
            return Err(TaskError::Level { kind, level, max });
        }
        Ok(Synthetic { kind, level, format_weight: 0.0, teacher_slips: 0.0, reward: RewardValues::default() })
    }

    /// Gives this share of the way from wrong to right to responses that are well formed but wrong.
    pub fn with_format_weight(mut self, weight: f64) -> Synthetic {
        self.format_weight = weight.clamp(0.0, 1.0);
        self
    }

    /// Rewards right and wrong responses with these values instead of 1 and 0.
    pub fn with_reward(mut self, values: RewardValues) -> Synthetic {
        self.reward = values;
        self
    }

    /// Lets worked solutions forget a due carry with this probability; for kinds that [can
    /// slip](Kind::can_slip).
    pub fn with_teacher_slips(mut self, probability: f64) -> Synthetic {
        self.teacher_slips = if self.kind.can_slip() { probability.clamp(0.0, 1.0) } else { 0.0 };
        self
    }

    /// The kind of this task.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The level of this task.
    pub fn level(&self) -> u32 {
        self.level
    }

    fn generated(&self, split: Split, seed: u64, index: u64) -> Option<Generated> {
        let task = mix_text(self.kind.name());
        (0..MAX_ATTEMPTS).find_map(|attempt| {
            let mut rng = Rng::new(&[task, u64::from(self.level), seed, index, attempt]);
            let made = self.kind.generate(self.level, self.teacher_slips, &mut rng);
            (split_of(&made.prompt, HELD_OUT) == split).then_some(made)
        })
    }
}

impl Task for Synthetic {
    fn name(&self) -> &str {
        self.kind.name()
    }

    fn draw(&self, split: Split, seed: u64, index: u64) -> Option<Problem> {
        let made = self.generated(split, seed, index)?;
        let mut extra = made.extra;
        if let Value::Object(fields) = &mut extra {
            fields.insert("solution".into(), made.solution.into());
        }
        Some(Problem {
            id: format!("{}-{}-{seed}-{index}", self.kind.name(), self.level),
            prompt: Prompt::Text(made.prompt),
            answer: made.answer,
            extra,
        })
    }

    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        let verdict = match (self.kind, marked_answer(response)) {
            (Kind::Countdown, _) => countdown::verify(problem, response, self.format_weight),
            (_, None) => Verdict::new(false, false, self.format_weight, None),
            (kind, Some(answer)) => {
                let correct = match kind {
                    Kind::Sorting => sorting::same_order(&problem.answer, answer),
                    _ => equivalent(&problem.answer, answer),
                };
                Verdict::new(correct, true, self.format_weight, Some(answer.into()))
            }
        };
        verdict.valued(self.reward)
    }

    fn len(&self, _split: Split) -> Option<u64> {
        None
    }

    fn fingerprint(&self) -> u64 {
        mix(&[mix_text(self.kind.name()), u64::from(self.level)])
    }

    fn worked_solution(&self, problem: &Problem) -> Option<String> {
        problem.extra["solution"].as_str().map(str::to_string)
    }

    fn alphabet(&self) -> Option<&'static str> {
        Some(match self.kind {
            Kind::Addition | Kind::Multiplication => arithmetic::ALPHABET,
            Kind::ModChain => mod_chain::ALPHABET,
            Kind::Sorting => sorting::ALPHABET,
            Kind::WordProblems => word_problems::ALPHABET,
            Kind::Countdown => countdown::ALPHABET,
        })
    }
}

/// The rest of the first line marked with `####`: what comes after the answer does not change it.
pub(super) fn marked_answer(response: &str) -> Option<&str> {
    let (_, rest) = response.split_once("####")?;
    let line = rest.lines().next().unwrap_or("").trim();
    (!line.is_empty()).then_some(line)
}
