//! Named conventions: what counts as an answer and when it is right. Projects disagree here, so each
//! convention has a name that recipes and the command line use.

use num_integer::Integer;
use num_traits::One;

use super::compare::{Comparison, Options, PercentRule, compare, whole_number};
use super::extract::{self, Found};
use super::lexer::{Reading, Tok, lex};
use super::{normalize, text};

/// Only the end of a very long response is searched.
pub(super) const SEARCHED_BYTES: usize = 128 * 1024;
/// Characters at the end of a response that DAPO's and verl's scorers look at.
const TAIL_CHARS: usize = 300;

/// A grading convention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Mathematical equality of whatever answer the response gives.
    #[default]
    Equivalence,
    /// Only a `\boxed{}` counts.
    StrictBox,
    /// Only an `Answer: x` line counts (DAPO, Minerva).
    AnswerLine,
    /// Only a box after the end-of-thought marker counts (DeepScaleR).
    ThinkSplit,
    /// Equality of the texts after DAPO-style normalisation.
    DapoNormalize,
    /// `AnswerLine`, searched in the last 300 characters.
    DapoTail300,
    /// The last `[x]`.
    BracketAnswer,
    /// The last `<answer>x</answer>`.
    AnswerTags,
    /// `Equivalence`, but 50% is 0.5 and not 50.
    PercentAsRatio,
    /// `Equivalence`, but fractions must be in lowest terms.
    ReducedFraction,
    /// The last `#### number` of the last 300 characters, equal as text (verl's strict scorer of GSM8K).
    Gsm8kStrict,
}

/// An unknown policy name.
#[derive(Debug, thiserror::Error)]
#[error("unknown grading policy {name:?}, expected one of {}", Policy::names())]
pub struct UnknownPolicy {
    /// The name that was given.
    pub name: String,
}

impl Policy {
    /// All policies with their names.
    pub const ALL: [(&'static str, Policy); 11] = [
        ("equivalence", Policy::Equivalence),
        ("strict_box", Policy::StrictBox),
        ("answer_line", Policy::AnswerLine),
        ("think_split", Policy::ThinkSplit),
        ("dapo_normalize", Policy::DapoNormalize),
        ("dapo_tail300", Policy::DapoTail300),
        ("bracket_answer", Policy::BracketAnswer),
        ("answer_tags", Policy::AnswerTags),
        ("percent_as_ratio", Policy::PercentAsRatio),
        ("reduced_fraction", Policy::ReducedFraction),
        ("gsm8k_strict", Policy::Gsm8kStrict),
    ];

    /// All names, separated by commas.
    pub fn names() -> String {
        Policy::ALL.map(|(name, _)| name).join(", ")
    }

    /// The name in recipes and on the command line.
    pub fn name(self) -> &'static str {
        Policy::ALL.iter().find(|(_, p)| *p == self).map_or("equivalence", |(name, _)| name)
    }

    /// Whether it says how answers are compared; the others say what counts as the answer.
    pub fn compares(self) -> bool {
        matches!(
            self,
            Policy::Equivalence
                | Policy::DapoNormalize
                | Policy::PercentAsRatio
                | Policy::ReducedFraction
                | Policy::Gsm8kStrict
        )
    }

    /// How answers are compared.
    pub(super) fn options(self) -> Options {
        Options {
            percent: match self {
                Policy::PercentAsRatio => PercentRule::IsRatio,
                _ => PercentRule::Ignored,
            },
            number_words: matches!(
                self,
                Policy::Equivalence | Policy::PercentAsRatio | Policy::ReducedFraction
            ),
        }
    }
}

impl std::str::FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Policy, UnknownPolicy> {
        let found = Policy::ALL.iter().find(|(n, _)| *n == name);
        found.map(|(_, p)| *p).ok_or_else(|| UnknownPolicy { name: name.into() })
    }
}

/// The verdict on one response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grade {
    /// Whether the response is right.
    pub equal: bool,
    /// The answer that was found in the response, if any.
    pub extracted: Option<String>,
    /// Fuel that the comparison took (see [`super::budget`]).
    pub fuel: u64,
}

impl Grade {
    pub(super) fn missing() -> Grade {
        Grade { equal: false, extracted: None, fuel: 0 }
    }

    pub(super) fn of(answer: &str, comparison: Comparison) -> Grade {
        Grade { equal: comparison.equal, extracted: Some(answer.into()), fuel: comparison.fuel }
    }
}

/// Grades a response against the right answer.
pub fn grade(gold: &str, response: &str, policy: Policy) -> Grade {
    let options = policy.options();
    let response = extract::tail(response, SEARCHED_BYTES);
    let stored = extract::tail(gold, SEARCHED_BYTES);
    let gold = &gold_answer(stored);
    let judge = |answer: Option<&str>| match answer {
        Some(answer) => Grade::of(answer, compare(gold, answer, options)),
        None => Grade::missing(),
    };
    match policy {
        Policy::Equivalence | Policy::PercentAsRatio => by_equivalence(gold, response, options),
        Policy::ReducedFraction => {
            let mut grade = by_equivalence(gold, response, options);
            grade.equal &= grade.extracted.as_deref().is_some_and(fractions_are_reduced);
            grade
        }
        Policy::StrictBox => judge(extract::boxed(response).as_ref().map(|(_, a)| a.as_str())),
        Policy::ThinkSplit => {
            let answer = extract::after_thought(response).and_then(extract::boxed);
            judge(answer.as_ref().map(|(_, a)| a.as_str()))
        }
        Policy::AnswerLine => judge(answer_line(response).as_deref()),
        Policy::DapoTail300 => judge(answer_line(extract::tail_chars(response, TAIL_CHARS)).as_deref()),
        Policy::BracketAnswer => judge(extract::bracketed(response)),
        Policy::AnswerTags => judge(extract::tagged(response)),
        Policy::DapoNormalize => {
            let answer = normalize::final_answer(response);
            let equal = !answer.is_empty() && answer == normalize::final_answer(gold);
            Grade::of(&answer, Comparison { equal, fuel: 0 })
        }
        Policy::Gsm8kStrict => gsm8k_strict(stored, response),
    }
}

/// As verl's `gsm8k.py` with `method="strict"`: the number of the last match, without commas, is the right
/// answer's text or it is wrong, so that 72. and 72.0 are not 72. A right answer may be a whole solution of
/// the data set.
fn gsm8k_strict(gold: &str, response: &str) -> Grade {
    let Some(found) = extract::hash_number(extract::tail_chars(response, TAIL_CHARS)) else {
        return Grade::missing();
    };
    let plain = |number: &str| number.replace([',', '$'], "");
    let (answer, gold) = (plain(found), plain(extract::hash_number(gold).unwrap_or(gold).trim()));
    Grade::of(&answer, Comparison { equal: answer == gold, fuel: 0 })
}

fn by_equivalence(gold: &str, response: &str, options: Options) -> Grade {
    // Most answers need no search: they are the answer.
    if let (Some(g), Some(p)) = (whole_number(gold.trim()), whole_number(response.trim())) {
        return Grade::of(response.trim(), Comparison { equal: g == p, fuel: 0 });
    }
    if response.len() <= 64
        && text::appearance(response) == text::appearance(gold)
        && !response.trim().is_empty()
    {
        return Grade::of(response.trim(), Comparison { equal: true, fuel: 0 });
    }
    let Some(Found { answer, last_number }) = extract::answer(response) else {
        return Grade::missing();
    };
    if last_number && !is_numeric(gold) {
        // No marker and no formula: words can still be the answer as a whole.
        let whole = response.trim();
        return Grade::of(whole, compare(gold, whole, options));
    }
    let comparison = compare(gold, &answer, options);
    Grade::of(&answer, comparison)
}

/// The answer line without chat markup; a box must be all of it.
fn answer_line(response: &str) -> Option<String> {
    let line = extract::answer_line(response)?;
    let line = extract::without_special_tokens(line).trim();
    (!line.is_empty()).then(|| line.to_string())
}

/// Right answers may come as a whole solution.
pub(super) fn gold_answer(gold: &str) -> String {
    if let Some((_, inner)) = extract::boxed(gold) {
        return inner;
    }
    let prose = gold.to_ascii_lowercase();
    if ["answer is", "answer:", "####"].iter().any(|marker| prose.contains(marker)) {
        return extract::answer(gold).map_or_else(|| gold.into(), |found| found.answer);
    }
    gold.into()
}

/// Whether an answer is a single number, perhaps with a unit.
fn is_numeric(answer: &str) -> bool {
    let digits = answer.bytes().filter(u8::is_ascii_digit).count();
    digits > 0 && super::value_of(answer).is_some()
}

/// Whether every fraction of whole numbers in an answer is in lowest terms.
pub(super) fn fractions_are_reduced(answer: &str) -> bool {
    let Ok(tokens) = lex(answer, Reading::Usual) else { return false };
    let flat: Vec<&Tok> =
        tokens.iter().map(|t| &t.tok).filter(|t| !matches!(t, Tok::LBrace | Tok::RBrace)).collect();
    let reduced = |a: &Tok, b: &Tok| match (a, b) {
        (Tok::Num(a), Tok::Num(b)) if a.value.denom().is_one() && b.value.denom().is_one() => {
            a.value.numer().gcd(b.value.numer()).is_one() && !b.value.numer().is_one()
        }
        _ => true,
    };
    flat.windows(3).all(|w| match w {
        [Tok::Frac, a, b] => reduced(a, b),
        [a, Tok::Slash, b] => reduced(a, b),
        _ => true,
    })
}
