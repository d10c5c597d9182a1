//! Packed rows of two devices: whether they differ by rounding alone.

use std::collections::BTreeMap;

use kvdock_kernels::{KernelError, PACKED_GROUP, PACKED_SCALES, PagePool, unpack_key, unpack_row};

use crate::{PoolDecl, PoolLayout, PoolMemory, PoolSet};

/// How packed rows of two devices differ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flips {
    /// Elements that were compared; those of a row count each time that its page was looked at.
    pub elements: usize,
    /// Elements of eight bits that were rounded to the neighbouring value. In bf16 that is no more than differences in f32 become in it.
    pub flipped: usize,
    /// Elements that differ by more than a step of their rounding, where nothing before them in the same pass had been rounded the other way: of
    /// these there must be none.
    pub far: usize,
    /// Elements that differ by more than a step, behind others that had been rounded the other way.
    pub behind: usize,
}

impl Flips {
    pub(super) fn add(&mut self, other: Self) {
        self.elements += other.elements;
        self.flipped += other.flipped + other.behind;
        self.far += other.far;
        self.behind += other.behind;
    }
}

/// Steps that lie between an element and its neighbour at most: the scale of a key may itself be rounded the other way, by one part in 256.
const REACH: f32 = 1.1;

/// How much two devices may differ before rounding, as a part of the largest element of a row.
const SLACK: f32 = 1e-4;

/// How rows lie in a page.
#[derive(Clone, Copy)]
struct Packing {
    rows: usize,
    elements: usize,
    /// Elements in bf16 at the end; none for keys, which have one scale.
    rope: Option<usize>,
}

impl Packing {
    fn of(decl: &PoolDecl, page_tokens: usize) -> Option<Self> {
        match decl.layout {
            PoolLayout::PackedRows { tokens, elements, rope } => {
                Some(Self { rows: page_tokens / tokens, elements, rope: Some(rope) })
            }
            PoolLayout::PackedKeys { tokens, elements } => {
                Some(Self { rows: page_tokens / tokens, elements, rope: None })
            }
            _ => None,
        }
    }

    /// Elements in eight bits, at the front.
    fn plain(&self) -> usize {
        self.elements - self.rope.unwrap_or(0)
    }

    /// A row's elements, and the steps of the rounding around each.
    fn read(&self, page: &[u8], row: usize) -> (Vec<f32>, Vec<f32>) {
        let (data, scales) = match self.rope {
            Some(rope) => (self.elements + rope, PACKED_SCALES),
            None => (self.elements, size_of::<f32>()),
        };
        let behind = self.rows * data + row * scales;
        let (data, scales) = (&page[row * data..][..data], &page[behind..][..scales]);
        let mut values = vec![0.0; self.elements];
        let scale = |index: usize| match self.rope {
            Some(_) => f32::from_bits(u32::from(scales[index / PACKED_GROUP]) << 23),
            None => scales.first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes)),
        };
        match self.rope {
            Some(rope) => unpack_row(data, scales, rope, &mut values),
            None => unpack_key(data, scales, &mut values),
        }
        let steps = values.iter().enumerate().map(|(index, value)| match index < self.plain() {
            true => scale(index) * step(value / scale(index), 3, -6),
            false => step(*value, 7, -126),
        });
        let steps = steps.collect();
        (values, steps)
    }
}

/// What lies between a value with so many bits behind its first one and its neighbours; below `2^least` all have the same.
fn step(value: f32, bits: i32, least: i32) -> f32 {
    let exponent = (value.abs().to_bits() >> 23) as i32 - 127;
    2f32.powi(exponent.max(least) - bits)
}

/// Compares the packed pools, and gives the second set the rows of the first. `is_chunk` says that many rows were computed at once: then later ones
/// depend on earlier ones, and a device may multiply with numbers of 16 bits. So of a chunk nothing counts as far, and its states are given, too.
///
/// # Errors
/// A pool that can't be read or written.
pub(super) fn align(expected: &PoolSet, found: &PoolSet, is_chunk: bool) -> Result<Flips, KernelError> {
    let mut by_layer = BTreeMap::<usize, Vec<(f32, f32)>>::new();
    let mut flips = Flips::default();
    for (index, decl) in expected.decls().iter().enumerate() {
        let (Some(PoolMemory::Pages(expected_pool)), Some(PoolMemory::Pages(found_pool))) =
            (expected.memory(index), found.memory(index))
        else {
            continue;
        };
        let Some(packing) = Packing::of(decl, expected.sizes().page_tokens) else {
            if is_chunk && matches!(decl.layout, PoolLayout::Ring { .. } | PoolLayout::Slot { .. }) {
                give(expected_pool, found_pool)?;
            }
            continue;
        };
        for (buffer, layer) in decl.layers.iter().enumerate() {
            let off = by_layer.entry(*layer).or_default();
            flips.elements += align_layer(expected_pool, found_pool, buffer, packing, off)?;
        }
    }
    // Of each layer: distances in steps.
    let mut clean = true;
    for off in by_layer.into_values() {
        let rounded = off.iter().filter(|(distance, step)| distance <= step).count();
        let far = off.len() - rounded;
        flips.flipped += rounded;
        match clean && !is_chunk {
            true => flips.far += far,
            false => flips.behind += far,
        }
        clean &= off.is_empty();
    }
    Ok(flips)
}

/// Gives the second pool the bytes of the first.
fn give(expected: &PagePool, found: &PagePool) -> Result<(), KernelError> {
    let spec = expected.spec();
    let mut bytes = vec![0; spec.page_bytes];
    for (page, layer) in (0..spec.pages as u32).flat_map(|page| (0..spec.layers).map(move |layer| (page, layer))) {
        expected.copy_layer_out(page, layer, &mut bytes)?;
        found.copy_layer_in(page, layer, &bytes)?;
    }
    Ok(())
}

/// Compares a layer; notes distance and step of each element that differs by at least half a step. Says how many elements there are.
fn align_layer(
    expected: &PagePool,
    found: &PagePool,
    buffer: usize,
    packing: Packing,
    off: &mut Vec<(f32, f32)>,
) -> Result<usize, KernelError> {
    let spec = expected.spec();
    let (mut ours, mut theirs) = (vec![0; spec.page_bytes], vec![0; spec.page_bytes]);
    for page in 0..spec.pages as u32 {
        expected.copy_layer_out(page, buffer, &mut ours)?;
        found.copy_layer_out(page, buffer, &mut theirs)?;
        if ours == theirs {
            continue;
        }
        for row in 0..packing.rows {
            let ((values, steps), (others, other_steps)) = (packing.read(&ours, row), packing.read(&theirs, row));
            let most = values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
            for (index, (value, other)) in values.iter().zip(&others).enumerate() {
                let step = steps[index].max(other_steps[index]);
                let distance = (value - other).abs();
                if distance.is_nan() {
                    // What is no number is far from everything.
                    off.push((f32::INFINITY, 0.0));
                    continue;
                }
                // Where numbers cancel out, what is left differs by a part of what was there before.
                let reach = step * REACH + SLACK * most;
                let is_coarse = index < packing.plain();
                if distance > if is_coarse { 0.5 * step } else { reach } {
                    off.push((distance, reach));
                }
            }
        }
        found.copy_layer_in(page, buffer, &ours)?;
    }
    Ok(spec.pages * packing.rows * packing.elements)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use kvdock_kernels::cpu::CpuDevice;
    use kvdock_kernels::{KvDtype, pack_key, pack_row};

    use super::*;
    use crate::{HitPolicy, PageSource, PoolKind, PoolSizes};

    const WIDTH: usize = 128;
    const ROPE: usize = 16;

    /// Pools of rows and of keys of two layers; in one page of each layer a row is written.
    fn pools() -> PoolSet {
        let decl = |name, layout| PoolDecl {
            name,
            kind: PoolKind::FullKv,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: vec![0, 3],
            layout,
            encoding: "",
        };
        let decls = [
            decl("rows", PoolLayout::PackedRows { tokens: 1, elements: WIDTH, rope: ROPE }),
            decl("keys", PoolLayout::PackedKeys { tokens: 1, elements: WIDTH }),
            decl("plain", PoolLayout::Rows { tokens: 1, elements: 4 }),
            decl("ring", PoolLayout::Ring { rows: 4, elements: 4 }),
        ];
        let sizes = PoolSizes { page_tokens: 4, anchor_pages: 2, window_pages: 1, slots: 1, dtype: KvDtype::F32 };
        let pools = PoolSet::allocate(&CpuDevice::new(1).unwrap(), &decls, sizes).unwrap();
        let row: Vec<f32> = (0..WIDTH).map(|index| (index as f32 - 60.0) / 7.0).collect();
        for layer in 0..2 {
            edit(&pools, 0, layer, |page| {
                let (data, scales) = page.split_at_mut(4 * (WIDTH + ROPE));
                pack_row(&row, ROPE, &mut data[..WIDTH + ROPE], &mut scales[..PACKED_SCALES]);
            });
            edit(&pools, 1, layer, |page| {
                let (data, scales) = page.split_at_mut(4 * WIDTH);
                pack_key(&row, &mut data[2 * WIDTH..3 * WIDTH], &mut scales[8..12]);
            });
        }
        pools
    }

    fn pool(pools: &PoolSet, index: usize) -> &PagePool {
        let Some(PoolMemory::Pages(pool)) = pools.memory(index) else { panic!("pages of bytes") };
        pool
    }

    fn edit(pools: &PoolSet, index: usize, layer: usize, change: impl FnOnce(&mut [u8])) {
        let pool = pool(pools, index);
        let mut page = vec![0; pool.spec().page_bytes];
        pool.copy_layer_out(1, layer, &mut page).unwrap();
        change(&mut page);
        pool.copy_layer_in(1, layer, &page).unwrap();
    }

    #[test]
    fn a_step_is_told_from_a_fault_and_both_are_taken_back() {
        let (ours, theirs) = (pools(), pools());
        let elements = 2 * 2 * 2 * 4 * WIDTH;
        let same = Flips { elements, ..Flips::default() };
        assert_eq!(align(&ours, &theirs, false).unwrap(), same);
        // The neighbour, in eight bits and in bf16.
        edit(&theirs, 0, 1, |page| page[5] ^= 1);
        edit(&theirs, 0, 1, |page| page[WIDTH - ROPE + 4] ^= 1);
        edit(&theirs, 1, 1, |page| page[2 * WIDTH + 9] ^= 1);
        assert_eq!(align(&ours, &theirs, false).unwrap(), Flips { flipped: 2, ..same }, "of bf16 it is nothing");
        assert_eq!(align(&ours, &theirs, false).unwrap(), same, "the second has the rows of the first now");
        edit(&theirs, 0, 0, |page| page[WIDTH - ROPE + 4] ^= 8);
        assert_eq!(align(&ours, &theirs, false).unwrap(), Flips { far: 1, ..same }, "of bf16 eight steps are");
        // Two steps beside it, a scale of another row's.
        edit(&theirs, 0, 0, |page| page[5] ^= 2);
        edit(&theirs, 1, 0, |page| page[2 * WIDTH + 9] ^= 0x80);
        assert_eq!(align(&ours, &theirs, false).unwrap(), Flips { far: 2, ..same });
        edit(&theirs, 0, 0, |page| page[4 * (WIDTH + ROPE)] += 1);
        assert!(align(&ours, &theirs, false).unwrap().far > 50);
        // What follows from rows of the layers before may be anything.
        edit(&theirs, 0, 0, |page| page[5] ^= 1);
        edit(&theirs, 0, 1, |page| page[7] ^= 0x80);
        assert_eq!(align(&ours, &theirs, false).unwrap(), Flips { flipped: 1, behind: 1, ..same });
        edit(&theirs, 0, 1, |page| page[7] ^= 0x80);
        assert_eq!(align(&ours, &theirs, true).unwrap(), Flips { behind: 1, ..same });
        // States are compared by what becomes of them; a chunk's are given.
        let ring = |pools: &PoolSet| {
            let mut page = vec![0; pool(pools, 3).spec().page_bytes];
            pool(pools, 3).copy_layer_out(1, 1, &mut page).unwrap();
            page[9]
        };
        edit(&ours, 3, 1, |page| page[9] = 5);
        assert_eq!(align(&ours, &theirs, false).unwrap(), same);
        assert_eq!(ring(&theirs), 0);
        assert_eq!(align(&ours, &theirs, true).unwrap(), same);
        assert_eq!(ring(&theirs), 5);
        edit(&theirs, 0, 1, |page| page[7] = 0x7F);
        assert_eq!(align(&ours, &theirs, false).unwrap(), Flips { far: 1, ..same }, "what is no number");
    }

    #[test]
    fn steps_are_those_of_the_format() {
        assert_eq!((step(1.0, 3, -6), step(-1.9, 3, -6), step(2.0, 3, -6)), (0.125, 0.125, 0.25));
        assert_eq!((step(0.0, 3, -6), step(0.01, 3, -6)), (1.0 / 512.0, 1.0 / 512.0));
        assert_eq!(step(1.5, 7, -126), 1.0 / 128.0);
    }
}
