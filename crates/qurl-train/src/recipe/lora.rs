//! `[lora]`: low-rank adapters are trained beside a frozen base.

use super::{Check, Recipe, RecipeError, format_name, schema};
use crate::learner::LoraOptions;
use qurl_kernels::Format;
use qurl_model::Lora;
use qurl_model::lora::{Module, Modules};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// `[lora]`: train low-rank adapters (LoRA) beside the frozen model of `model.path` instead of the model.
/// The run's model is then a directory of adapters as PEFT writes it; `qurl merge` makes a whole model of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSource {
    /// Rows of the first and columns of the second matrix of an adapter.
    pub rank: usize,
    /// The update is scaled by alpha / rank.
    pub alpha: f64,
    /// Scale by alpha / sqrt(rank) instead (rsLoRA).
    pub rslora: bool,
    /// Dropout before the adapters. Only 0 is computed: with dropout, training and rollouts would be
    /// different models.
    pub dropout: f64,
    /// Linear layers that have an adapter: some of `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`,
    /// `up_proj` and `down_proj`, or `"all-linear"` for all of them.
    pub target_modules: TargetModules,
    /// Number format of the frozen base, which is held once: trainer, rollouts and reference share it. In
    /// reinforcement learning it is `rollout.format`; in supervised training `trainer.compute` where it is
    /// not given.
    #[serde(with = "optional_format", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::formats")]
    pub base_format: Option<Format>,
    /// Directory of an adapter, as PEFT or a run has written it, to continue from; its rank, alpha, scaling
    /// and modules must be those of this section. By default a new one, which changes nothing yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
}

impl Default for LoraSource {
    fn default() -> Self {
        LoraSource {
            rank: 32,
            alpha: 64.0,
            rslora: false,
            dropout: 0.0,
            target_modules: TargetModules::Name("all-linear".to_string()),
            base_format: None,
            path: None,
        }
    }
}

/// Which linear layers: a list of names, or one name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TargetModules {
    /// `all-linear`, or a module.
    Name(String),
    /// Modules.
    Names(Vec<String>),
}

impl TargetModules {
    fn names(&self) -> Vec<&str> {
        match self {
            TargetModules::Name(name) => vec![name],
            TargetModules::Names(names) => names.iter().map(String::as_str).collect(),
        }
    }

    fn modules(&self) -> Option<Modules> {
        if matches!(self, TargetModules::Name(name) if name == "all-linear") {
            return Some(Modules::ALL);
        }
        let modules: Option<Vec<Module>> = self.names().into_iter().map(Module::of_name).collect();
        modules.filter(|modules| !modules.is_empty()).map(Modules::of)
    }
}

impl LoraSource {
    /// The adapters. Modules that are not known have been refused.
    pub fn lora(&self) -> Lora {
        let targets = self.target_modules.modules().unwrap_or(Modules::ALL);
        Lora { rank: self.rank, alpha: self.alpha, rslora: self.rslora, targets }
    }

    fn check(&self, recipe: &Recipe, check: Check) -> Result<(), RecipeError> {
        check.that("lora.dropout", self.dropout, self.dropout == 0.0, "0: dropout is not computed")?;
        let (known, found) = (Modules::ALL, format!("{:?}", self.target_modules.names()));
        let expected = format!("\"all-linear\", or a list of some of {known}");
        check.that("lora.target_modules", found, self.target_modules.modules().is_some(), &expected)?;
        let there = if recipe.model.path.is_some() { "there" } else { "missing" };
        let expected = "there: adapters are trained beside a model that exists";
        check.that("model.path", there, recipe.model.path.is_some(), expected)?;
        let both = recipe.sft.is_some() && recipe.data.is_some();
        let expected = "no section beside [lora] and reinforcement learning: a warm start trains the whole \
                        model; train adapters with `qurl sft` first and continue from `lora.path`";
        check.that("sft", "there", !both, expected)?;
        check.that("critic", "there", recipe.critic.is_none(), "no section beside [lora]")?;
        let sections = [
            ("actor", recipe.actor.as_ref().map(|actor| actor.optim)),
            ("sft", recipe.sft.as_ref().map(|sft| sft.optim)),
        ];
        for (section, optim) in sections {
            let Some(optim) = optim else { continue };
            for (key, factor) in
                [("lr_factor_matrices", optim.lr_factor_matrices), ("lr_factor_norms", optim.lr_factor_norms)]
            {
                let key = format!("{section}.optim.{key}");
                check.that(&key, factor, factor == 1.0, "1 beside [lora]: these leaves are frozen")?;
            }
        }
        let (compute, format) = (recipe.trainer.compute, recipe.base_format());
        let fits = (compute == Format::F32) == (format == Format::F32);
        let key = if recipe.data.is_some() { "rollout.format" } else { "lora.base_format" };
        let expected = match compute {
            Format::F32 => "f32, as trainer.compute",
            _ => "bf16 or fewer bits, where trainer.compute is bf16",
        };
        check.that(key, format, fits, expected)?;
        let (None, Some(_)) = (&recipe.sft, &recipe.data) else { return Ok(()) };
        let rollout = recipe.rollout.clone().unwrap_or_default();
        if let Some(base) = self.base_format {
            let expected = format!("rollout.format = {format}: trainer and rollouts share one base");
            check.that("lora.base_format", base, base == format, &expected)?;
        }
        check.that("rollout.uaq", rollout.uaq, rollout.uaq == 1.0, "1 beside [lora]: the base is frozen")?;
        let (key, found) = ("rollout.stochastic_rounding", rollout.stochastic_rounding);
        check.that(key, found, !found, "false beside [lora]: the base is packed once")?;
        let expected = "no section beside [lora]: workers hold whole models";
        check.that("rollout.workers", "there", rollout.workers.is_none(), expected)?;
        let newest = recipe.trainer.forward == super::Forward::default();
        let expected = "its default beside [lora]: training runs the rollout's weights anyway";
        check.that("trainer.forward", "there", newest, expected)?;
        check.that("rollout.lag", rollout.lag, rollout.lag == 0, "0 beside [lora]")?;
        let stages = recipe.run.as_ref().map_or(&[][..], |run| &run.stages);
        for (i, stage) in stages.iter().enumerate() {
            let key = format!("run.stages[{i}].new_reference");
            let expected = "false beside [lora]: the reference is the base without adapters";
            check.that(&key, stage.new_reference, !stage.new_reference, expected)?;
        }
        Ok(())
    }
}

impl Recipe {
    pub(super) fn check_lora(&self, check: Check) -> Result<(), RecipeError> {
        self.lora.as_ref().map_or(Ok(()), |lora| lora.check(self, check))
    }

    /// Where the model is that training starts from: the adapters, where they continue from some.
    pub fn start_path(&self) -> Option<&PathBuf> {
        let adapters = self.lora.as_ref().and_then(|lora| lora.path.as_ref());
        adapters.or(self.model.path.as_ref())
    }

    /// Number format of the frozen base beside adapters.
    fn base_format(&self) -> Format {
        let rollout = || self.rollout.clone().unwrap_or_default().format;
        let given = self.lora.as_ref().and_then(|lora| lora.base_format);
        match self.data {
            Some(_) => rollout(),
            None => given.unwrap_or(self.trainer.compute),
        }
    }

    /// How the learner's adapters are computed, where there are some.
    pub fn lora_options(&self) -> Option<LoraOptions> {
        let lora = self.lora.as_ref()?.lora();
        let rollout = self.rollout.as_ref().filter(|_| self.data.is_some());
        let quantize_head = rollout.is_some_and(|rollout| rollout.quantize_head);
        Some(LoraOptions { lora, base_format: self.base_format(), quantize_head })
    }
}

/// A format by its name, or none.
mod optional_format {
    use super::format_name;
    use qurl_kernels::Format;
    use serde::{Deserializer, Serializer};

    pub fn serialize<S: Serializer>(format: &Option<Format>, serializer: S) -> Result<S::Ok, S::Error> {
        match format {
            Some(format) => format_name::serialize(format, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Option<Format>, D::Error> {
        format_name::deserialize(deserializer).map(Some)
    }
}
