//! What the families beyond the dense one are built of: loading of weights in all their formats, experts, rows in pools,
//! checked batches, and the output matrix.
//!
//! All arithmetic runs on the device: nothing of a step but its logits comes back to the host.

pub(crate) mod context;
pub(crate) mod keys;
pub(crate) mod load;
pub(crate) mod moe;
pub(crate) mod narrow;
pub(crate) mod replay;
pub(crate) mod rows;
pub(crate) mod share;
pub(crate) mod step;

use kvdock_kernels::{Buf, Device, KernelError, Projection, Weight};

/// A matrix and, where the model has one, its bias.
pub(crate) struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Buf>,
}

impl Linear {
    /// Output features.
    pub(crate) fn rows(&self) -> usize {
        self.weight.shape().rows
    }

    /// The product with `rows` rows of `x`.
    pub(crate) fn apply(&self, device: &dyn Device, x: &Buf, rows: usize) -> Result<Buf, KernelError> {
        let mut out = device.scratch(rows * self.rows())?;
        device.linear(x, rows, &mut [Projection { weight: &self.weight, bias: self.bias.as_ref(), out: &mut out }])?;
        Ok(out)
    }
}
