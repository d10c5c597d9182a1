//! The gated delta net, against a recurrence in double precision.

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Checked, Gpu, Grid, Memory, line};

struct Net {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    kernel: usize,
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Net {
    fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    fn inputs(&self) -> usize {
        (self.kernel - 1) * self.channels()
    }

    fn slot(&self) -> usize {
        self.inputs() + self.value_heads * self.key_dim * self.value_dim
    }

    /// One token taken into the state, and its output.
    fn token(&self, w: &Weights, state: &mut [f64], mixed: &[f32], a: &[f32], b: &[f32]) -> Vec<f64> {
        let (channels, keys) = (self.channels(), self.key_heads * self.key_dim);
        let (history, matrices) = state.split_at_mut(self.inputs());
        let mut u: Vec<f64> = (0..channels)
            .map(|c| {
                let taps = &w.conv[c * self.kernel..][..self.kernel];
                let past: f64 = (0..self.kernel - 1).map(|i| f64::from(taps[i]) * history[i * channels + c]).sum();
                let sum = past + f64::from(taps[self.kernel - 1]) * f64::from(mixed[c]);
                sum * sigmoid(sum)
            })
            .collect();
        history.copy_within(channels.., 0);
        let last = self.inputs() - channels;
        history[last..].iter_mut().zip(mixed).for_each(|(to, x)| *to = f64::from(*x));
        for (i, head) in u[..2 * keys].chunks_exact_mut(self.key_dim).enumerate() {
            let length = if i < self.key_heads { (self.key_dim as f64).sqrt().recip() } else { 1.0 };
            let factor = length / (head.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            head.iter_mut().for_each(|x| *x *= factor);
        }
        let mut y = Vec::new();
        for head in 0..self.value_heads {
            let from = head / (self.value_heads / self.key_heads) * self.key_dim;
            let (q, k) = (&u[from..][..self.key_dim], &u[keys + from..][..self.key_dim]);
            let v = &u[2 * keys + head * self.value_dim..][..self.value_dim];
            let matrix = &mut matrices[head * self.key_dim * self.value_dim..][..self.key_dim * self.value_dim];
            let kept =
                (f64::from(w.decay[head]) * (f64::from(a[head]) + f64::from(w.dt_bias[head])).exp().ln_1p()).exp();
            let rate = sigmoid(f64::from(b[head]));
            matrix.iter_mut().for_each(|x| *x *= kept);
            for (column, v) in v.iter().enumerate() {
                let recalled: f64 = (0..self.key_dim).map(|i| k[i] * matrix[i * self.value_dim + column]).sum();
                let change = rate * (v - recalled);
                let mut sum = 0.0;
                for i in 0..self.key_dim {
                    matrix[i * self.value_dim + column] += k[i] * change;
                    sum += q[i] * matrix[i * self.value_dim + column];
                }
                y.push(sum);
            }
        }
        y
    }
}

struct Weights {
    conv: Vec<f32>,
    dt_bias: Vec<f32>,
    decay: Vec<f32>,
}

/// What the kernels of a step read and write.
struct Step {
    mixed: Memory,
    a: Memory,
    b: Memory,
    conv: Memory,
    dt_bias: Memory,
    decay: Memory,
    slots: Memory,
}

/// Runs the kernels on sequences; gives the rows' outputs.
fn run(
    gpu: &mut Gpu,
    net: &Net,
    step: &Step,
    rule: &str,
    rows: usize,
    seqs: &[[u32; 6]],
    saves: &[[u32; 2]],
) -> Result<Vec<f32>, String> {
    let (channels, outputs) = (net.channels(), net.value_heads * net.value_dim);
    let (list, save_list) = (gpu.memory(&seqs.concat())?, gpu.memory(&saves.concat())?);
    let (u, out) = (gpu.poison(rows * channels)?, gpu.poison(rows * outputs)?);
    let bytes = 4 * net.slot() as u64;
    let n = seqs.len() as u32;
    gpu.launch(
        "delta_conv",
        Grid([channels.div_ceil(128) as u32, n, 1], 128, 0),
        args![step.mixed, step.conv, step.slots, bytes, list, save_list, u, channels as u32, net.kernel as u32],
    )?;
    let (key_heads, key_dim) = (net.key_heads as u32, net.key_dim as u32);
    let heads = (2 * net.key_heads * rows).div_ceil(4);
    gpu.launch("delta_unit", line(heads, 128), args![u, rows as u32, channels as u32, key_heads, key_dim])?;
    gpu.launch(
        rule,
        Grid([net.value_dim.div_ceil(32) as u32, net.value_heads as u32, n], 128, 0),
        args![
            u,
            step.a,
            step.b,
            step.dt_bias,
            step.decay,
            step.slots,
            bytes,
            4 * net.inputs() as u64,
            list,
            save_list,
            out,
            channels as u32,
            key_heads,
            net.value_heads as u32,
            key_dim,
            net.value_dim as u32
        ],
    )?;
    gpu.read(out)
}

fn net_is_right(program: &Program, net: &Net, rule: &str) -> Checked {
    let mut random = Random::new(net.key_dim as u64);
    let rows = 9;
    let w = Weights {
        conv: random.floats(net.channels() * net.kernel),
        dt_bias: random.floats(net.value_heads),
        decay: random.floats(net.value_heads).iter().map(|x| -x.abs() - 0.1).collect(),
    };
    let mixed = random.floats(rows * net.channels());
    let (a, b) = (random.floats(rows * net.value_heads), random.floats(rows * net.value_heads));
    // Slot 0 has a state, the others what must count as zeros.
    let mut slots = vec![f32::NAN; 4 * net.slot()];
    let state = random.floats(net.slot());
    slots[..net.slot()].copy_from_slice(&state);
    let mut gpu = Gpu::new(program, 6);
    let step = Step {
        mixed: gpu.memory(&mixed)?,
        a: gpu.memory(&a)?,
        b: gpu.memory(&b)?,
        conv: gpu.memory(&w.conv)?,
        dt_bias: gpu.memory(&w.dt_bias)?,
        decay: gpu.memory(&w.decay)?,
        slots: gpu.memory(&slots)?,
    };
    // Five rows go on from slot 0, with a save after two of them; four begin in slot 1.
    let got = run(&mut gpu, net, &step, rule, rows, &[[0, 5, 0, 1, 0, 1], [5, 4, 1, 0, 1, 0]], &[[2, 3]])?;
    let mut want = Vec::new();
    let mut states = [state.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>(), vec![0.0; net.slot()]];
    let mut saved = Vec::new();
    for row in 0..rows {
        let heads = net.value_heads;
        let of = usize::from(row >= 5);
        let (a, b) = (&a[row * heads..][..heads], &b[row * heads..][..heads]);
        want.extend(net.token(&w, &mut states[of], &mixed[row * net.channels()..][..net.channels()], a, b));
        if row == 1 {
            saved = states[0].clone();
        }
    }
    let single = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    near(&format!("{rule}: outputs"), &got, &single(&want), 1e-5)?;
    let after: Vec<f32> = gpu.read(step.slots)?;
    for (slot, state) in [(0, &states[0]), (1, &states[1]), (3, &saved)] {
        near(&format!("{rule}: slot {slot}"), &after[slot * net.slot()..][..net.slot()], &single(state), 1e-5)?;
    }
    if after[2 * net.slot()..3 * net.slot()].iter().any(|x| !x.is_nan()) {
        return Err("a slot was written that nobody has".to_owned());
    }

    // From the saved state on, the other rows have the same bits.
    let rest = run(&mut gpu, net, &step, rule, rows, &[[2, 3, 3, 1, 0, 0]], &[[0, 0]])?;
    let outputs = net.value_heads * net.value_dim;
    let bits = |x: &[f32]| x[2 * outputs..5 * outputs].iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    same(&format!("{rule}: bits after a saved state"), &bits(&rest), &bits(&got))
}

/// The smallest net: what `faults` plants faults in.
pub fn small(program: &Program) -> Checked {
    let net = Net { key_heads: 2, value_heads: 4, key_dim: 20, value_dim: 36, kernel: 4 };
    net_is_right(program, &net, "delta_rule_32")
}

#[test]
fn the_delta_net_is_right_and_goes_on_from_saved_states() {
    let program = Program::of("delta.cu", &[]);
    small(&program).unwrap();
    let net = Net { key_heads: 1, value_heads: 1, key_dim: 128, value_dim: 64, kernel: 2 };
    net_is_right(&program, &net, "delta_rule_128").unwrap();
    let net = Net { key_heads: 1, value_heads: 3, key_dim: 50, value_dim: 7, kernel: 8 };
    net_is_right(&program, &net, "delta_rule_64").unwrap();
    let net = Net { key_heads: 1, value_heads: 1, key_dim: 256, value_dim: 32, kernel: 4 };
    net_is_right(&program, &net, "delta_rule_256").unwrap();
}
