//! Why a part of a prompt was no hit.

use super::CacheManager;
use super::admit::Request;
use crate::cache::types::{Miss, MissReason};
use crate::cache::unified::NodeId;

impl CacheManager {
    /// Reasons for the pages of `tokens` after the first `granted` that could have been reused.
    pub(super) fn misses(&self, state: &Request, root: NodeId, tokens: &[u32], granted: usize) -> Vec<Miss> {
        let page_size = self.page_size;
        let end = state.reusable_pages(tokens.len(), page_size);
        if granted >= end {
            return Vec::new();
        }
        let storage = state.storage;
        let mut misses = Vec::new();
        let mut start = granted;
        let found_end = storage.hit_end.min(end);
        if found_end > start {
            // Storage has it, or may have: say why it did not come.
            let reason = storage.reason.unwrap_or(MissReason::Evicted);
            misses.push(Miss { start: start * page_size, end: found_end * page_size, reason });
            start = found_end;
        }
        if start < end {
            let page = tokens.get(start * page_size..(start + 1) * page_size).unwrap_or(&[]);
            // After a hit that broke off, the rest is not the fault of what broke.
            let asked = if start == granted { storage.reason } else { None };
            let reason = match asked {
                Some(
                    reason @ (MissReason::BackendSlow
                    | MissReason::BackendFailed
                    | MissReason::Corrupt
                    | MissReason::NotWorthIt),
                ) => reason,
                _ if start == 0 && self.tree.is_elsewhere(root, page) => MissReason::NamespaceDiffers,
                _ if self.tree.was_evicted(root, start as u32, page) => MissReason::Evicted,
                other => other.unwrap_or(MissReason::NotStored),
            };
            misses.push(Miss { start: start * page_size, end: end * page_size, reason });
        }
        misses
    }
}
