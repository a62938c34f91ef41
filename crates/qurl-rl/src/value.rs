//! The critic: its loss, and how much of the returns it explains.

use crate::error::{RlError, same_length};
use crate::stats;

/// Loss of the critic on a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueLoss {
    /// Σ weight · ½·max((v−R)², (clip(v)−R)²).
    pub loss: f64,
    /// dL/dv of every token.
    pub dvalue: Vec<f64>,
    /// Tokens whose value has moved out of the clip range in the wrong direction and so has no gradient.
    pub clipped: u64,
    /// Number of tokens that count.
    pub tokens: u64,
}

/// Squared error to the returns. With `cliprange_value` the value is also held within that distance of what
/// the critic said at rollout time (`old_values`), and the worse of the two errors counts.
pub fn value_loss<F: Copy + Into<f64>>(
    values: &[F],
    old_values: &[F],
    returns: &[F],
    mask: &[bool],
    weight: &[f64],
    cliprange_value: Option<f64>,
) -> Result<ValueLoss, RlError> {
    let n = values.len();
    same_length("old_values", old_values.len(), "values", n)?;
    same_length("returns", returns.len(), "values", n)?;
    same_length("mask", mask.len(), "values", n)?;
    same_length("weight", weight.len(), "values", n)?;
    let range = cliprange_value.unwrap_or(f64::INFINITY);
    crate::error::setting(range > 0.0, "cliprange_value", range, "a number above 0")?;
    let mut out = ValueLoss { loss: 0.0, dvalue: vec![0.0; n], clipped: 0, tokens: 0 };
    for t in (0..n).filter(|&t| mask[t]) {
        let (v, old, target): (f64, f64, f64) = (values[t].into(), old_values[t].into(), returns[t].into());
        let error = v - target;
        let held = v.max(old - range).min(old + range) - target;
        out.tokens += 1;
        if held * held > error * error {
            out.loss += weight[t] * 0.5 * held * held;
            out.clipped += 1;
        } else {
            out.loss += weight[t] * 0.5 * error * error;
            out.dvalue[t] = weight[t] * error;
        }
    }
    Ok(out)
}

/// 1 − Var(returns − values)/Var(returns): 1 is a perfect critic, 0 one that knows only the mean. Nothing
/// where the returns do not vary.
pub fn explained_variance<F: Copy + Into<f64>>(
    values: &[F],
    returns: &[F],
    mask: &[bool],
) -> Result<Option<f64>, RlError> {
    same_length("returns", returns.len(), "values", values.len())?;
    same_length("mask", mask.len(), "values", values.len())?;
    let targets: Vec<f64> = stats::masked(returns, mask).collect();
    let errors: Vec<f64> =
        targets.iter().zip(stats::masked(values, mask)).map(|(target, v)| target - v).collect();
    let total = stats::variance(&targets, stats::mean(&targets));
    let left = stats::variance(&errors, stats::mean(&errors));
    Ok((total > 0.0).then(|| 1.0 - left / total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_by_hand() {
        // Outside the range away from the target: clipped. Outside but nearer to the target: the clip is
        // worse and holds. Outside and past it on the far side: the plain error is worse and counts.
        let out = value_loss(
            &[1.0f64, 0.9, 2.0],
            &[0.0, 0.0, 0.0],
            &[2.0, 1.0, 0.2],
            &[true; 3],
            &[1.0; 3],
            Some(0.5),
        )
        .unwrap();
        assert_eq!(out.clipped, 2);
        assert_eq!(out.dvalue, [0.0, 0.0, 1.8]);
        assert!((out.loss - 0.5 * (1.5f64.powi(2) + 0.5f64.powi(2) + 1.8f64.powi(2))).abs() < 1e-12);
    }

    #[test]
    fn without_a_range_it_is_the_squared_error() {
        let out = value_loss(&[3.0f64], &[0.0], &[1.0], &[true], &[0.5], None).unwrap();
        assert_eq!((out.loss, out.dvalue[0], out.clipped), (1.0, 1.0, 0));
        assert!(value_loss(&[3.0f64], &[0.0], &[1.0], &[true], &[0.5], Some(0.0)).is_err());
        assert!(value_loss(&[3.0f64], &[], &[1.0], &[true], &[0.5], None).is_err());
    }

    #[test]
    fn explained() {
        let returns = [1.0f64, 2.0, 4.0, 99.0];
        let mask = [true, true, true, false];
        let of = |values: [f64; 4]| explained_variance(&values, &returns, &mask).unwrap();
        assert_eq!(of([1.0, 2.0, 4.0, 0.0]), Some(1.0));
        assert!(of([3.0, 3.0, 3.0, 0.0]).unwrap().abs() < 1e-12);
        assert!(of([-1.0, -2.0, -4.0, 0.0]).unwrap() < 0.0);
        assert_eq!(explained_variance(&[1.0f64; 2], &[5.0; 2], &[true; 2]).unwrap(), None);
    }
}
