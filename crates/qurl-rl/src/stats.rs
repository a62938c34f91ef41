//! Small statistics over masked slices, all in `f64` and in token order.

/// The entries of `values` whose mask is set, as `f64`.
pub fn masked<'a, F: Copy + Into<f64>>(values: &'a [F], mask: &'a [bool]) -> impl Iterator<Item = f64> + 'a {
    values.iter().zip(mask).filter(|(_, m)| **m).map(|(v, _)| (*v).into())
}

/// Mean, or 0 of nothing. The first value is subtracted before summing, so that equal values have exactly
/// their own value as mean and a group of equal rewards has advantages of exactly zero.
pub fn mean(values: &[f64]) -> f64 {
    match values.first() {
        None => 0.0,
        Some(&first) => first + values.iter().map(|v| v - first).sum::<f64>() / values.len() as f64,
    }
}

/// Bessel-corrected variance around `mean`; 0 with fewer than two values.
pub fn variance(values: &[f64], mean: f64) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / (values.len() - 1) as f64
}

/// The q-quantile (0 ≤ q ≤ 1) of values sorted in ascending order, by nearest rank; 0 of nothing.
pub fn quantile_of_sorted(sorted: &[f64], q: f64) -> f64 {
    if sorted.is_empty() {
        return 0.0;
    }
    let rank = (q.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// Pearson correlation, or nothing where one side does not vary.
pub fn pearson(a: &[f64], b: &[f64]) -> Option<f64> {
    let (mean_a, mean_b) = (mean(a), mean(b));
    let (mut cov, mut var_a, mut var_b) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        let (dx, dy) = (x - mean_a, y - mean_b);
        cov += dx * dy;
        var_a += dx * dx;
        var_b += dy * dy;
    }
    let norm = var_a.sqrt() * var_b.sqrt();
    (norm > 0.0).then(|| (cov / norm).clamp(-1.0, 1.0))
}

/// Effective sample size as a share: 1/mean((w/mean w)²), 1 for equal weights; 0 where all weights are 0.
pub fn effective_sample_share(count: u64, sum: f64, sum_of_squares: f64) -> f64 {
    if count == 0 || sum_of_squares == 0.0 {
        return 0.0;
    }
    sum * sum / (count as f64 * sum_of_squares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_have_their_own_mean() {
        let values = [0.1; 7];
        assert_eq!(mean(&values), 0.1);
        assert_eq!(variance(&values, mean(&values)), 0.0);
        assert_eq!((mean(&[]), variance(&[3.0], 3.0)), (0.0, 0.0));
    }

    #[test]
    fn quantiles_by_nearest_rank() {
        let sorted = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(quantile_of_sorted(&sorted, 0.0), 1.0);
        assert_eq!(quantile_of_sorted(&sorted, 0.5), 2.0);
        assert_eq!(quantile_of_sorted(&sorted, 0.51), 3.0);
        assert_eq!(quantile_of_sorted(&sorted, 1.0), 4.0);
        assert_eq!(quantile_of_sorted(&[], 0.5), 0.0);
    }

    #[test]
    fn correlation_of_lines() {
        let x = [1.0, 2.0, 4.0];
        let close = |a: Option<f64>, b: f64| assert!((a.unwrap() - b).abs() < 1e-15);
        close(pearson(&x, &[3.0, 5.0, 9.0]), 1.0);
        close(pearson(&x, &[-1.0, -2.0, -4.0]), -1.0);
        assert_eq!(pearson(&x, &[1.0; 3]), None);
    }

    #[test]
    fn sample_share() {
        assert_eq!(effective_sample_share(4, 8.0, 16.0), 1.0);
        assert_eq!(effective_sample_share(4, 1.0, 1.0), 0.25);
        assert_eq!(effective_sample_share(0, 0.0, 0.0), 0.0);
    }
}
