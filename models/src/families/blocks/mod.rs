//! What the families beyond the dense one are built of: loading of weights in all their formats, experts, checked
//! batches, and the output matrix.
//!
//! Matrix products, norms and paged attention run on the device. What has no kernel there yet (routing, sparse
//! attention, compressors, recurrences) runs on rows in host memory, by [`kvdock_kernels::rowmath`]: on a CPU that is
//! the same memory.

pub(crate) mod keys;
pub(crate) mod load;
pub(crate) mod moe;
pub(crate) mod narrow;
pub(crate) mod rows;
pub(crate) mod share;
pub(crate) mod step;

use std::sync::{Mutex, PoisonError};

use kvdock_kernels::{Buf, Device, KernelError, Projection, Weight};

use crate::ModelError;

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
        let mut out = device.alloc(rows * self.rows())?;
        device.linear(x, rows, &mut [Projection { weight: &self.weight, bias: self.bias.as_ref(), out: &mut out }])?;
        Ok(out)
    }

    /// As [`Linear::apply`], to host memory.
    pub(crate) fn to_host(&self, device: &dyn Device, x: &Buf, rows: usize) -> Result<Vec<f32>, KernelError> {
        let out = self.apply(device, x, rows)?;
        to_host(device, &out, rows * self.rows())
    }
}

/// The first `len` elements of a buffer.
pub(crate) fn to_host(device: &dyn Device, buf: &Buf, len: usize) -> Result<Vec<f32>, KernelError> {
    let mut out = vec![0.0; len];
    device.read(buf, 0, &mut out)?;
    Ok(out)
}

/// `of` of each item, computed on the device's threads for work in host memory. Each result follows from its item
/// alone, so threads change no bit.
pub(crate) fn map_rows<I: Sync, T: Send>(
    device: &dyn Device,
    items: &[I],
    of: impl Fn(&I) -> Result<T, ModelError> + Sync,
) -> Result<Vec<T>, ModelError> {
    let results: Vec<Mutex<Option<Result<T, ModelError>>>> = items.iter().map(|_| Mutex::new(None)).collect();
    device.host_tasks(items.len(), &|task| {
        let result = of(&items[task]);
        *results[task].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    })?;
    let undone = || Err(ModelError::Batch("a row was not computed".to_owned()));
    let take = |slot: Mutex<Option<_>>| slot.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().map(|slot| take(slot).unwrap_or_else(undone)).collect()
}
