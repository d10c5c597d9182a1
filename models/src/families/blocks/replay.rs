//! Decode steps that a device may queue again as one.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use kvdock_kernels::{Buf, Device, KernelError};

use super::context::Dealt;
use super::share::Share;
use crate::{LayerHooks, ModelError};

/// Residual streams that are kept for the next step; more steps at a time make their own.
const KEPT: usize = 4;
/// Rows by which they grow.
const ROWS: usize = 16;

/// A residual stream in its place, which the same key stands for.
pub(crate) struct Kept {
    key: u64,
    pub(crate) stream: Buf,
}

/// The residual streams of a model, each of so many elements a row.
#[derive(Default)]
pub(crate) struct Streams(Mutex<Vec<Kept>>);

impl Streams {
    /// One for at least `rows` rows of `width` elements.
    fn take(&self, device: &dyn Device, rows: usize, width: usize) -> Result<Kept, KernelError> {
        let need = rows * width;
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = kept.iter().position(|kept| kept.stream.len() >= need) {
            return Ok(kept.swap_remove(index));
        }
        // One that is too small would stay too small.
        kept.pop();
        drop(kept);
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let stream = device.alloc(rows.next_multiple_of(ROWS) * width)?;
        Ok(Kept { key: NEXT.fetch_add(1, Ordering::Relaxed), stream })
    }

    /// It is not needed any more.
    pub(crate) fn give_back(&self, stream: Kept) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT {
            kept.push(stream);
        }
    }

    /// Does the layers of a step, `work`, which leaves its result in the stream that it is given, and may be called several times. None, and nothing is done,
    /// unless the step has one row for each sequence, no rank has a part in it, and the device keeps such steps. Then all layers are waited for first.
    pub(crate) fn decode(
        &self,
        device: &dyn Device,
        (share, dealt): (&Share, &Dealt<'_>),
        width: usize,
        (layers, hooks): (usize, &dyn LayerHooks),
        work: &mut dyn FnMut(&mut Buf) -> Result<(), ModelError>,
    ) -> Result<Option<Kept>, ModelError> {
        let step = dealt.own();
        // What ranks do together goes by way of the host, which a step that is queued again does not.
        if !device.replays() || !share.is_alone() || dealt.is_dealt() || step.rows() != step.seqs.len() {
            return Ok(None);
        }
        (0..layers).try_for_each(|index| hooks.before_layer(index))?;
        let mut kept = self.take(device, step.rows(), width)?;
        let mut failed = None;
        let ran = device.replay(kept.key, &mut || {
            work(&mut kept.stream).map_err(|error| match error {
                ModelError::Kernel(error) => error,
                other => {
                    let reason = other.to_string();
                    failed = Some(other);
                    KernelError::Device { op: "a step", reason }
                }
            })
        });
        match (ran, failed) {
            (Ok(()), _) => Ok(Some(kept)),
            (Err(_), Some(error)) => Err(error),
            (Err(error), None) => Err(error.into()),
        }
    }
}
