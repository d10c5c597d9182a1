//! Rows of logits: in host memory, or left on the device that chooses tokens from them.

use std::sync::Arc;

use kvdock_kernels::ops::Columns;
use kvdock_kernels::{Buf, Device, KernelError, SampleRow, Sampled};

/// Rows of logits, in order of the chunks and of the positions inside them.
///
/// Keep one and hand it to every pass: its memory is used again.
#[derive(Default)]
pub struct Logits {
    values: Vec<f32>,
    vocab: usize,
    /// Rows stay on a device that chooses tokens.
    stay: bool,
    left: Option<Left>,
}

/// Where a pass puts its rows.
pub(crate) enum Target<'a> {
    Host(&'a mut [f32]),
    Device(&'a mut Buf),
}

impl Target<'_> {
    /// Takes the first `rows` rows of `tile` as those from `first` on.
    pub(crate) fn put(
        &mut self,
        device: &dyn Device,
        tile: &Buf,
        (first, rows): (usize, usize),
        vocab: usize,
    ) -> Result<(), KernelError> {
        let (at, width) = (first * vocab, rows * vocab);
        match self {
            Self::Host(values) => device.read(tile, 0, &mut values[at..at + width]),
            Self::Device(buf) => {
                let (source, target) = (Columns { stride: width, at: 0 }, Columns { stride: buf.len(), at });
                device.copy_columns(tile, source, buf, target, width, 1)
            }
        }
    }
}

/// Rows on a device.
struct Left {
    device: Arc<dyn Device>,
    buf: Buf,
    rows: usize,
}

impl std::fmt::Debug for Logits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let on_device = self.left.is_some();
        f.debug_struct("Logits")
            .field("rows", &self.rows())
            .field("vocab", &self.vocab)
            .field("on_device", &on_device)
            .finish()
    }
}

impl Logits {
    /// No rows yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        match &self.left {
            Some(left) => left.rows,
            None => self.values.len().checked_div(self.vocab).unwrap_or(0),
        }
    }

    /// Values of a row: the model's vocabulary size. 0 before the first pass.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Row `index`, one f32 a token, or `None` past the last row, and where rows were left on a device.
    pub fn row(&self, index: usize) -> Option<&[f32]> {
        let begin = index.checked_mul(self.vocab)?;
        self.values.get(begin..begin.checked_add(self.vocab)?)
    }

    /// As [`Logits::row`], to be changed in place by penalties and biases.
    pub fn row_mut(&mut self, index: usize) -> Option<&mut [f32]> {
        let begin = index.checked_mul(self.vocab)?;
        self.values.get_mut(begin..begin.checked_add(self.vocab)?)
    }

    /// Makes room for `rows` rows of `vocab` values and hands out the memory. For models.
    pub fn reset(&mut self, rows: usize, vocab: usize) -> &mut [f32] {
        self.vocab = vocab;
        self.left = None;
        self.values.clear();
        self.values.resize(rows * vocab, 0.0);
        &mut self.values
    }

    /// Takes a copy of another pass's rows behind its own. Both are in host memory.
    pub(crate) fn append(&mut self, other: &Logits) {
        self.values.extend_from_slice(&other.values);
    }

    /// Whether the next passes may leave their rows on a device that chooses tokens ([`Device::samples`]): they then are not in host
    /// memory, and [`Logits::sample`] is all that can be done with them.
    pub fn stay_on_device(&mut self, stay: bool) {
        self.stay = stay;
    }

    /// Whether rows were left on a device.
    pub fn is_on_device(&self) -> bool {
        self.left.is_some()
    }

    /// Makes room for rows: on the device where they may stay there, else in host memory ([`Logits::reset`]). For models.
    pub(crate) fn target(
        &mut self,
        device: &Arc<dyn Device>,
        rows: usize,
        vocab: usize,
    ) -> Result<Target<'_>, KernelError> {
        if !self.stay || !device.samples() || rows == 0 {
            return Ok(Target::Host(self.reset(rows, vocab)));
        }
        self.vocab = vocab;
        self.values.clear();
        let buf = device.scratch(rows * vocab)?;
        let left = self.left.insert(Left { device: Arc::clone(device), buf, rows });
        Ok(Target::Device(&mut left.buf))
    }

    /// Chooses a token for each row that was left on a device, which are used up by it.
    ///
    /// # Errors
    /// Rows in host memory, another number of rows, a failure of the device.
    pub fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, KernelError> {
        let expected = self.left.as_ref().map_or(0, |left| left.rows);
        match self.left.take() {
            Some(mut left) if left.rows == rows.len() => left.device.sample(&mut left.buf, self.vocab, rows),
            _ => Err(KernelError::Shape {
                op: "sample",
                what: "rows on the device",
                expected: format!("{} rows", rows.len()),
                found: format!("{expected} rows"),
            }),
        }
    }
}
