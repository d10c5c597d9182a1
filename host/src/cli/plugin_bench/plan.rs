//! What is measured, and within which bounds.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Memory of the pool at most.
const POOL_BYTES: u64 = 512 * MIB;
/// What one shape stores at most, unless one batch for each thread is more.
const SHAPE_BYTES: u64 = 256 * MIB;
/// What a store that can't be emptied is given at most, all shapes together.
pub(super) const KEPT_BYTES: u64 = 2048 * MIB;
/// Time that the plugin has for a call that moves pages.
pub(super) const DEADLINE: Duration = Duration::from_secs(10);
/// Time that it has for `open`, `flush` and `clear`.
pub(super) const UPKEEP_DEADLINE: Duration = Duration::from_secs(20);
/// Without a word of the worker for so long, the plugin does not come back.
pub(super) const SILENCE: Duration = Duration::from_secs(45);
/// Pages of a call that say most about a plugin: as many as kvdock moves at a time.
pub(super) const USUAL_BATCH: u32 = 32;
/// Threads at most, whatever the plugin likes.
const MOST_THREADS: u32 = 16;

/// What the worker process is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Plan {
    /// The plugin's file.
    pub plugin: PathBuf,
    /// Its configuration.
    pub config: Map<String, Value>,
    /// The fresh folder in the configuration, if it names one.
    pub scratch: Option<PathBuf>,
    /// Few shapes, and less time for each.
    pub quick: bool,
    /// Seconds for all of it, where the user says so.
    pub seconds: Option<u32>,
    /// Memory that the pool may take.
    pub pool_bytes: u64,
}

/// Pages of a size, so many a call, on so many threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub page_bytes: u64,
    pub batch: u32,
    pub threads: u32,
}

/// A part of the shapes of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Batches of [`USUAL_BATCH`], and reads from the disk.
    First,
    /// The other batches.
    Rest,
}

impl Part {
    pub fn has(self, shape: &Shape) -> bool {
        (shape.batch == USUAL_BATCH) == (self == Part::First)
    }
}

impl Shape {
    /// Pages that are in flight at once.
    pub fn pages(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.threads)
    }

    /// Pages that each thread stores at most: whole batches.
    pub fn stored_each(&self) -> u64 {
        let each = SHAPE_BYTES / self.page_bytes / u64::from(self.threads);
        (each / u64::from(self.batch)).max(1) * u64::from(self.batch)
    }

    /// Bytes that it stores at most.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_each() * u64::from(self.threads) * self.page_bytes
    }
}

impl Plan {
    /// Memory for the pool on a machine that has `available` bytes: never more than a quarter of them.
    pub fn pool_bytes(available: Option<u64>) -> u64 {
        available.map_or(POOL_BYTES, |bytes| POOL_BYTES.min(bytes / 4))
    }

    pub fn page_sizes(&self) -> &'static [u64] {
        if self.quick { &[64 * KIB, MIB] } else { &[64 * KIB, MIB, 4 * MIB] }
    }

    /// What is measured, in its order: what says most of each size comes first, so that a slow plugin leaves no size out.
    pub fn steps(&self) -> Vec<(u64, Part)> {
        let of = |part| self.page_sizes().iter().map(move |page_bytes| (*page_bytes, part));
        of(Part::First).chain(of(Part::Rest)).collect()
    }

    /// Shapes for pages of a size on a plugin that likes `concurrency` calls at a time, and those that the memory is too small for.
    pub fn shapes(&self, page_bytes: u64, concurrency: u32) -> (Vec<Shape>, Vec<Shape>) {
        let batches: &[u32] = if self.quick { &[1, USUAL_BATCH] } else { &[1, USUAL_BATCH, 128] };
        let mut threads = vec![1, concurrency.clamp(1, MOST_THREADS)];
        threads.dedup();
        batches
            .iter()
            .flat_map(|batch| threads.iter().map(|threads| Shape { page_bytes, batch: *batch, threads: *threads }))
            .partition(|shape| shape.pages() * page_bytes <= self.pool_bytes)
    }

    /// Bytes that are stored at a time at most, by a store that can be emptied.
    pub fn most_stored(&self, concurrency: u32) -> u64 {
        let shapes = self.page_sizes().iter().flat_map(|page_bytes| self.shapes(*page_bytes, concurrency).0);
        shapes.map(|shape| shape.stored_bytes()).max().unwrap_or(0)
    }

    /// Time for one kind of call in one shape: less where all of it has less time than usual.
    pub fn slice(&self) -> Duration {
        let usual = Duration::from_millis(if self.quick { 150 } else { 600 });
        usual.min(usual.mul_f64(self.total().as_secs_f64() / self.usual_total().as_secs_f64()))
    }

    fn usual_total(&self) -> Duration {
        Duration::from_secs(if self.quick { 15 } else { 50 })
    }

    /// Time for all of it; what has not begun then is left out.
    pub fn total(&self) -> Duration {
        self.seconds.map_or(self.usual_total(), |seconds| Duration::from_secs(seconds.into()))
    }
}

/// `size` bytes for people: page sizes are whole numbers of KiB or MiB.
pub(super) fn page_size(bytes: u64) -> String {
    match bytes % MIB {
        0 => format!("{} MiB", bytes / MIB),
        _ => format!("{} KiB", bytes / KIB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(pool_bytes: u64) -> Plan {
        Plan { plugin: PathBuf::new(), config: Map::new(), scratch: None, quick: false, seconds: None, pool_bytes }
    }

    #[test]
    fn every_shape_fits_the_pool_and_the_others_are_named() {
        let plan = plan(POOL_BYTES);
        let (fit, too_big) = plan.shapes(4 * MIB, 4);
        assert!(fit.iter().all(|shape| shape.pages() * shape.page_bytes <= POOL_BYTES));
        assert_eq!(too_big, [Shape { page_bytes: 4 * MIB, batch: 128, threads: 4 }]);
        assert_eq!(plan.shapes(64 * KIB, 4).0.len(), 6);
        assert_eq!(plan.shapes(64 * KIB, 1).0.len(), 3, "one thread is measured once");
        assert_eq!(plan.shapes(64 * KIB, 0).0[0].threads, 1);
    }

    #[test]
    fn what_a_shape_stores_is_bounded() {
        for page_bytes in [64 * KIB, MIB, 4 * MIB] {
            for shape in plan(POOL_BYTES).shapes(page_bytes, 4).0 {
                assert!(shape.stored_bytes() <= SHAPE_BYTES.max(shape.pages() * page_bytes), "{shape:?}");
                assert_eq!(shape.stored_each() % u64::from(shape.batch), 0);
            }
        }
    }

    #[test]
    fn every_size_is_measured_before_the_rest_of_any() {
        let plan = plan(POOL_BYTES);
        let steps = plan.steps();
        let (first, rest) = steps.split_at(plan.page_sizes().len());
        for (part, steps) in [(Part::First, first), (Part::Rest, rest)] {
            assert!(steps.iter().all(|(_, of)| *of == part));
            assert!(steps.iter().map(|(page_bytes, _)| page_bytes).eq(plan.page_sizes()));
        }
        // Each shape is in one part.
        let shapes = plan.shapes(64 * KIB, 4).0;
        assert_eq!(shapes.iter().filter(|shape| Part::First.has(shape)).count(), 2);
        assert!(shapes.iter().all(|shape| Part::First.has(shape) != Part::Rest.has(shape)));
    }

    #[test]
    fn less_time_means_shorter_slices_and_more_time_more_shapes() {
        let usual = plan(POOL_BYTES);
        let with = |seconds| Plan { seconds: Some(seconds), ..usual.clone() };
        assert_eq!((with(10).total(), with(10).slice()), (Duration::from_secs(10), usual.slice() / 5));
        assert_eq!((with(500).total(), with(500).slice()), (Duration::from_secs(500), usual.slice()));
    }

    #[test]
    fn a_small_machine_has_a_small_pool() {
        assert_eq!(Plan::pool_bytes(None), POOL_BYTES);
        assert_eq!(Plan::pool_bytes(Some(64 << 30)), POOL_BYTES);
        assert_eq!(Plan::pool_bytes(Some(400 * MIB)), 100 * MIB);
    }

    #[test]
    fn sizes_for_people() {
        assert_eq!((page_size(64 * KIB), page_size(4 * MIB)), ("64 KiB".to_owned(), "4 MiB".to_owned()));
    }
}
