//! Arithmetic on single rows in host memory, for what has no kernel on the devices.
//!
//! Each function's order of operations follows from the lengths of its arguments alone, never from how rows are
//! grouped, and nothing is contracted or reassociated by the compiler: results are the same bits on every machine.
//! Elementary functions come from a library that computes the same everywhere.

/// Partial sums of [`dot`]: element `i` goes to sum `i % 16`.
const LANES: usize = 16;

/// `Σ a[i]·b[i]` over the shorter length: 16 partial sums, then added in a tree.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let length = a.len().min(b.len());
    let (a, b) = (&a[..length], &b[..length]);
    let mut sums = [0.0f32; LANES];
    let (blocks_a, rest_a) = a.as_chunks::<LANES>();
    let (blocks_b, rest_b) = b.as_chunks::<LANES>();
    for (a, b) in blocks_a.iter().zip(blocks_b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(rest_a).zip(rest_b) {
        *sum += a * b;
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
    }
    sums[0]
}

/// `y[i] += factor · x[i]`.
pub fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// `1 / (1 + e^-x)`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

/// `x · sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + libm::expf(-x))
}

/// `ln(1 + e^x)`, without overflow.
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { libm::log1pf(libm::expf(x)) }
}

/// `e^x`.
pub fn exp(x: f32) -> f32 {
    libm::expf(x)
}

/// Softmax in place. An empty row stays empty.
pub fn softmax(x: &mut [f32]) {
    let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for value in x.iter_mut() {
        *value = libm::expf(*value - most);
        sum += *value;
    }
    for value in x.iter_mut() {
        *value /= sum;
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
pub fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// RMS norm in place, times `weight` if given.
pub fn rms_norm(x: &mut [f32], weight: Option<&[f32]>, eps: f32) {
    let factor = inverse_rms(x, eps);
    match weight {
        Some(weight) => x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * factor * w),
        None => x.iter_mut().for_each(|x| *x *= factor),
    }
}

/// LayerNorm in place: less the mean, over the deviation, times `weight`, plus `bias`.
pub fn layer_norm(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    x.iter_mut().for_each(|x| *x -= mean);
    let factor = 1.0 / (dot(x, x) / n + eps).sqrt();
    for ((x, w), b) in x.iter_mut().zip(weight).zip(bias) {
        *x = *x * factor * w + b;
    }
}

/// The `count` highest of `scores`, the lower index first among equals; highest first. All when there are fewer.
/// NaN counts as the lowest.
pub fn top_k(scores: &[f32], count: usize) -> Vec<u32> {
    let key = |index: u32| {
        let score = scores[index as usize];
        if score.is_nan() { f32::NEG_INFINITY } else { score }
    };
    let better = |a: &u32, b: &u32| key(*b).total_cmp(&key(*a)).then(a.cmp(b));
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    if count < order.len() && count > 0 {
        order.select_nth_unstable_by(count - 1, better);
    }
    order.truncate(count);
    order.sort_unstable_by(better);
    order
}

/// Attention of one query head over rows that are both keys and values: a row's first `query.len()` elements are the
/// key, its first `out.len()` the value. `sink`, if given, is a logit without a value. Rows are taken in order; with
/// no row, `out` is 0.
pub fn attend_shared(query: &[f32], rows: &[f32], width: usize, scale: f32, sink: Option<f32>, out: &mut [f32]) {
    out.fill(0.0);
    let mut weights: Vec<f32> = rows.chunks_exact(width).map(|row| scale * dot(query, row)).collect();
    let most = weights.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = sink.map_or(0.0, |sink| libm::expf(sink - most));
    for weight in &mut weights {
        *weight = libm::expf(*weight - most);
        sum += *weight;
    }
    for (weight, row) in weights.iter().zip(rows.chunks_exact(width)) {
        add_scaled(out, *weight, row);
    }
    if sum > 0.0 {
        out.iter_mut().for_each(|x| *x /= sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_takes_every_element_once() {
        for n in [0, 1, 15, 16, 17, 40] {
            let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let expected: f32 = a.iter().map(|x| x * x).sum();
            assert_eq!(dot(&a, &a), expected, "{n}");
        }
    }

    #[test]
    fn equal_scores_go_to_the_lower_index() {
        assert_eq!(top_k(&[1.0, 3.0, 3.0, 2.0, 3.0], 2), [1, 2]);
        assert_eq!(top_k(&[1.0, f32::NAN, 2.0], 5), [2, 0, 1]);
        assert!(top_k(&[], 3).is_empty() && top_k(&[1.0], 0).is_empty());
    }

    #[test]
    fn norms_are_those_of_the_definition() {
        let mut x = [3.0, -1.0, 2.0, 0.0];
        layer_norm(&mut x, &[1.0, 2.0, 1.0, 1.0], &[0.0, 0.5, 0.0, 0.0], 0.0);
        let deviation = 2.5f32.sqrt();
        for (got, expected) in
            x.iter().zip([2.0 / deviation, -4.0 / deviation + 0.5, 1.0 / deviation, -1.0 / deviation])
        {
            assert!((got - expected).abs() < 1e-6, "{got} is not {expected}");
        }
        let mut x = [3.0, 4.0];
        rms_norm(&mut x, Some(&[1.0, 2.0]), 0.0);
        let rms = 12.5f32.sqrt();
        assert!((x[0] - 3.0 / rms).abs() < 1e-6 && (x[1] - 8.0 / rms).abs() < 1e-6, "{x:?}");
    }

    #[test]
    fn a_sink_takes_its_share() {
        let rows = [1.0, 0.0, 0.0, 1.0];
        let mut out = [0.0; 2];
        attend_shared(&[0.0, 0.0], &rows, 2, 1.0, None, &mut out);
        assert_eq!(out, [0.5, 0.5]);
        attend_shared(&[0.0, 0.0], &rows, 2, 1.0, Some(0.0), &mut out);
        assert!((out[0] - 1.0 / 3.0).abs() < 1e-7 && out[0] == out[1], "{out:?}");
        attend_shared(&[0.0, 0.0], &[], 2, 1.0, None, &mut out);
        assert_eq!(out, [0.0, 0.0]);
    }

    #[test]
    fn softplus_neither_overflows_nor_vanishes() {
        for (x, expected) in [(0.0, std::f32::consts::LN_2), (30.0, 30.0), (-30.0, 9.357_623e-14), (1.0, 1.313_261_7)] {
            assert!((softplus(x) - expected).abs() <= 1e-6 * expected, "{x}: {}", softplus(x));
        }
    }
}
