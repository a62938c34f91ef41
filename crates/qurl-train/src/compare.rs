//! The paper's comparison as changes to one recipe: which methods there are, and what their runs say side by
//! side.
//!
//! All methods of a seed start from the same weights and draw the same problems; what differs is how rollouts
//! are quantized and how the loss corrects for it. Clip ranges and C come from the recipe's own objective, so
//! that every method gets the same ones.

use crate::best::{BestSeen, score_of};
use crate::recipe::{Forward, Recipe, RecipeError};
use crate::rl::Tested;
use qurl_kernels::Format;
use qurl_rl::objective::recipe::{Clip, Dppo, Kpop, M2po, Objective, OffPolicyMask, Truncated};
use serde::Serialize;
use serde_json::Value;

/// One way to train with a quantized rollout (or without quantization).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Method {
    /// Rollouts in the precision of training.
    Full,
    /// Quantized rollouts, no correction (Eq. 1).
    Naive,
    /// The ratio to the quantized policy (Eq. 3).
    QuantizedIs,
    /// Weighted by rho (Eq. 4).
    Decoupled,
    /// Weighted by truncated rho, FlashRL (Eq. 5).
    Tis,
    /// Adaptive clipping (Eq. 9) with an invariant scale s (Eq. 11); 1 is without UAQ.
    Qurl {
        /// s.
        uaq: f64,
    },
    /// Adaptive clipping without UAQ, the learning rate multiplied: what UAQ is not.
    FasterLearning {
        /// The factor.
        factor: f64,
    },
    /// Adaptive clipping without UAQ, weights rounded stochastically.
    StochasticRounding,
    /// Weighted by rho, without tokens whose probabilities diverge.
    Kpop,
    /// The ratio to the quantized policy without a clip, inside a trust region of probabilities.
    Dppo,
    /// Weighted by the importance weight of the response, without responses where it is large.
    SequenceMis,
    /// Without tokens of negative advantage in responses that have become unlikely.
    OffPolicyMask,
    /// The second moment of the log-ratio bounded.
    M2po,
    /// The rollout's weights run the trainer's forward passes: nothing is left to correct.
    RolloutForward,
}

/// s of the paper.
const PAPER_SCALE: f64 = 1.5;

impl Method {
    /// The grid of the paper's tables 1 to 3.
    pub const GRID: [Method; 7] = [
        Method::Full,
        Method::Naive,
        Method::QuantizedIs,
        Method::Decoupled,
        Method::Tis,
        Method::Qurl { uaq: 1.0 },
        Method::Qurl { uaq: PAPER_SCALE },
    ];

    /// The grid of table 4, and stochastic rounding as the other way to let small updates through.
    pub const UAQ_ABLATION: [Method; 7] = [
        Method::Qurl { uaq: 1.0 },
        Method::Qurl { uaq: 1.5 },
        Method::Qurl { uaq: 2.0 },
        Method::Qurl { uaq: 3.0 },
        Method::FasterLearning { factor: 1.5 },
        Method::FasterLearning { factor: 2.0 },
        Method::StochasticRounding,
    ];

    /// The newer corrections, beside the paper's.
    pub const CORRECTIONS: [Method; 6] = [
        Method::Kpop,
        Method::Dppo,
        Method::SequenceMis,
        Method::OffPolicyMask,
        Method::M2po,
        Method::RolloutForward,
    ];

    /// All methods, each once.
    pub fn all() -> impl Iterator<Item = Method> {
        let more = Method::UAQ_ABLATION.into_iter().filter(|m| !Method::GRID.contains(m));
        Method::GRID.into_iter().chain(more).chain(Method::CORRECTIONS)
    }

    /// The method with this name.
    pub fn named(name: &str) -> Option<Method> {
        Method::all().find(|method| method.name() == name)
    }

    /// Its name on the command line and in file names.
    pub fn name(self) -> String {
        match self {
            Method::Full => "full".to_string(),
            Method::Naive => "naive".to_string(),
            Method::QuantizedIs => "quantized-is".to_string(),
            Method::Decoupled => "decoupled".to_string(),
            Method::Tis => "tis".to_string(),
            Method::Qurl { uaq: 1.0 } => "acr".to_string(),
            Method::Qurl { uaq: PAPER_SCALE } => "acr-uaq".to_string(),
            Method::Qurl { uaq } => format!("acr-uaq-{uaq}"),
            Method::FasterLearning { factor } => format!("acr-lr-x{factor}"),
            Method::StochasticRounding => "acr-stochastic".to_string(),
            Method::Kpop => "kpop".to_string(),
            Method::Dppo => "dppo".to_string(),
            Method::SequenceMis => "sequence-mis".to_string(),
            Method::OffPolicyMask => "off-policy-mask".to_string(),
            Method::M2po => "m2po".to_string(),
            Method::RolloutForward => "rollout-forward".to_string(),
        }
    }

    /// What the paper calls it.
    pub fn title(self) -> String {
        match self {
            Method::Full => "RL, full-precision rollout".to_string(),
            Method::Naive => "naive quantized rollout".to_string(),
            Method::QuantizedIs => "quantized importance sampling".to_string(),
            Method::Decoupled => "decoupled".to_string(),
            Method::Tis => "FlashRL (TIS)".to_string(),
            Method::Qurl { uaq: 1.0 } => "QuRL w/o UAQ".to_string(),
            Method::Qurl { uaq } => format!("QuRL w/ UAQ, s = {uaq}"),
            Method::FasterLearning { factor } => format!("QuRL w/o UAQ, lr x {factor}"),
            Method::StochasticRounding => "QuRL w/o UAQ, stochastic rounding".to_string(),
            Method::Kpop => "KPop".to_string(),
            Method::Dppo => "DPPO".to_string(),
            Method::SequenceMis => "sequence MIS".to_string(),
            Method::OffPolicyMask => "off-policy sequence mask".to_string(),
            Method::M2po => "M2PO".to_string(),
            Method::RolloutForward => "training forward of the rollout's weights".to_string(),
        }
    }

    /// The recipe of this method, which must have the sections of reinforcement learning; an error where the
    /// base does not go together with what the method changes.
    pub fn recipe(self, base: &Recipe, seed: u64) -> Result<Recipe, RecipeError> {
        self.change(base, seed).checked()
    }

    /// The same without the check, for those who change it further.
    pub(crate) fn change(self, base: &Recipe, seed: u64) -> Recipe {
        let mut recipe = base.clone();
        recipe.trainer.seed = seed;
        let mut rollout = recipe.rollout.take().unwrap_or_default();
        rollout.uaq = 1.0;
        rollout.stochastic_rounding = false;
        recipe.trainer.forward = Forward::Full;
        match self {
            Method::Full => {
                rollout.format = recipe.trainer.compute;
                rollout.kv_cache = None;
            }
            Method::Qurl { uaq } => rollout.uaq = uaq,
            Method::FasterLearning { factor } => {
                if let Some(actor) = &mut recipe.actor {
                    actor.lr *= factor;
                }
            }
            Method::StochasticRounding => rollout.stochastic_rounding = true,
            Method::RolloutForward => {
                recipe.trainer.forward = Forward::Rollout;
                recipe.trainer.compute = Format::Bf16;
                rollout.lag = 0;
            }
            Method::Naive | Method::QuantizedIs | Method::Decoupled | Method::Tis => {}
            Method::Kpop | Method::Dppo | Method::SequenceMis | Method::OffPolicyMask | Method::M2po => {}
        }
        recipe.rollout = Some(rollout);
        if let Some(algorithm) = &mut recipe.algorithm {
            algorithm.objective = self.objective(algorithm.objective);
        }
        recipe
    }

    /// Its objective with the bounds of another.
    fn objective(self, base: Objective) -> Objective {
        let truncated = match base {
            Objective::Tis(t) | Objective::Acr(t) | Objective::SequenceTis(t) | Objective::SequenceMis(t) => {
                t
            }
            Objective::Naive(c) | Objective::QuantizedIs(c) | Objective::Decoupled(c) => Truncated {
                clip_ratio_low: c.clip_ratio_low,
                clip_ratio_high: c.clip_ratio_high,
                clip_ratio_c: c.clip_ratio_c,
                off_policy_mask: c.off_policy_mask,
                ..Truncated::default()
            },
            _ => Truncated::default(),
        };
        let Truncated { clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask, .. } = truncated;
        let clip = Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask };
        match self {
            Method::Kpop => {
                let phi = Kpop::default().phi;
                Objective::Kpop(Kpop { phi, clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask })
            }
            Method::Dppo => Objective::Dppo(Dppo { off_policy_mask, ..Dppo::default() }),
            Method::SequenceMis => Objective::SequenceMis(truncated),
            Method::OffPolicyMask => {
                let OffPolicyMask { tau, correction, .. } = OffPolicyMask::default();
                let tau = off_policy_mask.unwrap_or(tau);
                Objective::OffPolicyMask(OffPolicyMask {
                    tau,
                    correction,
                    clip_ratio_low,
                    clip_ratio_high,
                    clip_ratio_c,
                })
            }
            Method::M2po => Objective::M2po(M2po { off_policy_mask, ..M2po::default() }),
            Method::Full | Method::Naive | Method::RolloutForward => Objective::Naive(clip),
            Method::QuantizedIs => Objective::QuantizedIs(clip),
            Method::Decoupled => Objective::Decoupled(clip),
            Method::Tis => Objective::Tis(truncated),
            Method::Qurl { .. } | Method::FasterLearning { .. } | Method::StochasticRounding => {
                Objective::Acr(truncated)
            }
        }
    }
}

/// What one run of one method gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RunFigures {
    /// Held-out accuracy before.
    pub accuracy_before: f64,
    /// Held-out accuracy at the end.
    pub accuracy_final: f64,
    /// The best score on the way, and the step after which it was seen ([`BestSeen`]).
    pub accuracy_best: f64,
    /// 0 for the start.
    pub best_step: u64,
    /// Mean accuracy of `run.test_k` samples before, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub avg_at_k_before: Option<f64>,
    /// The same at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub avg_at_k_final: Option<f64>,
    /// The step at which training was found to be broken, and ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken_at: Option<u64>,
    /// Mean of KL(behav||prox) over the steps.
    pub mismatch_kl: f64,
    /// Its largest value.
    pub mismatch_kl_max: f64,
    /// Largest rho of all tokens.
    pub rho_max: f64,
    /// Mean share of clipped tokens.
    pub clip_fraction: f64,
    /// Updates skipped because they were not finite.
    pub skipped_updates: u64,
    /// Response tokens.
    pub response_tokens: f64,
    /// Seconds of rollout.
    pub rollout_seconds: f64,
    steps: u64,
}

impl RunFigures {
    /// Of a run that began with this evaluation, from the lines of its `metrics.jsonl`; with the step at
    /// which it broke.
    pub fn of(before: Tested, records: &[Value], broken_at: Option<u64>) -> RunFigures {
        let mut figures = RunFigures {
            accuracy_before: before.accuracy,
            accuracy_final: before.accuracy,
            avg_at_k_before: before.avg_at_k,
            avg_at_k_final: before.avg_at_k,
            broken_at,
            ..RunFigures::default()
        };
        let mut best = BestSeen { score: before.score(), step: 0 };
        for record in records {
            figures.add(record);
            if let Some(score) = score_of(record) {
                best = BestSeen::or(Some(best), record["step"].as_u64().unwrap_or(figures.steps), score);
            }
        }
        (figures.accuracy_best, figures.best_step) = (best.score, best.step);
        figures
    }

    fn add(&mut self, record: &Value) {
        let number = |path: &str| record.pointer(path).and_then(Value::as_f64);
        self.steps += 1;
        let mean = |old: f64, new: f64| old + (new - old) / self.steps as f64;
        if let Some(kl) = number("/mismatch/kl") {
            self.mismatch_kl = mean(self.mismatch_kl, kl);
            self.mismatch_kl_max = self.mismatch_kl_max.max(kl);
            self.rho_max = self.rho_max.max(number("/mismatch/rho_max").unwrap_or(0.0));
        }
        let clipped = ["/clip_fraction_upper", "/clip_fraction_lower"].map(|key| number(key).unwrap_or(0.0));
        self.clip_fraction = mean(self.clip_fraction, clipped[0] + clipped[1]);
        self.skipped_updates += record["skipped_updates"].as_u64().unwrap_or(0);
        self.response_tokens += number("/response_tokens").unwrap_or(0.0);
        self.rollout_seconds += number("/timing/rollout").unwrap_or(0.0);
        self.accuracy_final = number("/test_accuracy").unwrap_or(self.accuracy_final);
        self.avg_at_k_final = number("/test_avg_at_k").or(self.avg_at_k_final);
    }

    /// Response tokens a second of rollout.
    pub fn tokens_per_s(&self) -> f64 {
        self.response_tokens / self.rollout_seconds
    }
}

/// Mean and sample standard deviation over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Standard deviation; 0 for a single seed.
    pub deviation: f64,
}

impl Spread {
    /// Of some values; NaN where there are none.
    pub fn of(values: impl Iterator<Item = f64> + Clone) -> Spread {
        let count = values.clone().count() as f64;
        let mean = values.clone().sum::<f64>() / count;
        let squares: f64 = values.map(|x| (x - mean) * (x - mean)).sum();
        Spread { mean, deviation: if count > 1.0 { (squares / (count - 1.0)).sqrt() } else { 0.0 } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const BASE: &str = include_str!("../../../recipes/default.toml");

    fn base() -> Recipe {
        Recipe::parse(BASE, "default", &[]).expect("the default")
    }

    #[test]
    fn every_method_is_a_valid_recipe_with_the_bounds_of_the_base() {
        let base = base();
        for method in Method::all() {
            let recipe = method.recipe(&base, 7).expect("a valid recipe");
            let text = recipe.to_toml();
            let again = Recipe::parse(&text, &method.name(), &[]).expect("valid");
            assert_eq!(again, recipe);
            assert_eq!(recipe.trainer.seed, 7);
            let objective = toml::to_string(&recipe.algorithm.expect("algorithm").objective).expect("toml");
            let clips = !matches!(method, Method::Dppo | Method::M2po);
            assert_eq!(objective.contains("clip_ratio_high = 0.28"), clips, "{}: {objective}", method.name());
        }
    }

    #[test]
    fn methods_differ_in_what_they_should() {
        let base = base();
        let recipe = |m: Method| m.recipe(&base, 1).expect("a valid recipe");
        let rollout = |m: Method| recipe(m).rollout.expect("rollout");
        assert_eq!(rollout(Method::Full).format, base.trainer.compute);
        assert_eq!(rollout(Method::Naive).format, base.rollout.as_ref().expect("rollout").format);
        assert_eq!(rollout(Method::Tis).uaq, 1.0);
        assert_eq!(rollout(Method::Qurl { uaq: 3.0 }).uaq, 3.0);
        assert!(rollout(Method::StochasticRounding).stochastic_rounding);
        assert_eq!(recipe(Method::RolloutForward).trainer.forward, Forward::Rollout);
        let lr = |m: Method| recipe(m).actor.expect("actor").lr;
        assert_eq!(lr(Method::FasterLearning { factor: 2.0 }), 2.0 * lr(Method::Tis));
        let names: std::collections::BTreeSet<String> = Method::all().map(|m| m.name()).collect();
        assert_eq!(names.len(), Method::all().count());
    }

    #[test]
    fn methods_that_adapters_cannot_have_are_refused_by_their_keys() {
        let set =
            ["model.path=base", "lora.rank=4", "trainer.compute=bf16", "rollout.uaq=1"].map(str::to_string);
        let text: toml::Table = toml::from_str(BASE).expect("TOML");
        let without = |(key, _): &(String, toml::Value)| key != "sft" && key != "model";
        let text: toml::Table = text.into_iter().filter(without).collect();
        let base = Recipe::parse(&text.to_string(), "adapters.toml", &set).expect("a recipe with adapters");
        for method in Method::all() {
            let key = match method {
                Method::Qurl { uaq } if uaq != 1.0 => "rollout.uaq",
                Method::StochasticRounding => "rollout.stochastic_rounding",
                Method::RolloutForward => "trainer.forward",
                _ => {
                    method.recipe(&base, 1).expect("valid");
                    continue;
                }
            };
            let error = method.recipe(&base, 1).expect_err(&method.name()).to_string();
            assert!(error.contains(&format!("`{key}` is ")) && error.contains("[lora]"), "{error}");
        }
    }

    #[test]
    fn methods_are_found_by_their_names() {
        for method in Method::all() {
            assert_eq!(Method::named(&method.name()), Some(method));
        }
        assert_eq!(Method::named("ppo2"), None);
    }

    #[test]
    fn figures_are_those_of_the_lines() {
        let lines = [
            json!({"step": 1, "mismatch": {"kl": 0.5, "rho_max": 3.0}, "clip_fraction_upper": 0.25,
                   "clip_fraction_lower": 0.25, "response_tokens": 10, "timing": {"rollout": 0.5}}),
            json!({"step": 2, "mismatch": {"kl": 0.25, "rho_max": 2.0}, "clip_fraction_upper": 0.0,
                   "clip_fraction_lower": 0.0, "response_tokens": 30, "timing": {"rollout": 1.5},
                   "test_accuracy": 0.5, "test_avg_at_k": 0.25, "skipped_updates": 1}),
            json!({"step": 3, "mismatch": null, "test_accuracy": 0.75, "test_avg_at_k": 0.125}),
        ];
        let before = Tested { accuracy: 0.625, reward: None, avg_at_k: Some(0.1875) };
        let figures = RunFigures::of(before, &lines, Some(4));
        assert_eq!((figures.accuracy_before, figures.accuracy_final), (0.625, 0.75));
        assert_eq!(figures.avg_at_k_final, Some(0.125));
        assert_eq!((figures.accuracy_best, figures.best_step), (0.25, 2), "by Avg@k, where it is measured");
        assert_eq!((figures.mismatch_kl, figures.mismatch_kl_max, figures.rho_max), (0.375, 0.5, 3.0));
        assert_eq!((figures.tokens_per_s(), figures.skipped_updates), (20.0, 1));
        assert_eq!(figures.broken_at, Some(4));
        let nothing = RunFigures::of(before, &[], None);
        assert_eq!((nothing.accuracy_best, nothing.best_step), (0.1875, 0));
    }

    #[test]
    fn spread_of_seeds() {
        let spread = Spread::of([1.0, 2.0, 3.0].into_iter());
        assert!((spread.mean - 2.0).abs() < 1e-12 && (spread.deviation - 1.0).abs() < 1e-12);
        assert_eq!(Spread::of([4.0].into_iter()).deviation, 0.0);
    }
}
