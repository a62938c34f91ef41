//! What to switch on where a run does not fit: one switch after the other, the cheapest first, each with the
//! memory that a plan with it takes, until one fits.

use super::MemoryPlan;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, RlPlan};
use qurl_kernels::types::MomentFormat;
use qurl_kernels::{Device, DeviceError};
use qurl_model::ModelConfig;
use qurl_model::compute::Recompute;

/// A switch, by the key that sets it.
type Switch = (&'static str, fn(&mut Recipe, &mut RlPlan) -> bool);

/// By what they cost: a few percent of a backward pass, a second of an update, one GEMM more of each MLP, a
/// forward pass more but for its down projections, bits of the moments. Each says whether it changed
/// something.
const SWITCHES: [Switch; 5] = [
    ("trainer.pack_once = true", |recipe, _| {
        recipe.lora.is_none() && !std::mem::replace(&mut recipe.trainer.pack_once, true)
    }),
    ("actor.optim.offload = true", |recipe, plan| {
        recipe.lora.is_none() && !std::mem::replace(&mut plan.actor.optim.offload, true)
    }),
    ("trainer.recompute = \"mlp\"", |recipe, _| recompute_more(recipe, Recompute::Mlp)),
    ("trainer.recompute = \"block\"", |recipe, _| recompute_more(recipe, Recompute::Block)),
    ("actor.optim.moments = \"8bit\"", |recipe, plan| {
        let moments = std::mem::replace(&mut plan.actor.optim.moments, MomentFormat::EightBit);
        recipe.lora.is_none() && moments != MomentFormat::EightBit
    }),
];

/// Computes more again than so far, if it is more.
fn recompute_more(recipe: &mut Recipe, what: Recompute) -> bool {
    let more = recipe.trainer.recompute < what;
    if more {
        recipe.trainer.recompute = what;
    }
    more
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
        let budget = recipe.memory_budget();
        match self.check(device, budget) {
            Err(DeviceError::OutOfMemory { device: on, need, what }) => {
                let (mut recipe, mut plan) = (recipe.clone(), plan.clone());
                let mut text = String::new();
                for (key, switch) in SWITCHES {
                    if !switch(&mut recipe, &mut plan) {
                        continue;
                    }
                    // A format that the counting device does not have was in the plan at hand, too.
                    let Ok(with) = MemoryPlan::of_rl(device, &recipe, &plan, config, ranks) else { break };
                    let too = if text.is_empty() { "" } else { " as well" };
                    text.push_str(&format!("; with {key}{too} {} MiB", with.total() >> 20));
                    if with.check(device, budget).is_ok() {
                        text.push_str(", which fits");
                        break;
                    }
                }
                Err(DeviceError::OutOfMemory { device: on, need, what: what + &text })
            }
            other => other,
        }
    }
}
