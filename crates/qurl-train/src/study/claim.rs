//! Claims and their verdicts.
//!
//! A claim holds where there are at least five pairs, the 95% interval of their mean difference by Student's
//! t is above the margin, and the exact sign-flip test agrees (one-sided p at most 0.05: with five pairs, all
//! five on the same side of the margin). It does not hold where the same is true of the other side. All else
//! is not decided, equal results included. Of claims about nothing but chance about one in forty holds, and
//! as many do not: a study that asks many questions has to be read so.

use super::stats::{Estimate, sign_flip_p};
use super::{METRICS, Results};
use serde::{Deserialize, Serialize};

/// Pairs that a verdict needs: fewer leave it undecided, whatever they show.
const MIN_PAIRS: usize = 5;
/// The largest p of a verdict.
const MAX_P: f64 = 0.05;

/// Something that runs may show.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// In words.
    pub text: String,
    /// Of which recipes it is claimed; by default of each.
    #[serde(default)]
    pub recipes: Vec<String>,
    /// What it compares: `better` or `grows`.
    pub kind: KindName,
    /// What is compared.
    pub metric: String,
    /// `better`: the method whose metric is claimed to be larger.
    #[serde(default)]
    pub better: Option<String>,
    /// `better`: the method whose metric is claimed to be smaller.
    #[serde(default)]
    pub worse: Option<String>,
    /// `grows`: the method whose metric is claimed to be larger in the last quarter of a run than in the
    /// first.
    #[serde(default)]
    pub method: Option<String>,
    /// By how much at least.
    #[serde(default)]
    pub margin: f64,
}

/// Kinds of claims as files name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KindName {
    /// One method against another.
    Better,
    /// One method late against the same early.
    Grows,
}

/// What a claim compares, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind<'a> {
    /// (better, worse)
    Better(&'a str, &'a str),
    /// The method.
    Grows(&'a str),
}

/// What was found of a claim for one recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The claim.
    pub claim: String,
    /// The recipe.
    pub recipe: String,
    /// What was compared, in short.
    pub compared: String,
    /// `holds`, `does not hold` or `not decided`.
    pub verdict: &'static str,
    /// Differences of pairs with the same seed.
    pub differences: Vec<f64>,
    /// Their mean; nothing where there is no pair.
    pub estimate: Option<Estimate>,
    /// How likely a mean so far above the margin is by chance (sign flips, one-sided).
    pub p_above: f64,
    /// The same below it.
    pub p_below: f64,
    /// What the mean has to exceed.
    pub margin: f64,
}

impl Claim {
    /// What it compares.
    pub fn kind(&self) -> Option<Kind<'_>> {
        match (self.kind, &self.better, &self.worse, &self.method) {
            (KindName::Better, Some(better), Some(worse), None) => Some(Kind::Better(better, worse)),
            (KindName::Grows, None, None, Some(method)) => Some(Kind::Grows(method)),
            _ => None,
        }
    }

    /// Key, value and what was expected of the first mistake.
    pub(super) fn check(
        &self,
        recipes: &[String],
        methods: &[String],
    ) -> Result<(), (&'static str, String, String)> {
        let of = |key, name: &String, known: &[String]| match known.contains(name) {
            true => Ok(()),
            false => Err((key, format!("{name:?}"), format!("one of {}", known.join(", ")))),
        };
        self.recipes.iter().try_for_each(|name| of("recipes", name, recipes))?;
        for (key, name) in [("better", &self.better), ("worse", &self.worse), ("method", &self.method)] {
            name.iter().try_for_each(|name| of(key, name, methods))?;
        }
        if self.kind().is_none() {
            let expected = "`better` and `worse` for kind \"better\", `method` for kind \"grows\"";
            return Err(("kind", format!("{:?} of {:?}", self.kind, self.text), expected.to_string()));
        }
        let known: Vec<String> = METRICS.iter().map(|m| m.to_string()).collect();
        of("metric", &self.metric, &known)?;
        match self.margin.is_finite() {
            true => Ok(()),
            false => Err(("margin", self.margin.to_string(), "a finite number".to_string())),
        }
    }
}

/// What the cells that are over say of a claim, recipe by recipe.
pub fn decide(claim: &Claim, recipes: &[String], seeds: &[u64], results: &Results) -> Vec<Verdict> {
    let Some(kind) = claim.kind() else { return Vec::new() };
    let asked = |recipe: &&String| claim.recipes.is_empty() || claim.recipes.contains(recipe);
    let verdict = |recipe: &String| {
        let of = |method: &str, seed: u64| results.get(&(recipe.clone(), method.to_string(), seed));
        let pair = |&seed: &u64| match kind {
            Kind::Better(better, worse) => {
                Some(of(better, seed)?.get(&claim.metric)? - of(worse, seed)?.get(&claim.metric)?)
            }
            Kind::Grows(method) => of(method, seed)?.growth(&claim.metric),
        };
        let differences: Vec<f64> = seeds.iter().filter_map(pair).collect();
        let estimate = Estimate::of(&differences);
        let [p_above, p_below] = [1.0, -1.0].map(|side| {
            sign_flip_p(&differences.iter().map(|d| side * (d - claim.margin)).collect::<Vec<f64>>())
        });
        let verdict = match estimate.filter(|e| e.n >= MIN_PAIRS) {
            Some(e) if e.low > claim.margin && p_above <= MAX_P => "holds",
            Some(e) if e.high < claim.margin && p_below <= MAX_P => "does not hold",
            _ => "not decided",
        };
        let compared = match kind {
            Kind::Better(better, worse) => format!("{} of {better} - {worse}", claim.metric),
            Kind::Grows(method) => format!("{} of {method}, last quarter - first", claim.metric),
        };
        let (text, recipe, margin) = (claim.text.clone(), recipe.clone(), claim.margin);
        Verdict { claim: text, recipe, compared, verdict, differences, estimate, p_above, p_below, margin }
    };
    recipes.iter().filter(asked).map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::super::CellFigures;
    use super::*;

    fn results(better: &[f64], worse: &[f64]) -> Results {
        let cells = |method: &'static str, values: &[f64]| {
            let cell = |(seed, value): (usize, &f64)| {
                let mut figures = CellFigures::default();
                figures.values.insert("accuracy_final".to_string(), *value);
                figures.growth.insert("mismatch_kl".to_string(), *value);
                (("tiny".to_string(), method.to_string(), seed as u64), figures)
            };
            values.iter().enumerate().map(cell).collect::<Vec<_>>()
        };
        cells("acr", better).into_iter().chain(cells("tis", worse)).collect()
    }

    fn verdict(kind: KindName, better: &[f64], worse: &[f64]) -> Verdict {
        let named = |name: &str| Some(name.to_string());
        let claim = Claim {
            text: "a claim".to_string(),
            recipes: Vec::new(),
            kind,
            metric: if kind == KindName::Better { "accuracy_final" } else { "mismatch_kl" }.to_string(),
            better: named("acr").filter(|_| kind == KindName::Better),
            worse: named("tis").filter(|_| kind == KindName::Better),
            method: named("acr").filter(|_| kind == KindName::Grows),
            margin: 0.0,
        };
        let (recipes, seeds) = (["tiny".to_string()], (0..9).collect::<Vec<u64>>());
        decide(&claim, &recipes, &seeds, &results(better, worse)).remove(0)
    }

    #[test]
    fn pairs_decide_and_few_do_not() {
        let better = [0.5, 0.6, 0.7, 0.4, 0.8];
        let worse: Vec<f64> = better.iter().map(|x| x - 0.01).collect();
        let found = verdict(KindName::Better, &better, &worse);
        // The spread of the seeds is 0.16, that of the pairs 0: pairs decide.
        assert_eq!((found.verdict, found.estimate.expect("pairs").n), ("holds", 5));
        assert_eq!(verdict(KindName::Better, &worse, &better).verdict, "does not hold");
        assert_eq!(verdict(KindName::Better, &better, &better).verdict, "not decided");
        assert_eq!(verdict(KindName::Better, &better[..4], &worse[..4]).verdict, "not decided");
        let mixed: Vec<f64> = [0.1, -0.1, 0.1, -0.1, 0.05].iter().zip(better).map(|(d, x)| x + d).collect();
        assert_eq!(verdict(KindName::Better, &mixed, &better).verdict, "not decided");
        // One pair of five that disagrees leaves it open, although the interval is above zero.
        let most: Vec<f64> = [0.1, 0.11, 0.1, 0.09, -0.001].iter().zip(better).map(|(d, x)| x + d).collect();
        let found = verdict(KindName::Better, &most, &better);
        assert!(found.estimate.is_some_and(|e| e.low > 0.0) && found.p_above == 2.0 / 32.0, "{found:?}");
        assert_eq!(found.verdict, "not decided");
        assert_eq!(verdict(KindName::Better, &[], &worse).estimate, None);
        // A pair needs both.
        assert_eq!(verdict(KindName::Better, &better, &worse[..3]).differences.len(), 3);
        assert_eq!(verdict(KindName::Grows, &better, &[]).verdict, "holds");
    }
}
