//! Rewards, prompts and answers of one's own: what is checked before any file is read.

use super::{Check, DatasetSource, RecipeError};
use qurl_tasks::reward::{RewardRule, one_of_policies};
use qurl_tasks::setting::BadSetting;
use qurl_tasks::task::RewardValues;

/// A setting that the tasks refuse, as an error that names its place in the recipe.
fn refuse(section: &str, check: Check, outcome: Result<(), BadSetting>) -> Result<(), RecipeError> {
    let Err(BadSetting { key, found, expected }) = outcome else { return Ok(()) };
    check.that(&format!("{section}.{key}"), found, false, &expected)
}

/// `[[task.rewards]]`: each by itself, names that differ, and nothing else that is rewarded.
pub(super) fn check_rewards(
    rules: &[RewardRule],
    values: RewardValues,
    format_weight: f64,
    section: &str,
    check: Check,
) -> Result<(), RecipeError> {
    if rules.is_empty() {
        return Ok(());
    }
    let key = |name: &str| format!("{section}.{name}");
    let instead = |rule: &str| format!("nothing beside [[{section}.rewards]]; {rule}");
    let RewardValues { right, wrong } = values;
    let found = format!("{{ right = {right}, wrong = {wrong} }}");
    let expected = instead("give a reward of the type correct a weight");
    check.that(&key("reward"), found, values == RewardValues::default(), &expected)?;
    let expected = instead("give a reward of the type format a weight");
    check.that(&key("format_weight"), format_weight, format_weight == 0.0, &expected)?;
    for (i, rule) in rules.iter().enumerate() {
        let place = format!("{section}.rewards[{i}]");
        refuse(&place, check, rule.check())?;
        let alone = rules[..i].iter().all(|other| other.name() != rule.name());
        let found = format!("called {:?} like another one", rule.name());
        check.that(&place, found, alone, "a `name` of its own")?;
    }
    let some = rules.iter().any(|rule| rule.weight() != 0.0);
    check.that(&key("rewards"), "a list of weights of 0", some, "at least one other weight")
}

/// `task.extract`, and a policy that does not look for answers itself.
pub(super) fn check_extract(source: &DatasetSource, section: &str, check: Check) -> Result<(), RecipeError> {
    let Some(rule) = &source.extract else { return Ok(()) };
    refuse(&format!("{section}.extract"), check, rule.compile().map(|_| ()))?;
    let Some(policy) = &source.policy else { return Ok(()) };
    let compares = source.policy().is_ok_and(|policy| policy.compares());
    check.that(&format!("{section}.policy"), format!("{policy:?}"), compares, &one_of_policies(true))
}

/// `[task.prompt]`: templates that can be read, and one of them only.
pub(super) fn check_prompt(source: &DatasetSource, section: &str, check: Check) -> Result<(), RecipeError> {
    let Some(rule) = &source.prompt else { return Ok(()) };
    if let Some(template) = source.template.as_ref().filter(|_| rule.user.is_some()) {
        let expected = format!("nothing beside `{section}.prompt.user`, which says the same");
        check.that(&format!("{section}.template"), format!("{template:?}"), false, &expected)?;
    }
    // An unknown template is told elsewhere.
    let Ok(template) = source.template() else { return Ok(()) };
    refuse(&format!("{section}.prompt"), check, rule.compile(template).map(|_| ()))
}
