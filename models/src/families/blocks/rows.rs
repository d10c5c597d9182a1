//! Rows of a sequence in pools of pages.

use kvdock_kernels::{
    KvDtype, PACKED_SCALES, PagePool, decode_row, encode_row, pack_key, pack_row, unpack_key, unpack_row,
};

use crate::{ModelError, NO_PAGE, PoolLayout, PoolSet};

/// How a row lies in its page.
#[derive(Clone, Copy)]
enum Format {
    Plain(KvDtype),
    /// As [`pack_row`] does it, this many elements at the end in bf16.
    Packed {
        rope: usize,
    },
    /// As [`pack_key`] does it.
    Key,
}

/// A buffer of a pool whose pages hold `rows` rows of `elements` elements.
#[derive(Clone, Copy)]
pub(crate) struct RowBuffer<'a> {
    pool: &'a PagePool,
    buffer: usize,
    rows: usize,
    elements: usize,
    format: Format,
}

impl<'a> RowBuffer<'a> {
    /// Buffer `buffer` of the pool declared at `pool`.
    pub(crate) fn of(pools: &'a PoolSet, pool: usize, buffer: usize) -> Result<Self, ModelError> {
        let none = || ModelError::Batch(format!("pool {pool} of the set has no rows"));
        let decl = pools.decls().get(pool).ok_or_else(none)?;
        let sizes = pools.sizes();
        let (elements, format) = match decl.layout {
            PoolLayout::Rows { elements, .. } => (elements, Format::Plain(sizes.dtype)),
            PoolLayout::PackedRows { elements, rope, .. } => (elements, Format::Packed { rope }),
            PoolLayout::PackedKeys { elements, .. } => (elements, Format::Key),
            PoolLayout::Ring { elements, .. } => (elements, Format::Plain(KvDtype::F32)),
            PoolLayout::None | PoolLayout::Heads { .. } | PoolLayout::Slot { .. } => return Err(none()),
        };
        Ok(Self { pool: pools.pages(pool)?, buffer, rows: decl.page_units(sizes.page_tokens), elements, format })
    }

    /// Bytes of a row without its scales, and bytes of its scales.
    fn row_bytes(&self) -> (usize, usize) {
        match self.format {
            Format::Plain(dtype) => (self.elements * dtype.bytes(), 0),
            Format::Packed { rope } => (self.elements + rope, PACKED_SCALES),
            Format::Key => (self.elements, size_of::<f32>()),
        }
    }

    /// Where row `index` of a page begins, and its scales.
    fn places(&self, index: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let (data, scales) = self.row_bytes();
        let behind = self.rows * data + index * scales;
        (index * data..(index + 1) * data, behind..behind + scales)
    }

    /// Writes rows of a sequence with page table `pages`, each with its index in the sequence.
    pub(crate) fn write<'r>(
        &self,
        pages: &[u32],
        rows: impl Iterator<Item = (usize, &'r [f32])>,
    ) -> Result<(), ModelError> {
        let mut buffer = self.pool.write(self.buffer)?;
        for (index, row) in rows {
            let page = buffer.page(page_of(pages, index / self.rows)?)?;
            let (data, scales) = self.places(index % self.rows);
            match self.format {
                Format::Plain(dtype) => encode_row(dtype, row, &mut page[data]),
                Format::Packed { rope } => {
                    let (front, back) = page.split_at_mut(scales.start);
                    pack_row(row, rope, &mut front[data], &mut back[..scales.len()]);
                }
                Format::Key => {
                    let (front, back) = page.split_at_mut(scales.start);
                    pack_key(row, &mut front[data], &mut back[..scales.len()]);
                }
            }
        }
        Ok(())
    }

    /// Rows of a sequence by their indices, one after the other.
    pub(crate) fn read(
        &self,
        pages: &[u32],
        indices: impl ExactSizeIterator<Item = usize>,
    ) -> Result<Vec<f32>, ModelError> {
        let buffer = self.pool.read(self.buffer)?;
        let mut out = vec![0.0; indices.len() * self.elements];
        for (index, out) in indices.zip(out.chunks_exact_mut(self.elements)) {
            let page = buffer.page(page_of(pages, index / self.rows)?)?;
            let (data, scales) = self.places(index % self.rows);
            match self.format {
                Format::Plain(dtype) => decode_row(dtype, &page[data], out),
                Format::Packed { rope } => unpack_row(&page[data], &page[scales], rope, out),
                Format::Key => unpack_key(&page[data], &page[scales], out),
            }
        }
        Ok(out)
    }
}

fn page_of(pages: &[u32], index: usize) -> Result<u32, ModelError> {
    match pages.get(index) {
        Some(page) if *page != NO_PAGE => Ok(*page),
        _ => Err(ModelError::Batch(format!("page {index} of a sequence is needed and not there"))),
    }
}
