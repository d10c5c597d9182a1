use super::*;

/// Natural logarithms of these probabilities are logits with exactly that softmax.
fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

fn sample_at(row: &[f32], params: &SamplingParams, position: u64) -> u32 {
    let generated = HashMap::new();
    let draw = Draw { params, seed: 11, position, generated: &generated, masked: &[] };
    Sampler::default().sample(&mut row.to_vec(), &draw).unwrap()
}

/// Relative frequencies over many positions.
fn frequencies(row: &[f32], params: &SamplingParams) -> Vec<f64> {
    const N: u64 = 20_000;
    let mut counts = vec![0u64; row.len()];
    for position in 0..N {
        counts[sample_at(row, params, position) as usize] += 1;
    }
    counts.into_iter().map(|c| c as f64 / N as f64).collect()
}

#[track_caller]
fn assert_near(found: &[f64], expected: &[f64]) {
    for (f, e) in found.iter().zip(expected) {
        // Tokens that were dropped must never appear; 0.015 is over four standard deviations.
        assert!(if *e == 0.0 { *f == 0.0 } else { (f - e).abs() < 0.015 }, "{found:?} {expected:?}");
    }
    assert_eq!(found.len(), expected.len());
}

const FOUR: [f32; 4] = [0.1, 0.4, 0.2, 0.3];

#[test]
fn plain_sampling_follows_the_softmax() {
    let found = frequencies(&logits(&FOUR), &SamplingParams::default());
    assert_near(&found, &[0.1, 0.4, 0.2, 0.3]);
}

#[test]
fn temperature_sharpens_before_the_softmax() {
    // Halving the temperature squares the probabilities: 1, 16, 4, 9 of 30.
    let params = SamplingParams { temperature: 0.5, ..Default::default() };
    let found = frequencies(&logits(&FOUR), &params);
    assert_near(&found, &[1.0 / 30.0, 16.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0]);
}

#[test]
fn top_k_keeps_the_likeliest_and_renormalises() {
    let params = SamplingParams { top_k: Some(2), ..Default::default() };
    assert_near(&frequencies(&logits(&FOUR), &params), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    let ties = SamplingParams { top_k: Some(2), ..Default::default() };
    assert_near(&frequencies(&[1.0, 1.0, 1.0, 1.0], &ties), &[0.5, 0.5, 0.0, 0.0]);
}

#[test]
fn top_p_judges_the_probability_before_a_token() {
    // Before the tokens by rank: 0, 0.4, 0.7, 0.9. At 0.5 the second is kept, the third is not.
    let params = SamplingParams { top_p: 0.5, ..Default::default() };
    assert_near(&frequencies(&logits(&FOUR), &params), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
    let params = SamplingParams { top_p: 0.75, ..Default::default() };
    assert_near(&frequencies(&logits(&FOUR), &params), &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
    // Exactly representable: at 0.5 a token with 0.5 before it is still kept.
    let halves = logits(&[0.5, 0.25, 0.25]);
    let params = SamplingParams { top_p: 0.5, ..Default::default() };
    assert_near(&frequencies(&halves, &params), &[2.0 / 3.0, 1.0 / 3.0, 0.0]);
}

#[test]
fn min_p_is_relative_to_the_likeliest() {
    // 0.6 of 0.4 is 0.24.
    let params = SamplingParams { min_p: 0.6, ..Default::default() };
    assert_near(&frequencies(&logits(&FOUR), &params), &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
}

#[test]
fn filters_are_judged_on_the_same_distribution() {
    // Renormalised after top_k = 3 the third token would have 7/9 = 0.78 before it and fall to
    // top_p = 0.75; on the original distribution it has 0.7 and stays.
    let params = SamplingParams { top_k: Some(3), top_p: 0.75, min_p: 0.1, ..Default::default() };
    assert_near(&frequencies(&logits(&FOUR), &params), &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
}

#[test]
fn tiny_top_p_is_greedy() {
    let params = SamplingParams { top_p: 1e-6, ..Default::default() };
    for position in 0..50 {
        assert_eq!(sample_at(&logits(&FOUR), &params, position), 1);
    }
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    let params = SamplingParams { temperature: 0.0, ..Default::default() };
    assert_eq!(sample_at(&[0.0, 2.0, 2.0, 1.0], &params, 0), 1);
}

#[test]
fn penalties_by_hand() {
    let params = SamplingParams {
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        repetition_penalty: 2.0,
        ..Default::default()
    };
    let generated = HashMap::from([(0, 2), (1, 1), (3, 4)]);
    let mut row = vec![3.25, -1.0, 5.0, 1.0];
    penalise(&mut row, &params, &generated);
    // 3.25 - 1 - 0.25 = 2, halved; -1 - 0.75, doubled; untouched; 1 - 2.25 = -1.25, doubled.
    assert_eq!(row, [1.0, -3.5, 5.0, -2.5]);
}

#[test]
fn bias_and_mask_come_after_penalties() {
    let params =
        SamplingParams { temperature: 0.0, repetition_penalty: 2.0, logit_bias: vec![(0, 3.0)], ..Default::default() };
    let generated = HashMap::from([(0, 1)]);
    let mut draw = Draw { params: &params, seed: 0, position: 0, generated: &generated, masked: &[] };
    // Token 0: 4 / 2 + 3 = 5 beats 4.9; penalised after the bias it would be 3.5.
    let row = [4.0, 4.9, 1.0];
    assert_eq!(Sampler::default().sample(&mut row.to_vec(), &draw), Ok(0));
    draw.masked = &[0, 1];
    assert_eq!(Sampler::default().sample(&mut row.to_vec(), &draw), Ok(2));
}

#[test]
fn a_masked_token_is_never_drawn() {
    let params = SamplingParams::default();
    let generated = HashMap::new();
    for position in 0..200 {
        let draw = Draw { params: &params, seed: 1, position, generated: &generated, masked: &[1] };
        assert_ne!(Sampler::default().sample(&mut logits(&FOUR), &draw), Ok(1));
    }
}

#[test]
fn broken_rows_are_errors() {
    let params = SamplingParams::default();
    let generated = HashMap::new();
    let draw = Draw { params: &params, seed: 1, position: 0, generated: &generated, masked: &[] };
    let mut sampler = Sampler::default();
    assert_eq!(sampler.sample(&mut [1.0, f32::NAN], &draw), Err(SampleError::NotANumber));
    assert_eq!(sampler.sample(&mut [f32::NEG_INFINITY; 2], &draw), Err(SampleError::NothingLeft));
    assert_eq!(sampler.sample(&mut [0.0, f32::INFINITY], &draw), Ok(1));
}

#[test]
fn the_draw_depends_on_seed_and_position_only() {
    let row: Vec<f32> = (0..500).map(|i| ((i * 37) % 101) as f32 / 25.0).collect();
    let params = SamplingParams { top_p: 0.9, ..Default::default() };
    let generated = HashMap::new();
    let mut used = Sampler::default();
    let mut differs = false;
    for position in 0..100 {
        let draw = |seed| Draw { params: &params, seed, position, generated: &generated, masked: &[] };
        let fresh = Sampler::default().sample(&mut row.clone(), &draw(5));
        assert_eq!(used.sample(&mut row.clone(), &draw(5)), fresh);
        differs |= used.sample(&mut row.clone(), &draw(6)) != fresh;
    }
    assert!(differs);
}

#[test]
fn the_rarity_bound_drops_nothing_of_the_nucleus() {
    // A flat tail of equal tokens is the hardest case for the bound.
    let mut row = vec![0.0f32; 1000];
    row[0] = 5.0;
    for top_p in [0.05f32, 0.3, 0.9, 0.99, 0.999_999] {
        let params = SamplingParams { top_p, ..Default::default() };
        let mut filter = filter::Filter::default();
        let seen: std::collections::BTreeSet<u32> =
            (0..4000).filter_map(|i| filter.draw(&row, 5.0, &params, f64::from(i) / 4000.0)).collect();
        let total = 5f64.exp() + 999.0;
        let mut expected = 0;
        let mut before = 0.0;
        while expected < 1000 && before <= f64::from(top_p) * total {
            before += if expected == 0 { 5f64.exp() } else { 1.0 };
            expected += 1;
        }
        let last = *seen.last().unwrap() as usize;
        assert!(last < expected && last + 3 >= expected, "{top_p}: {last} of {expected}");
    }
}

#[test]
fn logprobs_are_the_log_softmax() {
    let row = logits(&FOUR);
    let read = LogprobReader::default().read(&row, 2, 2, &[3, 0]);
    let near = |found: f32, p: f32| assert!((found - p.ln()).abs() < 1e-6, "{found} {p}");
    assert_eq!(read.token_id, 2);
    near(read.logprob.unwrap(), 0.2);
    assert_eq!(read.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3]);
    near(read.top[0].1, 0.4);
    assert_eq!(read.token_ids.iter().map(|t| t.0).collect::<Vec<_>>(), [3, 0]);
    near(read.token_ids[0].1, 0.3);
    near(read.token_ids[1].1, 0.1);
}

#[test]
fn top_logprobs_of_equal_tokens_come_by_lowest_id() {
    let read = LogprobReader::default().read(&[1.0, 2.0, 2.0, 2.0], 0, 2, &[]);
    assert_eq!(read.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
    let all = LogprobReader::default().read(&[1.0, 2.0], 0, 5, &[]);
    assert_eq!(all.top.len(), 2);
}

#[test]
fn the_largest_of_a_long_row_is_found_wherever_it_is() {
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Few values, so that many are equal.
        ((state >> 16) % 7) as f32 - 3.0
    };
    for len in [1, 15, 16, 17, 511, 512, 513, 1023, 4_096, 5_000] {
        let row: Vec<f32> = (0..len).map(|_| random()).collect();
        let wanted = (1..len).fold(0, |best, at| if row[at] > row[best] { at } else { best });
        assert_eq!(super::argmax(&row), Ok((wanted as u32, row[wanted])), "{len}");
        let mut single = vec![f32::NEG_INFINITY; len];
        assert_eq!(super::argmax(&single), Err(SampleError::NothingLeft), "{len}");
        single[len - 1] = -1.0;
        assert_eq!(super::argmax(&single), Ok((len as u32 - 1, -1.0)), "{len}");
        single[len / 2] = f32::NAN;
        assert_eq!(super::argmax(&single), Err(SampleError::NotANumber), "{len}");
    }
}
