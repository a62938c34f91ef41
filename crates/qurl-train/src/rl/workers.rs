//! Rollouts by other processes ([`crate::workers`]): what the trainer says to its pool.
//!
//! Each version of the weights is published as soon as it is there. With a lag, the prompts of the next steps
//! are handed out before the trainer learns from those of this step, so that workers sample meanwhile: all of
//! the next `lag` steps, or with dynamic sampling the first batch of the next, since which prompts follow
//! depends on what comes of them.

use super::{RlTrainer, TrainError};
use crate::recipe::Workers;
use crate::solve::{SolveError, SolveOptions, Solved, draw_problems, requests, solve, solve_with};
use crate::workers::{Pool, PoolOptions, spot};
use qurl_kernels::{Device, Queue};
use qurl_rollout::{Group, Request, RolloutError};
use qurl_tasks::task::{Problem, Split};
use std::sync::Arc;
use std::time::Duration;

impl<D: Device> RlTrainer<D> {
    /// Lets workers of this program sample from now on, as these settings say. `stop` says when waiting for
    /// them is to end, and is told whether nobody is there who could end it.
    ///
    /// # Panics
    /// With several ranks, which the caller refuses.
    pub fn open_pool(
        &mut self,
        settings: &Workers,
        program: &str,
        stop: impl Fn(bool) -> bool + Send + Sync + 'static,
    ) -> Arc<Pool> {
        assert_eq!(self.ranks.size(), 1, "workers are for runs of one rank");
        let options = PoolOptions {
            program: program.to_string(),
            kind: self.queue.device().info().kind,
            any_device: settings.any_device,
            lease: Duration::from_secs(settings.lease_s),
            spot_check: settings.spot_check,
            without: settings.without,
            versions: self.plan.rollout.lag as usize + 2,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
        };
        let (config, network) = (&self.start.config, *self.engine.network().options());
        let engine = self.plan.rollout.engine_options(&**self.queue.device());
        let pool = Arc::new(Pool::new(options, config, network, engine, stop));
        self.pool = Some(pool.clone());
        pool
    }

    /// Publishes the weights that the engine has.
    pub(super) fn publish(&mut self) -> Result<(), TrainError> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let weights = self.engine.weights().ok_or(RolloutError::NoWeights)?;
        pool.publish(weights, self.engine.network().export(&mut self.queue)?);
        Ok(())
    }

    /// The versions up to `newest`, from `wanted` on, that workers do not have yet.
    pub(super) fn unpublished(&self, wanted: u64, newest: u64) -> Vec<u64> {
        let missing = |pool: &Arc<Pool>| (wanted..=newest).filter(|&version| !pool.has(version)).collect();
        self.pool.as_ref().map_or(Vec::new(), missing)
    }

    /// Samples and judges a batch of prompts, by workers where there are some.
    pub(super) fn solve_batch(
        &mut self,
        problems: Vec<Problem>,
        options: SolveOptions,
    ) -> Result<(Vec<Solved>, f64), TrainError> {
        let Self { queue, engine, start, task, ranks, pool, .. } = self;
        let Some(pool) = pool else {
            return Ok(solve(queue, engine, start, &**task, problems, options, ranks)?);
        };
        let version = engine.weights().ok_or(RolloutError::NoWeights)?.version;
        let all = 0..problems.len();
        let generate = |requests: &[Request], give: &mut dyn FnMut(usize, Group) -> bool| {
            // Both closures want the engine, one at a time.
            let device = std::cell::RefCell::new((queue, engine));
            let groups = pool.collect(
                version,
                requests,
                |own| {
                    let (queue, engine) = &mut *device.borrow_mut();
                    engine.generate(queue, own).map_err(SolveError::from)
                },
                |spots| {
                    let (queue, engine) = &mut *device.borrow_mut();
                    spot::verify::<D>(queue, engine, spots, pool.same_kind()).map_err(SolveError::from)
                },
            )?;
            groups.into_iter().enumerate().all(|(number, group)| give(number, group));
            Ok(())
        };
        Ok(solve_with(start, &**task, problems, options, all, ranks, generate)?)
    }

    /// Hands out prompts of the next steps whose weights are there.
    pub(super) fn hand_out_ahead(&self) -> Result<(), TrainError> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let (lag, wanted) = (self.plan.rollout.lag, self.plan.data.train_batch_size as u64);
        let ahead = if self.plan.algorithm.filter_groups.is_some() { lag.min(1) } else { lag };
        let last = (self.step + ahead).min(self.plan.run.total_steps);
        for (step, batch) in (self.step + 1..=last).zip(0..) {
            let first = self.drawn + batch * wanted;
            let problems = draw_problems(&*self.task, Split::Train, self.seed, first, wanted)?;
            let requests = requests(&self.start, &problems, self.solve_options(step, 0))?;
            pool.submit(self.plan.rollout.version_at(step), &requests);
        }
        Ok(())
    }
}
