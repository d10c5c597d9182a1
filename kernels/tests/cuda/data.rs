//! Random inputs, and comparisons.

use super::emulator::Checked;

/// Numbers that follow from a seed.
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }

    /// From -1 to 1.
    pub fn float(&mut self) -> f32 {
        2.0 * self.0.f32() - 1.0
    }

    pub fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.0.u8(..)).collect()
    }

    /// `count` different numbers below `end`, in any order.
    pub fn some(&mut self, count: usize, end: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..end as u32).collect();
        self.0.shuffle(&mut all);
        all.truncate(count);
        all
    }
}

/// That `got` is `want` within `relative` of the largest magnitude in `want`, everywhere.
pub fn near(what: &str, got: &[f32], want: &[f32], relative: f32) -> Checked {
    if got.len() != want.len() {
        return Err(format!("{what}: {} elements, not {}", got.len(), want.len()));
    }
    let scale = want.iter().fold(1e-6f32, |most, x| most.max(x.abs()));
    let bad =
        |(g, w): (&f32, &f32)| g.to_bits() != w.to_bits() && ((g - w).is_nan() || (g - w).abs() > relative * scale);
    match got.iter().zip(want).position(bad) {
        None => Ok(()),
        Some(i) => Err(format!("{what}: element {i} is {}, not {} (largest {scale})", got[i], want[i])),
    }
}

/// That both are the same.
pub fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], want: &[T]) -> Checked {
    if got.len() != want.len() {
        return Err(format!("{what}: {} elements, not {}", got.len(), want.len()));
    }
    match got.iter().zip(want).position(|(g, w)| g != w) {
        None => Ok(()),
        Some(i) => Err(format!("{what}: element {i} is {:?}, not {:?}", got[i], want[i])),
    }
}
