//! The coefficient of a KL penalty: constant, or steered towards a target divergence.

use crate::error::{RlError, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One update may change an adaptive coefficient by at most this share per horizon.
const MAX_ERROR: f64 = 0.2;

/// How the coefficient is chosen (`kl_ctrl`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum KlControl {
    /// The same through the whole run.
    Fixed {
        /// The coefficient.
        #[serde(default = "default_coefficient")]
        kl_coef: f64,
    },
    /// Grows while the divergence is above target, shrinks while it is below.
    Adaptive {
        /// The coefficient at the start.
        #[serde(default = "default_coefficient")]
        kl_coef: f64,
        /// The KL to aim at.
        #[serde(default = "default_target")]
        target_kl: f64,
        /// Samples over which the coefficient may follow an error once: more is slower and steadier.
        #[serde(default = "default_horizon")]
        horizon: f64,
    },
}

fn default_coefficient() -> f64 {
    1e-3
}

fn default_target() -> f64 {
    0.1
}

fn default_horizon() -> f64 {
    10_000.0
}

impl Default for KlControl {
    fn default() -> Self {
        Self::Fixed { kl_coef: default_coefficient() }
    }
}

impl KlControl {
    /// Checks the settings.
    pub fn check(&self) -> Result<(), RlError> {
        let (Self::Fixed { kl_coef } | Self::Adaptive { kl_coef, .. }) = *self;
        setting(kl_coef.is_finite() && kl_coef >= 0.0, "kl_coef", kl_coef, "a finite number not below 0")?;
        if let Self::Adaptive { target_kl, horizon, .. } = *self {
            let expected = "a finite number above 0";
            setting(target_kl.is_finite() && target_kl > 0.0, "target_kl", target_kl, expected)?;
            setting(horizon.is_finite() && horizon > 0.0, "horizon", horizon, expected)?;
        }
        Ok(())
    }

    /// Checks the settings for updates of at most so many samples: an adaptive coefficient that an update can
    /// make 0 stays 0.
    pub fn check_samples(&self, samples: usize) -> Result<(), RlError> {
        let Self::Adaptive { horizon, .. } = *self else { return Ok(()) };
        let expected = "more than a fifth of the responses of a step (data.train_batch_size times the \
                        largest n): one update could make the coefficient 0 for ever";
        setting(horizon > MAX_ERROR * samples as f64, "horizon", horizon, expected)
    }
}

/// A coefficient in use: part of the state of a run, saved in its checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct KlCoefficient {
    control: KlControl,
    value: f64,
}

impl KlCoefficient {
    /// The coefficient at the start of a run.
    pub fn new(control: KlControl) -> Result<Self, RlError> {
        control.check()?;
        let (KlControl::Fixed { kl_coef } | KlControl::Adaptive { kl_coef, .. }) = control;
        Ok(Self { control, value: kl_coef })
    }

    /// The coefficient now.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Adapts to the divergence measured on `samples` sequences. A measurement that is not finite is ignored.
    pub fn update(&mut self, measured_kl: f64, samples: usize) {
        if let KlControl::Adaptive { target_kl, horizon, .. } = self.control
            && measured_kl.is_finite()
        {
            let error = (measured_kl / target_kl - 1.0).clamp(-MAX_ERROR, MAX_ERROR);
            self.value *= (1.0 + error * samples as f64 / horizon).max(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_stays() {
        let mut k = KlCoefficient::new(KlControl::Fixed { kl_coef: 0.02 }).unwrap();
        k.update(100.0, 1000);
        assert_eq!(k.value(), 0.02);
    }

    #[test]
    fn adaptive_moves_towards_the_target() {
        let control = KlControl::Adaptive { kl_coef: 0.1, target_kl: 1.0, horizon: 100.0 };
        let mut k = KlCoefficient::new(control).unwrap();
        k.update(1.1, 50); // error 0.1, half a horizon
        assert!((k.value() - 0.1 * 1.05).abs() < 1e-15);
        k.update(9.0, 50); // error limited to 0.2
        assert!((k.value() - 0.1 * 1.05 * 1.1).abs() < 1e-15);
        let before = k.value();
        k.update(1.0, 50);
        assert_eq!(k.value(), before);
        k.update(f64::NAN, 50);
        assert_eq!(k.value(), before);
        k.update(0.0, 50); // error limited to −0.2
        assert!((k.value() - before * 0.9).abs() < 1e-15);
        k.update(0.0, 100_000); // never negative
        assert_eq!(k.value(), 0.0);
        k.update(9.0, 50); // and 0 for ever, so it is refused
        assert_eq!(k.value(), 0.0);
        assert_eq!(control.check_samples(499), Ok(()));
        assert!(matches!(control.check_samples(500), Err(RlError::Setting { key: "horizon", .. })));
        assert_eq!(KlControl::default().check_samples(usize::MAX), Ok(()));
    }

    #[test]
    fn settings_are_checked_and_named() {
        assert!(KlCoefficient::new(KlControl::Fixed { kl_coef: -1.0 }).is_err());
        let zero_horizon = KlControl::Adaptive { kl_coef: 0.1, target_kl: 1.0, horizon: 0.0 };
        assert!(matches!(zero_horizon.check(), Err(RlError::Setting { key: "horizon", .. })));
        let parsed: KlControl = serde_json::from_str(r#"{"type":"adaptive","target_kl":0.2}"#).unwrap();
        let expected = KlControl::Adaptive { kl_coef: 1e-3, target_kl: 0.2, horizon: 1e4 };
        assert_eq!(parsed, expected);
        assert!(serde_json::from_str::<KlControl>(r#"{"type":"fixed","target_kl":0.2}"#).is_err());
    }
}
