//! What to set where a run does not fit: one setting after the other, the cheapest first, each with the
//! memory that a plan with it takes, until one fits. A setting that takes next to nothing off the plan is not
//! named.

use super::MemoryPlan;
use crate::optimizer::AdamWOptions;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, RlPlan, Sft, Updates};
use qurl_kernels::types::MomentFormat;
use qurl_kernels::{Device, DeviceError, Format};
use qurl_model::ModelConfig;
use qurl_model::compute::Recompute;

/// Who has an optimizer.
#[derive(Clone, Copy)]
enum Section {
    Actor,
    Critic,
    Sft,
}

/// Something that makes a plan smaller.
#[derive(Clone, Copy)]
enum Setting {
    PackOnce,
    Offload(Section),
    /// The frozen base beside adapters in fewer bits.
    Base(Format),
    Recompute(Recompute),
    SmallMoments(Section),
    /// Half of the memory for keys and values.
    HalfCache,
}

/// By what they cost: a few percent of a backward pass, a second of an update, bits of a frozen base, one
/// GEMM more of each MLP, a forward pass more but for its down projections, bits of the moments, more bits of
/// the base, responses at the same time.
const SETTINGS: [Setting; 12] = [
    Setting::PackOnce,
    Setting::Offload(Section::Actor),
    Setting::Offload(Section::Critic),
    Setting::Offload(Section::Sft),
    Setting::Base(Format::Int8),
    Setting::Recompute(Recompute::Mlp),
    Setting::Recompute(Recompute::Block),
    Setting::SmallMoments(Section::Actor),
    Setting::SmallMoments(Section::Critic),
    Setting::SmallMoments(Section::Sft),
    Setting::Base(Format::Int4),
    Setting::HalfCache,
];

/// Settings that save less than this part of what is needed are not named.
const WORTH_NAMING: usize = 100;

/// What a plan is made of; one of the two commands.
#[derive(Clone)]
struct Planned {
    recipe: Recipe,
    rl: Option<RlPlan>,
    sft: Option<Sft>,
}

impl Planned {
    fn plan<D: Device>(&self, device: &D, config: &ModelConfig, ranks: &Ranks) -> Option<MemoryPlan> {
        match (&self.rl, &self.sft) {
            (Some(rl), _) => MemoryPlan::of_rl(device, &self.recipe, rl, config, ranks).ok(),
            (None, Some(sft)) => MemoryPlan::of_sft(device, &self.recipe, sft, config, ranks).ok(),
            (None, None) => None,
        }
    }

    fn optimizer(&mut self, of: Section) -> Option<(&'static str, &mut AdamWOptions)> {
        match (of, &mut self.rl, &mut self.sft) {
            (Section::Actor, Some(rl), _) => Some(("actor", &mut rl.actor.optim)),
            (Section::Critic, Some(RlPlan { critic: Some(Updates { optim, .. }), .. }), _) => {
                Some(("critic", optim))
            }
            (Section::Sft, None, Some(sft)) => Some(("sft", &mut sft.optim)),
            _ => None,
        }
    }

    /// The same with a setting, and how it is written; `None` where it is set already or means nothing here.
    fn with(&self, setting: Setting) -> Option<(Planned, String)> {
        let mut with = self.clone();
        let text = match setting {
            Setting::PackOnce => {
                with.recipe.trainer.pack_once = true;
                "trainer.pack_once = true".to_string()
            }
            Setting::Recompute(what) => {
                with.recipe.trainer.recompute = with.recipe.trainer.recompute.max(what);
                format!("trainer.recompute = \"{what}\"")
            }
            Setting::Offload(of) => {
                let (name, optim) = with.optimizer(of)?;
                optim.offload = true;
                format!("{name}.optim.offload = true")
            }
            Setting::SmallMoments(of) => {
                let (name, optim) = with.optimizer(of)?;
                optim.moments = MomentFormat::EightBit;
                format!("{name}.optim.moments = \"8bit\"")
            }
            Setting::Base(format) => {
                let base = with.recipe.lora_options()?.base_format;
                // f32 is that of all of a run in f32.
                if base == Format::F32 || !narrower(format, base) {
                    return None;
                }
                let lora = with.recipe.lora.as_mut()?;
                match &mut with.rl {
                    Some(rl) => {
                        lora.base_format = None;
                        rl.rollout.format = format;
                        with.recipe.rollout = Some(rl.rollout.clone());
                        format!("rollout.format = \"{format}\"")
                    }
                    None => {
                        lora.base_format = Some(format);
                        format!("lora.base_format = \"{format}\"")
                    }
                }
            }
            Setting::HalfCache => {
                let megabytes = &mut with.rl.as_mut()?.rollout.kv_cache_mb;
                *megabytes = megabytes.div_ceil(2);
                format!("rollout.kv_cache_mb = {megabytes}")
            }
        };
        Some((with, text))
    }
}

/// Whether a format takes fewer bits for a weight than another.
fn narrower(format: Format, than: Format) -> bool {
    let bits = |format| match format {
        Format::F32 => 32,
        Format::Bf16 => 16,
        Format::Int8 | Format::Fp8 | Format::Fp8Block => 8,
        Format::Int4 | Format::Nvfp4 => 4,
    };
    bits(format) < bits(than)
}

impl MemoryPlan {
    /// [`MemoryPlan::check`] of a plan of reinforcement learning; the error says what would make it fit.
    pub fn check_rl<D: Device>(
        &self,
        device: &D,
        recipe: &Recipe,
        plan: &RlPlan,
        config: &ModelConfig,
        ranks: &Ranks,
    ) -> Result<(), DeviceError> {
        let planned = Planned { recipe: recipe.clone(), rl: Some(plan.clone()), sft: None };
        let lower = "lower trainer.micro_tokens or rollout.kv_cache_mb";
        self.check(device, recipe.memory_budget())
            .map_err(|e| advise(e, self, device, planned, config, ranks, lower))
    }

    /// The same of a plan of supervised training.
    pub fn check_sft<D: Device>(
        &self,
        device: &D,
        recipe: &Recipe,
        sft: &Sft,
        config: &ModelConfig,
        ranks: &Ranks,
    ) -> Result<(), DeviceError> {
        let planned = Planned { recipe: recipe.clone(), rl: None, sft: Some(sft.clone()) };
        let lower = "lower trainer.micro_tokens";
        self.check(device, recipe.memory_budget())
            .map_err(|e| advise(e, self, device, planned, config, ranks, lower))
    }
}

/// The error with what would make the run fit.
fn advise<D: Device>(
    error: DeviceError,
    refused: &MemoryPlan,
    device: &D,
    mut planned: Planned,
    config: &ModelConfig,
    ranks: &Ranks,
    lower: &str,
) -> DeviceError {
    let DeviceError::OutOfMemory { device: on, need, what } = error else { return error };
    let budget = planned.recipe.memory_budget();
    let (mut least, mut text) = (refused.needed(device), format!("; {lower}"));
    let mut too = "";
    for setting in SETTINGS {
        let Some((with, key)) = planned.with(setting) else { continue };
        // What cannot be counted, or made (a cache that holds no response), is no advice.
        let Some(plan) = with.plan(device, config, ranks) else { continue };
        let needed = plan.needed(device);
        if needed > least - least / WORTH_NAMING {
            continue;
        }
        text.push_str(&format!("; with {key}{too} {} MiB", needed >> 20));
        (planned, least, too) = (with, needed, " as well");
        if plan.check(device, budget).is_ok() {
            text.push_str(", which fits");
            break;
        }
    }
    DeviceError::OutOfMemory { device: on, need, what: what + &text }
}
