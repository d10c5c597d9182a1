//! Where the bytes of a page lie in the host pool.
//!
//! A pool has two planes, K and V, for keys and values, one for what only the model can read (a piece a layer and page: 1 head and 1 token),
//! and an area of seals. Each plane is one array whose
//! shape gives the layout its name; `D` bytes of one head and token are always contiguous.
//!
//! | layout | shape of a plane |
//! | --- | --- |
//! | `layer_first` | (layers, pages * P, heads, D) |
//! | `page_first` | (pages * P, layers, heads, D) |
//! | `page_first_direct` | (pages, layers, P, heads, D) |
//! | `page_head` | (pages, heads, P, layers, D) |

use crate::plugin::backend::{HostPoolComponent, HostPoolSegment, PlaneKind};

/// Order of the bytes in the host pool; the names are SGLang's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HostLayout {
    /// Layers outermost: a page is one piece a layer and plane.
    LayerFirst,
    /// Tokens outermost, then layers.
    #[default]
    PageFirst,
    /// Pages outermost, then layers, then tokens.
    PageFirstDirect,
    /// Pages outermost, then heads, tokens, layers.
    PageHead,
}

/// Dimensions of one plane. All byte figures fit in `u64` by [`PlaneShape::bytes`]'s check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneShape {
    /// Layers.
    pub layers: u64,
    /// KV heads.
    pub heads: u64,
    /// Bytes of one head of one token.
    pub head_bytes: u64,
    /// Tokens a page.
    pub page_tokens: u64,
    /// Pages.
    pub pages: u64,
}

/// Distances in bytes within a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneStrides {
    /// From a page to the next.
    pub page: u64,
    /// From a layer to the next.
    pub layer: u64,
    /// From a token to the next.
    pub token: u64,
    /// From a head to the next.
    pub head: u64,
}

impl PlaneShape {
    /// Bytes of one page in this plane, over all layers.
    pub fn page_bytes(&self) -> u64 {
        self.layers * self.heads * self.head_bytes * self.page_tokens
    }

    /// Bytes of the plane, or none if that overflows.
    pub fn bytes(&self) -> Option<u64> {
        self.layers
            .checked_mul(self.heads)?
            .checked_mul(self.head_bytes)?
            .checked_mul(self.page_tokens)?
            .checked_mul(self.pages)
    }

    /// Distances of `layout`.
    pub fn strides(&self, layout: HostLayout) -> PlaneStrides {
        let PlaneShape { layers, heads, head_bytes, page_tokens, pages } = *self;
        let row = heads * head_bytes;
        match layout {
            HostLayout::LayerFirst => {
                PlaneStrides { page: page_tokens * row, layer: pages * page_tokens * row, token: row, head: head_bytes }
            }
            HostLayout::PageFirst => {
                PlaneStrides { page: page_tokens * layers * row, layer: row, token: layers * row, head: head_bytes }
            }
            HostLayout::PageFirstDirect => PlaneStrides {
                page: layers * page_tokens * row,
                layer: page_tokens * row,
                token: row,
                head: head_bytes,
            },
            HostLayout::PageHead => PlaneStrides {
                page: heads * page_tokens * layers * head_bytes,
                layer: head_bytes,
                token: layers * head_bytes,
                head: page_tokens * layers * head_bytes,
            },
        }
    }

    /// The contiguous pieces of a page, as offsets from the start of the plane.
    pub fn segments(&self, layout: HostLayout) -> Vec<HostPoolSegment> {
        let strides = self.strides(layout);
        match layout {
            HostLayout::LayerFirst => (0..self.layers)
                .map(|layer| HostPoolSegment {
                    region: 0,
                    offset: layer * strides.layer,
                    stride: strides.page,
                    len: self.page_bytes() / self.layers.max(1),
                })
                .collect(),
            _ => vec![HostPoolSegment { region: 0, offset: 0, stride: strides.page, len: self.page_bytes() }],
        }
    }

    /// The runs of each layer within a page. `first_segment` is the index of the plane's first
    /// segment.
    pub fn components(&self, layout: HostLayout, kind: PlaneKind, first_segment: u32) -> Vec<HostPoolComponent> {
        let strides = self.strides(layout);
        let row = self.heads * self.head_bytes;
        (0..self.layers as u32)
            .map(|layer| {
                let one_run = HostPoolComponent {
                    layer,
                    kind,
                    segment: first_segment,
                    offset: u64::from(layer) * strides.layer,
                    run_len: self.page_tokens * row,
                    run_stride: self.page_tokens * row,
                    run_count: 1,
                };
                match layout {
                    HostLayout::LayerFirst => {
                        HostPoolComponent { segment: first_segment + layer, offset: 0, ..one_run }
                    }
                    HostLayout::PageFirstDirect => one_run,
                    HostLayout::PageFirst => HostPoolComponent {
                        run_len: row,
                        run_stride: strides.token,
                        run_count: self.page_tokens,
                        ..one_run
                    },
                    // Heads follow each other at `page_tokens` token strides, so one stride covers both.
                    HostLayout::PageHead => HostPoolComponent {
                        run_len: self.head_bytes,
                        run_stride: strides.token,
                        run_count: self.heads * self.page_tokens,
                        ..one_run
                    },
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const ALL: [HostLayout; 4] =
        [HostLayout::LayerFirst, HostLayout::PageFirst, HostLayout::PageFirstDirect, HostLayout::PageHead];

    const SHAPE: PlaneShape = PlaneShape { layers: 3, heads: 2, head_bytes: 8, page_tokens: 4, pages: 5 };

    /// Every (page, layer, token, head) has bytes of its own inside the plane, and they lie in the
    /// segments and runs that the description names.
    #[test]
    fn every_layout_covers_the_plane_exactly() {
        for layout in ALL {
            let strides = SHAPE.strides(layout);
            let segments = SHAPE.segments(layout);
            let components = SHAPE.components(layout, PlaneKind::K, 0);
            let mut seen = HashSet::new();
            for page in 0..SHAPE.pages {
                for layer in 0..SHAPE.layers {
                    let component = components[layer as usize];
                    let segment = segments[component.segment as usize];
                    let start = segment.offset + page * segment.stride;
                    let mut runs = HashSet::new();
                    for run in 0..component.run_count {
                        let at = component.offset + run * component.run_stride;
                        assert!(at + component.run_len <= segment.len, "{layout:?}");
                        for byte in 0..component.run_len {
                            runs.insert(start + at + byte);
                        }
                    }
                    for token in 0..SHAPE.page_tokens {
                        for head in 0..SHAPE.heads {
                            let at = page * strides.page
                                + layer * strides.layer
                                + token * strides.token
                                + head * strides.head;
                            for byte in at..at + SHAPE.head_bytes {
                                assert!(seen.insert(byte), "{layout:?} overlaps");
                                assert!(runs.remove(&byte), "{layout:?} byte outside its runs");
                            }
                        }
                    }
                    assert!(runs.is_empty(), "{layout:?} run has foreign bytes");
                }
            }
            assert_eq!(seen.len() as u64, SHAPE.bytes().unwrap());
            assert!(seen.iter().all(|&byte| byte < SHAPE.bytes().unwrap()));
        }
    }

    #[test]
    fn a_plane_too_large_to_address_is_none() {
        let shape = PlaneShape { pages: u64::MAX / 4, ..SHAPE };
        assert_eq!(shape.bytes(), None);
    }
}
