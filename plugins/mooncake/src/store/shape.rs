//! How a page of a pool is cut into objects, and which bytes of them belong to which layer.

use std::ops::Range;
use std::sync::Arc;

use kvdock_plugin_api::{Component, Pool};

/// When a layer comes in more runs a page than this, and they are shorter than [`SHORT_RUN`] on average, its pages are read whole: each run costs a
/// request.
const MOST_RUNS: usize = 4;
const SHORT_RUN: u64 = 4096;

/// Bytes of one segment of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Index of the segment.
    pub segment: usize,
    /// First byte in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One object of each page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectShape {
    /// What stands in its name besides the key.
    pub label: String,
    /// What it holds, in order.
    pub parts: Vec<Piece>,
    /// Bytes.
    pub len: u64,
}

impl ObjectShape {
    /// An object that holds some parts of a page.
    pub fn new(label: String, parts: Vec<Piece>) -> ObjectShape {
        let len = parts.iter().map(|part| part.len).sum();
        ObjectShape { label, parts, len }
    }
}

/// A registered pool.
#[derive(Debug, Clone)]
pub struct PoolShape {
    /// The objects of a page. None: nothing is stored of it, and it counts as there.
    pub objects: Arc<[ObjectShape]>,
    /// Pages have no bytes.
    pub logical: bool,
    /// This rank does not store its pages: another one does.
    pub read_only: bool,
    pool: Pool,
}

/// A range of an object, and the parts of a page that hold it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanPlan {
    /// First byte in the object.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Where they lie in the page.
    pub pieces: Vec<Piece>,
}

/// Which bytes of a page are wanted, in which steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Want {
    /// All, at once.
    Whole,
    /// Those of some layers, and the seal, at once.
    Layers(Range<u32>),
    /// Layer by layer; the seal and what belongs to no layer first. With `layers` only those of them, and the seal.
    Steps {
        /// Number of steps; layers beyond the last one come with it.
        steps: usize,
        /// Which layers; none for all, and for what belongs to none.
        layers: Option<Range<u32>>,
    },
}

impl PoolShape {
    /// The shape of a pool.
    pub fn new(pool: &Pool, objects: Vec<ObjectShape>, read_only: bool) -> PoolShape {
        PoolShape { objects: objects.into(), logical: pool.is_logical(), read_only, pool: pool.clone() }
    }

    /// Whether its pages carry a seal, by which the host knows them again.
    pub fn is_sealed(&self) -> bool {
        self.pool.seal_segment().is_some()
    }

    /// For each object the spans of each step.
    pub fn plans(&self, want: &Want) -> Vec<Vec<Vec<SpanPlan>>> {
        self.objects.iter().map(|object| self.plan(object, want)).collect()
    }

    fn plan(&self, object: &ObjectShape, want: &Want) -> Vec<Vec<SpanPlan>> {
        let whole = || vec![SpanPlan { offset: 0, len: object.len, pieces: object.parts.clone() }];
        let (steps, layers) = match want {
            Want::Whole => return vec![whole()],
            _ if self.logical => return vec![whole()],
            Want::Layers(layers) => (1, Some(layers)),
            Want::Steps { steps, layers } => ((*steps).max(1), layers.as_ref()),
        };
        let mut runs: Vec<Vec<(u64, Piece)>> = vec![Vec::new(); steps];
        let mut known: Vec<(u64, u64)> = Vec::new();
        for component in self.pool.components() {
            let wanted = layers.is_none_or(|layers| layers.contains(&component.layer));
            let step = (component.layer as usize).min(steps - 1);
            each_run(object, component, |offset, piece| {
                if wanted && let Some(runs) = runs.get_mut(step) {
                    runs.push((offset, piece));
                }
                known.push((offset, offset + piece.len));
            });
        }
        let Some(first) = runs.first_mut() else { return Vec::new() };
        if let Some(seal) = self.pool.seal_segment() {
            let parts = object.parts.iter().scan(0, |offset, part| {
                let at = *offset;
                *offset += part.len;
                Some((at, *part))
            });
            for (offset, part) in parts.filter(|(_, part)| part.segment == seal) {
                first.push((offset, part));
                known.push((offset, offset + part.len));
            }
        }
        if layers.is_none() {
            for gap in gaps(known, object.len) {
                cut(object, gap, |offset, piece| first.push((offset, piece)));
            }
        }
        let plan: Vec<Vec<SpanPlan>> = runs.into_iter().map(merge).collect();
        let count: usize = plan.iter().map(Vec::len).sum();
        let used = plan.iter().filter(|spans| !spans.is_empty()).count().max(1);
        if layers.is_none() && count > MOST_RUNS * used && object.len / (count as u64) < SHORT_RUN {
            let mut plan = vec![Vec::new(); steps];
            if let Some(first) = plan.first_mut() {
                *first = whole();
            }
            return plan;
        }
        plan
    }
}

/// Calls with each run of a component that lies in an object: where in the object, and where in the page.
fn each_run(object: &ObjectShape, component: &Component, mut each: impl FnMut(u64, Piece)) {
    let mut base = 0;
    for part in &object.parts {
        if part.segment == component.segment {
            for run in 0..component.run_count {
                let start = component.offset + run * component.run_stride;
                let (from, to) = (start.max(part.offset), (start + component.run_len).min(part.offset + part.len));
                if from < to {
                    each(base + from - part.offset, Piece { segment: part.segment, offset: from, len: to - from });
                }
            }
        }
        base += part.len;
    }
}

/// Calls with the pieces of the page that a range of an object holds.
fn cut(object: &ObjectShape, range: Range<u64>, mut each: impl FnMut(u64, Piece)) {
    let mut base = 0;
    for part in &object.parts {
        let (from, to) = (range.start.max(base), range.end.min(base + part.len));
        if from < to {
            each(from, Piece { segment: part.segment, offset: part.offset + from - base, len: to - from });
        }
        base += part.len;
    }
}

/// What no range of `known` covers.
fn gaps(mut known: Vec<(u64, u64)>, len: u64) -> Vec<Range<u64>> {
    known.sort_unstable();
    let mut gaps = Vec::new();
    let mut end = 0;
    for (from, to) in known {
        if from > end {
            gaps.push(end..from);
        }
        end = end.max(to);
    }
    if end < len {
        gaps.push(end..len);
    }
    gaps
}

/// Makes spans of runs: as few as there can be. Bytes that two runs name are moved once.
fn merge(mut runs: Vec<(u64, Piece)>) -> Vec<SpanPlan> {
    runs.sort_unstable_by_key(|(offset, _)| *offset);
    let mut spans: Vec<SpanPlan> = Vec::new();
    for (mut offset, mut piece) in runs {
        let end = spans.last().map_or(0, |span| span.offset + span.len);
        if offset < end {
            let known = (end - offset).min(piece.len);
            offset += known;
            piece.offset += known;
            piece.len -= known;
            if piece.len == 0 {
                continue;
            }
        }
        match spans.last_mut() {
            Some(span) if offset == end => {
                span.len += piece.len;
                match span.pieces.last_mut() {
                    Some(last) if last.segment == piece.segment && last.offset + last.len == piece.offset => {
                        last.len += piece.len;
                    }
                    _ => span.pieces.push(piece),
                }
            }
            _ => spans.push(SpanPlan { offset, len: piece.len, pieces: vec![piece] }),
        }
    }
    spans
}
