//! From logits to tokens.

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Checked, Gpu, line};

const NOT_A_NUMBER: u32 = u32::MAX;
const NOTHING_LEFT: u32 = u32::MAX - 1;

pub fn largest(program: &Program) -> Checked {
    for vocab in [1usize, 255, 1000] {
        let mut random = Random::new(vocab as u64);
        let mut rows: Vec<Vec<f32>> = (0..6).map(|_| random.floats(vocab)).collect();
        // Equal ones, zeros of both signs, no number, nothing.
        rows[1] = vec![2.5; vocab];
        rows[2] = vec![-1.0; vocab];
        rows[2][vocab / 3] = -0.0;
        rows[2][vocab - 1] = 0.0;
        rows[3][vocab / 2] = f32::NAN;
        rows[4] = vec![f32::NEG_INFINITY; vocab];
        rows[5][vocab - 1] = f32::INFINITY;
        let want: Vec<u32> = rows
            .iter()
            .map(|row| {
                if row.iter().any(|x| x.is_nan()) {
                    return NOT_A_NUMBER;
                }
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                if most == f32::NEG_INFINITY {
                    return NOTHING_LEFT;
                }
                row.iter().position(|x| *x == most).unwrap() as u32
            })
            .collect();
        let mut gpu = Gpu::new(program, 1);
        let (logits, ids) = (gpu.memory(&rows.concat())?, gpu.memory(&[7u32; 6])?);
        gpu.launch("argmax", line(6, 256), args![logits, vocab as u32, ids])?;
        same(&format!("argmax of {vocab}"), &gpu.read(ids)?, &want)?;
    }
    Ok(())
}

/// How a row is sampled.
#[derive(Debug, Clone, Copy)]
struct Filters {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
}

/// The kept tokens and their weights, by the CPU sampler's rule: a front part of the order by logits, equal ones by id.
fn kept(row: &[f32], filters: Filters) -> Vec<(u32, f64)> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |x: f32| {
        if most == f32::INFINITY {
            f64::from(u8::from(x == most))
        } else {
            f64::from(((x - most) / filters.temperature).exp())
        }
    };
    let mut order: Vec<(u32, f64)> = row.iter().enumerate().map(|(i, x)| (i as u32, weight(*x))).collect();
    order.sort_by(|a, b| row[b.0 as usize].total_cmp(&row[a.0 as usize]).then(a.0.cmp(&b.0)));
    let total: f64 = order.iter().map(|(_, w)| w).sum();
    if filters.top_k > 0 {
        order.truncate(filters.top_k as usize);
    }
    if filters.top_p < 1.0 {
        let mut before = 0.0;
        let nucleus = f64::from(filters.top_p) * total;
        let keep = |(_, w): &&(u32, f64)| {
            let keep = before <= nucleus;
            before += w;
            keep
        };
        let count = order.iter().take_while(keep).count();
        order.truncate(count);
    }
    order.retain(|(_, w)| *w >= f64::from(filters.min_p));
    order.sort_by_key(|(i, _)| *i);
    order
}

/// Draws in order of ids, at many points; those near an edge may fall to either side.
pub fn samples(program: &Program) -> Checked {
    let all = Filters { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
    let filters = [
        all,
        Filters { temperature: 0.5, ..all },
        Filters { top_k: 1, ..all },
        Filters { top_k: 7, ..all },
        Filters { top_p: 0.5, ..all },
        Filters { top_p: 0.9, top_k: 40, temperature: 1.7, ..all },
        Filters { min_p: 0.3, ..all },
        Filters { top_p: 0.0, ..all },
        Filters { top_p: 0.8, top_k: 12, min_p: 0.05, temperature: 0.8 },
    ];
    for vocab in [1usize, 40, 777] {
        let mut random = Random::new(vocab as u64);
        let plain: Vec<f32> = random.floats(vocab).iter().map(|x| 6.0 * x).collect();
        // Few different values, so that thresholds fall among equal ones.
        let equal: Vec<f32> = plain.iter().map(|x| x.round()).collect();
        let mut masked = plain.clone();
        masked.iter_mut().step_by(3).for_each(|x| *x = f32::NEG_INFINITY);
        masked[vocab / 2] = 1.0;
        let mut infinite = plain.clone();
        infinite[vocab - 1] = f32::INFINITY;
        for row in [plain, equal, masked, infinite] {
            let uniforms: Vec<f64> = (0..12).map(|_| f64::from(random.float()) * 0.5 + 0.5).collect();
            let rows = filters.len() * uniforms.len();
            let per_row = |of: &dyn Fn(&Filters) -> f32| {
                filters.iter().flat_map(|f| vec![of(f); uniforms.len()]).collect::<Vec<f32>>()
            };
            let mut gpu = Gpu::new(program, vocab as u64);
            let logits = gpu.memory(&row.repeat(rows))?;
            let temperatures = gpu.memory(&per_row(&|f| f.temperature))?;
            let top_ps = gpu.memory(&per_row(&|f| f.top_p))?;
            let min_ps = gpu.memory(&per_row(&|f| f.min_p))?;
            let top_ks: Vec<u32> = filters.iter().flat_map(|f| vec![f.top_k; uniforms.len()]).collect();
            let top_ks = gpu.memory(&top_ks)?;
            let points = gpu.memory(&uniforms.repeat(filters.len()))?;
            let ids = gpu.memory(&vec![99_999u32; rows])?;
            let args = args![logits, vocab as u32, temperatures, top_ks, top_ps, min_ps, points, ids];
            gpu.launch("sample", line(rows, 256), args)?;
            let got: Vec<u32> = gpu.read(ids)?;
            for (filters, got) in filters.iter().zip(got.chunks_exact(uniforms.len())) {
                let kept = kept(&row, *filters);
                let total: f64 = kept.iter().map(|(_, w)| w).sum();
                for (uniform, got) in uniforms.iter().zip(got) {
                    let mut sum = 0.0;
                    // The token's stretch of the line from 0 to the total.
                    let stretch = kept.iter().find_map(|(id, w)| {
                        sum += w;
                        (id == got).then_some((sum - w, sum))
                    });
                    let (point, margin) = (uniform * total, 1e-5 * total);
                    if !stretch.is_some_and(|(from, to)| from - margin <= point && point < to + margin) {
                        return Err(format!(
                            "vocab {vocab}, {filters:?}, uniform {uniform}: drew {got}, whose stretch is {stretch:?} of {total}"
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn the_largest_logit_wins() {
    largest(&Program::of("sampling.cu", &[])).unwrap();
}

#[test]
fn draws_fall_where_the_cpu_would_have_them() {
    samples(&Program::of("sampling.cu", &[])).unwrap();
}

#[test]
fn rows_that_cannot_be_sampled_are_marked_and_cold_ones_take_the_largest() {
    let rows = [[1.0, f32::NAN, 0.0], [f32::NEG_INFINITY; 3], [1.0, 3.0, 3.0]];
    let mut gpu = Gpu::new(&Program::of("sampling.cu", &[]), 1);
    let logits = gpu.memory(&rows.concat()).unwrap();
    let (temperatures, ones) = (gpu.memory(&[1.0f32, 1.0, 0.0]).unwrap(), gpu.memory(&[1.0f32; 3]).unwrap());
    let (zeros, none) = (gpu.memory(&[0.0f32; 3]).unwrap(), gpu.memory(&[0u32; 3]).unwrap());
    let (points, ids) = (gpu.memory(&[0.9f64; 3]).unwrap(), gpu.memory(&[5u32; 3]).unwrap());
    let args = args![logits, 3u32, temperatures, none, ones, zeros, points, ids];
    gpu.launch("sample", line(3, 256), args).unwrap();
    same("ids", &gpu.read(ids).unwrap(), &[NOT_A_NUMBER, NOTHING_LEFT, 1]).unwrap();
}

#[test]
fn logits_are_penalised_biased_and_normalised() {
    let vocab = 300;
    let mut random = Random::new(3);
    let mut rows: Vec<f32> = random.floats(2 * vocab).iter().map(|x| 5.0 * x).collect();
    let mut gpu = Gpu::new(&Program::of("sampling.cu", &[]), 1);
    let logits = gpu.memory(&rows).unwrap();
    let entries = [[0u32, 5, 2], [1, 299, 1], [1, 0, 9]];
    let penalties = [[0.5f32, 0.25, 1.5], [0.1, 0.0, 0.7]];
    let (list, factors) = (gpu.memory(&entries.concat()).unwrap(), gpu.memory(&penalties.concat()).unwrap());
    gpu.launch("penalise", line(1, 256), args![logits, vocab as u32, list, factors, 3u32]).unwrap();
    let (places, values) = (gpu.memory(&[0u32, 7, 1, 3]).unwrap(), gpu.memory(&[2.0, f32::NEG_INFINITY]).unwrap());
    gpu.launch("bias_logits", line(1, 256), args![logits, vocab as u32, places, values, 2u32]).unwrap();
    for [row, token, count] in entries {
        let [frequency, presence, repetition] = penalties[row as usize];
        let logit = &mut rows[row as usize * vocab + token as usize];
        *logit -= frequency * count as f32 + presence;
        *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
    }
    rows[7] += 2.0;
    rows[vocab + 3] = f32::NEG_INFINITY;
    same("logits", &gpu.read(logits).unwrap(), &rows).unwrap();
    let out = gpu.poison(rows.len()).unwrap();
    gpu.launch("log_softmax", line(2, 256), args![logits, vocab as u32, out]).unwrap();
    let want: Vec<f32> = rows
        .chunks_exact(vocab)
        .flat_map(|row| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            row.iter().map(move |x| (f64::from(*x) - sum.ln()) as f32).collect::<Vec<f32>>()
        })
        .collect();
    let got: Vec<f32> = gpu.read(out).unwrap();
    assert_eq!(got[vocab + 3], f32::NEG_INFINITY);
    let finite = |x: &[f32]| x.iter().map(|x| x.max(-1e3)).collect::<Vec<f32>>();
    near("log_softmax", &finite(&got), &finite(&want), 1e-6).unwrap();
}
