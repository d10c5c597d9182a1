//! What the device's tests share: numbers, pools, and a sequence that fills them.

// Each test file uses a part of it.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;

use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{AttentionSpec, Buf, Device, KvDtype, KvPool, KvSpec, SeqSpan};

/// Numbers between -1 and 1 that depend on the seed alone.
pub fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            ((x >> 40) as f32 / (1u64 << 23) as f32) - 1.0
        })
        .collect()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub fn read(device: &dyn Device, buf: &Buf, len: usize) -> Vec<f32> {
    let mut out = vec![0.0; len];
    device.read(buf, 0, &mut out).unwrap();
    out
}

/// Keys, values and queries of one sequence, and how attention over them is asked for.
#[derive(Clone)]
pub struct Sequence {
    pub spec: KvSpec,
    pub heads: usize,
    pub tokens: usize,
    pub window: Option<u32>,
    pub sinks: Option<Vec<f32>>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Sequence {
    pub fn new(spec: KvSpec, heads: usize, tokens: usize, seed: u64) -> Self {
        Self {
            spec,
            heads,
            tokens,
            window: None,
            sinks: None,
            q: numbers(tokens * heads * spec.head_dim_k, seed).iter().map(|x| 3.0 * x).collect(),
            k: numbers(tokens * spec.kv_heads * spec.head_dim_k, seed + 1),
            v: numbers(tokens * spec.kv_heads * spec.head_dim_v, seed + 2),
        }
    }

    pub fn scale(&self) -> f32 {
        (self.spec.head_dim_k as f32).powf(-0.5)
    }

    /// Physical pages in an order that is not that of positions.
    pub fn pages(&self) -> Vec<u32> {
        let needed = self.tokens.div_ceil(self.spec.page_tokens);
        (0..needed as u32).map(|p| needed as u32 - p).collect()
    }

    /// A pool for the sequence, filled with NaN.
    pub fn pool(&self, device: &CpuDevice) -> Arc<dyn KvPool> {
        let pages = self.tokens.div_ceil(self.spec.page_tokens) + 2;
        let pool = device.alloc_kv_pool(KvSpec { pages, ..self.spec }).unwrap();
        let all: Vec<u32> = (0..pages as u32).collect();
        let rows = pages * self.spec.page_tokens;
        let seq = SeqSpan { start: 0, len: rows as u32, pages: &all };
        let plan = device.plan(&*pool, &[seq]).unwrap();
        let nan = |dim| {
            let n = rows * self.spec.kv_heads * dim;
            device.upload(&vec![f32::NAN; n]).unwrap()
        };
        let (k, v) = (nan(self.spec.head_dim_k), nan(self.spec.head_dim_v));
        for layer in 0..self.spec.layers {
            device.kv_write(&*pool, layer, &plan, &k, &v).unwrap();
        }
        pool
    }

    /// Writes and attends rows `from..to` on a layer; returns their outputs.
    pub fn step(&self, device: &CpuDevice, pool: &dyn KvPool, from: usize, to: usize) -> Vec<f32> {
        let pages = self.pages();
        let (rows, spec) = (to - from, &self.spec);
        let seq = SeqSpan { start: from as u32, len: rows as u32, pages: &pages };
        let plan = device.plan(pool, &[seq]).unwrap();
        let part = |x: &[f32], width: usize| device.upload(&x[from * width..to * width]).unwrap();
        let k = part(&self.k, spec.kv_heads * spec.head_dim_k);
        let v = part(&self.v, spec.kv_heads * spec.head_dim_v);
        let q = part(&self.q, self.heads * spec.head_dim_k);
        let n = rows * self.heads * spec.head_dim_v;
        let mut out = device.alloc(n).unwrap();
        let layer = spec.layers - 1;
        device.kv_write(pool, layer, &plan, &k, &v).unwrap();
        let sinks = self.sinks.as_ref().map(|s| device.upload(s).unwrap());
        let how = AttentionSpec { heads: self.heads, scale: self.scale(), window: self.window, sinks: sinks.as_ref() };
        device.attention(pool, layer, &plan, &q, &how, &mut out).unwrap();
        read(device, &out, n)
    }

    /// Runs the whole sequence in steps of the given lengths, the last one repeated.
    pub fn run(&self, device: &CpuDevice, steps: &[usize]) -> Vec<f32> {
        let pool = self.pool(device);
        let mut out = Vec::new();
        let mut from = 0;
        let mut steps = steps.iter().chain(std::iter::repeat(steps.last().unwrap()));
        while from < self.tokens {
            let to = (from + steps.next().unwrap()).min(self.tokens);
            out.extend(self.step(device, &*pool, from, to));
            from = to;
        }
        out
    }

    /// The same in f64, on keys and values rounded to the pool's dtype.
    pub fn reference(&self) -> Vec<f64> {
        let round = |x: f32| match self.spec.dtype {
            KvDtype::F16 => half::f16::from_f32(x).to_f64(),
            KvDtype::BF16 => half::bf16::from_f32(x).to_f64(),
            KvDtype::F32 => f64::from(x),
        };
        let (dk, dv, kv_heads) = (self.spec.head_dim_k, self.spec.head_dim_v, self.spec.kv_heads);
        let mut out = Vec::new();
        for t in 0..self.tokens {
            let first = self.window.map_or(0, |w| (t + 1).saturating_sub(w as usize));
            for h in 0..self.heads {
                let g = h / (self.heads / kv_heads);
                let q = &self.q[(t * self.heads + h) * dk..][..dk];
                let score = |j: usize| {
                    let k = &self.k[(j * kv_heads + g) * dk..][..dk];
                    let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * round(*k)).sum();
                    dot * f64::from(self.scale())
                };
                let scores: Vec<f64> = (first..=t).map(score).collect();
                let sink = self.sinks.as_ref().map(|s| f64::from(s[h]));
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total = p.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - max).exp());
                out.extend((0..dv).map(|d| {
                    let terms =
                        p.iter().enumerate().map(|(i, p)| p * round(self.v[((first + i) * kv_heads + g) * dv + d]));
                    terms.sum::<f64>() / total
                }));
            }
        }
        out
    }
}
