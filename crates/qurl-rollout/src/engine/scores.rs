//! What a step says beside the tokens that it samples: log-probs of prompts, and the most probable tokens.

use super::Engine;
use crate::error::RolloutError;
use crate::request::TopTokens;
use qurl_kernels::Device;
use qurl_model::compute::Targets;

impl<D: Device> Engine<D> {
    /// Log-probs of the prompts that asked for them, as far as this step has computed them for the first
    /// time. They are read at once, since the next step overwrites its rows.
    pub(super) fn score_prompts(&mut self, queue: &mut D::Queue) -> Result<(), RolloutError> {
        if !self.prompts_are_scored {
            return Ok(());
        }
        let scheduled = self.scheduler.running().iter().filter(|s| !s.rows().is_empty());
        for (sequence, span) in scheduled.zip(&self.rows.batch.spans) {
            let Some(pending) = self.pending.get_mut(&sequence.id().request) else { continue };
            let (prompt, done) = (sequence.prompt(), pending.prompt_logprobs.len());
            let rows = done..sequence.rows().end.min(prompt.len() - 1);
            if !pending.request.prompt_logprobs || rows.is_empty() || rows.start < span.position {
                continue;
            }
            let first = (span.row + rows.start - span.position) as u32;
            let targets = Targets {
                rows: (first..first + rows.len() as u32).collect(),
                tokens: prompt[rows.start + 1..rows.end + 1].to_vec(),
            };
            let temperature = pending.request.sampling.logp_temperature();
            let out = self.work.head(queue, &self.network, &targets, temperature)?;
            pending.prompt_logprobs.extend(out.logp);
            if let count @ 1.. = pending.request.prompt_top_logprobs {
                let factors = vec![1.0 / temperature; targets.rows.len()];
                let top = self.work.top(queue, &self.network, &targets.rows, &factors, count)?;
                pending.prompt_top.extend(top);
            }
        }
        Ok(())
    }

    /// The most probable tokens for the sampled rows of the step whose requests want them, by the rows'
    /// places; read at once, too.
    pub(super) fn top_tokens(
        &mut self,
        queue: &mut D::Queue,
    ) -> Result<Vec<(usize, TopTokens)>, RolloutError> {
        if !self.wants_top {
            return Ok(Vec::new());
        }
        let batch = &self.rows.batch;
        let sampling = self.scheduler.running().iter().filter(|s| s.samples()).zip(&batch.sampled_rows);
        let (mut places, mut rows, mut factors, mut counts) = (vec![], vec![], vec![], vec![]);
        for (place, (sequence, &row)) in sampling.enumerate() {
            if let count @ 1.. = sequence.request().top_logprobs {
                places.push(place);
                rows.push(row);
                factors.push(batch.samples[place].inverse_temperature());
                counts.push(count);
            }
        }
        let Some(&most) = counts.iter().max() else { return Ok(Vec::new()) };
        let top = self.work.top(queue, &self.network, &rows, &factors, most)?;
        let cut = |(mut top, count): (TopTokens, usize)| {
            top.truncate(count);
            top
        };
        Ok(places.into_iter().zip(top.into_iter().zip(counts).map(cut)).collect())
    }
}
