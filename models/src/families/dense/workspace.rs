//! Work buffers of a pass.

use std::sync::atomic::{AtomicU64, Ordering};

use kvdock_kernels::{Buf, Device, KernelError};

use super::config::Config;
use crate::families::blocks::share::Share;
use crate::families::blocks::step::HEAD_ROWS;

/// Buffers for up to `rows` rows.
pub(super) struct Workspace {
    rows: usize,
    /// No other workspace of this process has it.
    id: u64,
    /// Whether buffers have changed places.
    swapped: bool,
    /// Residual stream, `[rows, hidden]`.
    pub(super) x: Buf,
    /// Normed input of a block, `[rows, hidden]`.
    pub(super) normed: Buf,
    /// Output of a block, not yet added to `x`: `[rows, hidden]`.
    pub(super) delta: Buf,
    /// `[rows, heads * head_dim]`.
    pub(super) q: Buf,
    /// `[rows, kv_heads * head_dim]`.
    pub(super) k: Buf,
    /// `[rows, kv_heads * head_dim]`.
    pub(super) v: Buf,
    /// `[rows, heads * head_dim]`.
    pub(super) attended: Buf,
    /// `[rows, intermediate]`.
    pub(super) gate: Buf,
    /// `[rows, intermediate]`.
    pub(super) up: Buf,
    /// A tile of rows that want logits: `[HEAD_ROWS, hidden]`, two of them.
    pub(super) head_x: Buf,
    pub(super) head_delta: Buf,
    /// `[HEAD_ROWS, hidden]`.
    pub(super) head_normed: Buf,
    /// `[HEAD_ROWS, vocab]`, or as much of the vocabulary as a rank holds.
    pub(super) logits: Buf,
}

impl Workspace {
    pub(super) fn new(device: &dyn Device, config: &Config, share: &Share, rows: usize) -> Result<Self, KernelError> {
        // Chunk sizes repeat; a little room spares a new set of buffers for one row more.
        let rows = rows.next_multiple_of(16);
        let q_width = config.heads * config.head_dim;
        let kv_width = config.kv_heads * config.head_dim;
        let alloc = |width: usize| device.alloc(rows * width);
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            rows,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            swapped: false,
            x: alloc(config.hidden)?,
            normed: alloc(config.hidden)?,
            delta: alloc(config.hidden)?,
            q: alloc(q_width)?,
            k: alloc(kv_width)?,
            v: alloc(kv_width)?,
            attended: alloc(q_width)?,
            gate: alloc(config.intermediate)?,
            up: alloc(config.intermediate)?,
            head_x: device.alloc(HEAD_ROWS * config.hidden)?,
            head_delta: device.alloc(HEAD_ROWS * config.hidden)?,
            head_normed: device.alloc(HEAD_ROWS * config.hidden)?,
            logits: device.alloc(share.logits_len(HEAD_ROWS, config.vocab))?,
        })
    }

    /// Tells which buffers are where: equal keys mean the same buffers in the same places.
    pub(super) fn key(&self) -> u64 {
        2 * self.id + u64::from(self.swapped)
    }

    /// Puts the rows that were gathered into `attended` and `normed` in the places of `q` and `x`.
    pub(super) fn swap_gathered(&mut self) {
        std::mem::swap(&mut self.q, &mut self.attended);
        std::mem::swap(&mut self.x, &mut self.normed);
        self.swapped = !self.swapped;
    }

    /// Rows the buffers hold.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }
}
