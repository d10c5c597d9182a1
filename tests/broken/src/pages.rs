//! Moving stored bytes into pages: whole ones, and layer by layer.

use kvdock_plugin_api::{Get, Page, PageStatus, Pool, Result};

use crate::store::Stored;

/// A run of bytes in a page: segment, offset in it, length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    segment: usize,
    offset: usize,
    len: usize,
}

/// The runs of the components of a layer.
pub fn layer(pool: &Pool, layer: u32) -> impl Iterator<Item = Run> {
    pool.components().iter().filter(move |component| component.layer == layer).flat_map(|component| {
        (0..component.run_count).map(move |run| Run {
            segment: component.segment,
            offset: (component.offset + run * component.run_stride) as usize,
            len: component.run_len as usize,
        })
    })
}

/// The host's seal.
pub fn seal(pool: &Pool) -> Option<Run> {
    let segment = pool.seal_segment()?;
    Some(Run { segment, offset: 0, len: pool.segments().get(segment)?.len as usize })
}

/// What no component covers: the seal, and whatever else a page has.
pub fn outside_of_layers(pool: &Pool) -> Vec<Run> {
    let mut covered: Vec<Run> = (0..pool.layers()).flat_map(|index| layer(pool, index)).collect();
    covered.sort_unstable();
    let mut gaps = Vec::new();
    for (segment, piece) in pool.segments().iter().enumerate() {
        let mut at = 0;
        for run in covered.iter().filter(|run| run.segment == segment) {
            if run.offset > at {
                gaps.push(Run { segment, offset: at, len: run.offset - at });
            }
            at = at.max(run.offset + run.len);
        }
        if (at as u64) < piece.len {
            gaps.push(Run { segment, offset: at, len: piece.len as usize - at });
        }
    }
    gaps
}

/// Copies runs of a stored page to their places in the page.
///
/// # Errors
/// When the page lies where the host can't touch it.
pub fn copy(page: &mut Page<'_, Get>, stored: &Stored, runs: impl IntoIterator<Item = Run>) -> Result<()> {
    for run in runs {
        let start: usize = page.pool().segments().iter().take(run.segment).map(|segment| segment.len as usize).sum();
        let from = start + run.offset..start + run.offset + run.len;
        let to = page.piece_mut(run.segment)?;
        if let (Some(to), Some(from)) = (to.get_mut(run.offset..run.offset + run.len), stored.bytes.get(from)) {
            to.copy_from_slice(from);
        }
    }
    Ok(())
}

/// Fills a page, or the layers of it that are asked for, and writes its status.
pub fn fill(mut page: Page<'_, Get>, stored: &Stored) {
    if stored.bytes.len() != page.len() || !stored.is_sound() {
        return page.finish(PageStatus::Corrupt);
    }
    let Some(layers) = page.layers() else { return page.fill(&stored.bytes) };
    let pool = page.pool().clone();
    let runs = layers.flat_map(|index| layer(&pool, index)).chain(seal(&pool));
    let status = match copy(&mut page, stored, runs) {
        Ok(()) => PageStatus::Ok,
        Err(_) => PageStatus::Failed,
    };
    page.finish(status);
}
