//! Training problems that are test problems, and have to be left out.
//!
//! The same problem is stored in many ways: bare, inside a prompt template, as messages of a chat, with
//! "Report the answer as an integer." after it. Three comparisons find it, all of them on words in lower case
//! without punctuation:
//!
//! * Of chat messages only what the user says counts, and a known template around it is taken off
//!   ([`TEMPLATES`]).
//! * Problems with the same letters and digits are the same, however short and however spaced.
//! * A problem of at least [`MIN_WORDS`] words that stands as a whole inside another text is the same, too:
//!   test problems in wrapped or extended training problems, and training problems in wrapped test problems.
//!
//! Shorter ones ("x + y + z = xyz") do stand inside of other problems. Whole words matter: "below 100" is not
//! in "below 1000". Paraphrases are not found, nor two long problems inside two wrappers of which neither is
//! known.

use crate::data::Row;
use crate::presets::TEMPLATES;
use crate::rng::{mix, mix_text};
use crate::task::Prompt;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Words of the shortest problem that is looked for inside others. Between the training and test sets of the
/// paper's recipes 8 and 12 find the same 35 pairs, all of them right; 6 finds a wrong one.
pub const MIN_WORDS: usize = 10;

/// A problem as it is compared.
struct Text {
    /// Hashes of all words.
    words: Vec<u64>,
    /// Which of them are the problem, without a known template.
    core: Range<usize>,
    /// The letters and digits of the core.
    key: String,
}

/// The letters and digits of problems in lower case, without roles and known templates: equal keys, same
/// problem.
pub fn problem_keys(rows: &[Row]) -> Vec<String> {
    let templates = templates();
    rows.iter().map(|row| Text::of(&row.problem, &templates).key).collect()
}

/// Drops the training rows whose problem also occurs among the test rows.
pub fn without_overlap(train: Vec<Row>, test: &[Row]) -> Vec<Row> {
    let templates = templates();
    let train_texts: Vec<Text> = train.iter().map(|row| Text::of(&row.problem, &templates)).collect();
    let test_texts: Vec<Text> = test.iter().map(|row| Text::of(&row.problem, &templates)).collect();
    let keys: HashSet<&str> = test_texts.iter().map(|text| text.key.as_str()).collect();
    let (tests, trains) = (Index::of(&test_texts), Index::of(&train_texts));
    let inside_tests: HashSet<usize> = test_texts.iter().flat_map(|text| trains.inside(text)).collect();
    let overlaps = |(index, text): (usize, &Text)| {
        keys.contains(text.key.as_str()) || inside_tests.contains(&index) || !tests.inside(text).is_empty()
    };
    let overlaps: Vec<bool> = train_texts.iter().enumerate().map(overlaps).collect();
    train.into_iter().zip(overlaps).filter(|(_, overlaps)| !overlaps).map(|(row, _)| row).collect()
}

impl Text {
    fn of(prompt: &Prompt, templates: &[(Vec<String>, Vec<String>)]) -> Text {
        let words = words(&said_by_user(prompt));
        let core = core(&words, templates);
        Text {
            key: words[core.clone()].concat(),
            words: words.iter().map(|word| mix_text(word)).collect(),
            core,
        }
    }

    fn problem(&self) -> &[u64] {
        &self.words[self.core.clone()]
    }
}

/// Problems by their first [`MIN_WORDS`] words.
struct Index<'a> {
    texts: &'a [Text],
    by_beginning: HashMap<u64, Vec<usize>>,
}

impl Index<'_> {
    fn of(texts: &[Text]) -> Index<'_> {
        let mut by_beginning: HashMap<u64, Vec<usize>> = HashMap::new();
        for (index, text) in texts.iter().enumerate() {
            if let Some(beginning) = text.problem().first_chunk::<MIN_WORDS>() {
                by_beginning.entry(mix(beginning)).or_default().push(index);
            }
        }
        Index { texts, by_beginning }
    }

    /// Which of the problems stand inside of a text.
    fn inside(&self, text: &Text) -> Vec<usize> {
        let mut found = Vec::new();
        for (start, window) in text.words.windows(MIN_WORDS).enumerate() {
            let candidates = self.by_beginning.get(&mix(window)).into_iter().flatten();
            found.extend(
                candidates.filter(|&&index| text.words[start..].starts_with(self.texts[index].problem())),
            );
        }
        found
    }
}

/// What the user says: all of a text, or the user's messages of a chat (all messages where none is the
/// user's).
fn said_by_user(prompt: &Prompt) -> String {
    match prompt {
        Prompt::Chat(messages) if messages.iter().any(|message| message.role == "user") => {
            let user = messages.iter().filter(|message| message.role == "user");
            user.map(|message| message.content.as_str()).collect::<Vec<_>>().join("\n")
        }
        other => other.plain(),
    }
}

/// Words in lower case: runs of ASCII letters and digits, and each other letter by itself, since not every
/// script has spaces between words.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut run = String::new();
    for character in text.chars() {
        if character.is_ascii_alphanumeric() {
            run.push(character.to_ascii_lowercase());
            continue;
        }
        if !run.is_empty() {
            words.push(std::mem::take(&mut run));
        }
        if character.is_alphanumeric() {
            words.push(character.to_lowercase().collect());
        }
    }
    words.extend((!run.is_empty()).then_some(run));
    words
}

/// The words before and after the problem in every known template that has any.
fn templates() -> Vec<(Vec<String>, Vec<String>)> {
    let parts = TEMPLATES.iter().filter_map(|template| template.user.split_once("{problem}"));
    let parts = parts.map(|(before, after)| (words(before), words(after)));
    parts.filter(|(before, after)| !before.is_empty() || !after.is_empty()).collect()
}

/// Which words are the problem, once known templates are taken off.
fn core(words: &[String], templates: &[(Vec<String>, Vec<String>)]) -> Range<usize> {
    let mut core = 0..words.len();
    let within = |core: &Range<usize>, (before, after): &(Vec<String>, Vec<String>)| {
        let text = &words[core.clone()];
        let fits =
            text.len() > before.len() + after.len() && text.starts_with(before) && text.ends_with(after);
        fits.then(|| core.start + before.len()..core.end - after.len())
    };
    // A template inside of another one is taken off, too; every round makes the core shorter.
    while let Some(inner) = templates.iter().find_map(|template| within(&core, template)) {
        core = inner;
    }
    core
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::{COUNTDOWN, DAPO, DEEPSCALER, GSM8K, PLAIN, QWEN_MATH, Template};
    use crate::task::Message;

    const LONG: &str = "How many positive perfect squares less than $2023$ are divisible by $5$?";
    const CHINESE: &str = "求所有小于2023且能被5整除的正完全平方数的个数。";
    const SHORT: &str = "Solve $x^2 = 4$.";

    fn row(id: &str, problem: Prompt) -> Row {
        Row { id: id.into(), problem, answer: "1".into(), source: None, extra: serde_json::Value::Null }
    }

    fn kept(train: Prompt, test: Prompt) -> bool {
        !without_overlap(vec![row("train", train)], &[row("test", test)]).is_empty()
    }

    fn text(text: &str) -> Prompt {
        Prompt::Text(text.into())
    }

    fn chat(messages: &[(&str, &str)]) -> Prompt {
        let message =
            |(role, content): &(&str, &str)| Message { role: (*role).into(), content: (*content).into() };
        Prompt::Chat(messages.iter().map(message).collect())
    }

    #[test]
    fn every_known_template_is_seen_through_on_both_sides() {
        let wrapped = |template: Template, problem: &str| {
            [template.apply(problem), text(&template.apply(problem).plain())]
        };
        for problem in [LONG, CHINESE, SHORT] {
            for (a, b) in TEMPLATES.iter().flat_map(|a| TEMPLATES.map(|b| (*a, b))) {
                for (train, test) in
                    wrapped(a, problem).into_iter().flat_map(|t| wrapped(b, problem).map(|b| (t.clone(), b)))
                {
                    // A system message that was written into the text is no template of a user's message.
                    let written = [&train, &test]
                        .iter()
                        .any(|p| matches!(p, Prompt::Text(text) if text.starts_with("Please")));
                    if problem != SHORT || !written {
                        assert!(!kept(train.clone(), test.clone()), "{train:?} {test:?}");
                    }
                }
            }
        }
        for template in TEMPLATES {
            assert!(
                kept(template.apply(LONG), template.apply("How many squares are there below 7?")),
                "{}",
                template.name
            );
        }
        let problem_key = |prompt: &Prompt| problem_keys(&[row("any", prompt.clone())]).concat();
        let twice = GSM8K.apply(&DAPO.apply(SHORT).plain());
        assert_eq!(problem_key(&twice), problem_key(&PLAIN.apply(SHORT)));
        assert_ne!(problem_key(&COUNTDOWN.apply(SHORT)), problem_key(&DEEPSCALER.apply(LONG)));
        assert_eq!(problem_key(&QWEN_MATH.apply(SHORT)), "solvex24");
    }

    #[test]
    fn long_problems_are_found_inside_of_other_texts() {
        let extended = format!("You are given a problem: {LONG} Report the answer as an integer.");
        let messages = chat(&[("system", "Think."), ("user", &extended), ("assistant", "Let me see.")]);
        for wrapped in [text(&extended), messages] {
            assert!(!kept(wrapped.clone(), text(LONG)));
            assert!(!kept(text(LONG), wrapped.clone()));
            assert!(!kept(wrapped.clone(), DAPO.apply(LONG)));
            assert!(kept(
                wrapped,
                text("How many positive perfect squares less than 2024 are divisible by 5?")
            ));
        }
        assert!(!kept(text(&format!("问题：{CHINESE}请给出整数。")), text(CHINESE)));
        // What others say is no problem.
        assert!(kept(chat(&[("system", LONG), ("user", "What is 2 + 2?")]), text(LONG)));
        // The whole problem has to be there, in whole words.
        assert!(kept(
            text("How many positive perfect squares less than 2023 are divisible by 7?"),
            text(LONG)
        ));
        assert!(kept(text(&LONG.replace("$5$", "$55$")), text(LONG)));
        assert!(kept(text(&format!("X{LONG}")), text(LONG)));
    }

    #[test]
    fn short_problems_must_be_equal() {
        assert!(!kept(text("solve x^2=4"), text(SHORT)));
        assert!(kept(text(&format!("{SHORT} How many solutions are there?")), text(SHORT)));
        let nine = "a b c d e f g h i";
        assert!(kept(text(&format!("{nine} k")), text(nine)));
        assert!(!kept(text(&format!("{nine} j k")), text(&format!("{nine} j"))));
    }
}
