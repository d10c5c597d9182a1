//! The pools of DeepSeek-V4, and which buffer belongs to which layer.

use super::attention::Place;
use super::compressor::{OVERLAPPING, RING};
use super::config::{Config, HEAVY};
use crate::{HitPolicy, PageSource, PoolDecl, PoolKind, PoolLayout};

/// What a state ring's bytes mean.
const STATE: &str = "values, then scores with ape added";

/// Declarations of a model.
pub(super) struct Pools {
    pub(super) main: Vec<PoolDecl>,
    /// Of the layers that predict further tokens: the anchor is the main model's.
    pub(super) draft: Vec<PoolDecl>,
    pub(super) page_multiple: usize,
}

impl Pools {
    /// `packed`: rows and index keys in eight bits, as the published code keeps them; else in the cache's element type.
    pub(super) fn new(config: &Config, packed: bool) -> Self {
        let with = |ratio: usize| -> Vec<usize> {
            (0..config.layers).filter(|layer| config.ratios[*layer] == ratio).collect()
        };
        let (light, heavy) = (with(OVERLAPPING), with(HEAVY));
        let row = |tokens, elements| match packed {
            true => PoolLayout::PackedRows { tokens, elements, rope: config.rope_dim },
            false => PoolLayout::Rows { tokens, elements },
        };
        let key = |tokens, elements| match packed {
            true => PoolLayout::PackedKeys { tokens, elements },
            false => PoolLayout::Rows { tokens, elements },
        };
        let window = |layers| PoolDecl {
            name: "swa",
            kind: PoolKind::Window,
            source: PageSource::Window,
            hit: HitPolicy::Trailing { tokens: config.window - 1 },
            layers,
            layout: row(1, config.head_dim),
            encoding: "key and value in one, rotated",
        };
        let rows = |name, kind, layout, layers: &[usize], encoding| PoolDecl {
            name,
            kind,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: layers.to_vec(),
            layout,
            encoding,
        };
        let ring = |name, elements| PoolDecl {
            name,
            kind: PoolKind::StateRing,
            source: PageSource::Window,
            // The rows that begin after a hit take in the window of tokens before it.
            hit: HitPolicy::Trailing { tokens: OVERLAPPING },
            layers: light.clone(),
            layout: PoolLayout::Ring { rows: RING, elements },
            encoding: STATE,
        };
        let anchor = PoolDecl {
            name: "kv",
            kind: PoolKind::LogicalAnchor,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: Vec::new(),
            layout: PoolLayout::None,
            encoding: "",
        };
        let compressed = |ratio| PoolKind::CompressedKv { ratio };
        let mut main = vec![anchor.clone(), window((0..config.layers).collect())];
        let mut page_multiple = RING;
        if !light.is_empty() {
            let keys = PoolKind::IndexKeys { ratio: OVERLAPPING };
            let light_rows = row(OVERLAPPING, config.head_dim);
            main.push(rows("deepseek_v4_c4", compressed(OVERLAPPING), light_rows, &light, "rotated"));
            let plain = "rotated, without Hadamard rotation";
            main.push(rows("deepseek_v4_c4_indexer", keys, key(OVERLAPPING, config.index_dim), &light, plain));
            main.push(ring("deepseek_v4_c4_state", 4 * config.head_dim));
            main.push(ring("deepseek_v4_c4_indexer_state", 4 * config.index_dim));
        }
        if !heavy.is_empty() {
            page_multiple = HEAVY;
            main.push(rows("deepseek_v4_c128", compressed(HEAVY), row(HEAVY, config.head_dim), &heavy, "rotated"));
            main.push(PoolDecl {
                name: "deepseek_v4_c128_state",
                kind: PoolKind::RequestState,
                source: PageSource::Slot,
                hit: HitPolicy::Nothing,
                layers: heavy,
                layout: PoolLayout::Slot { elements: HEAVY * 2 * config.head_dim },
                encoding: STATE,
            });
        }
        let draft = vec![anchor, window((config.layers..config.layers + config.drafts).collect())];
        Self { main, draft, page_multiple }
    }

    /// The buffer of `layer` in the pool called `name`.
    pub(super) fn place(&self, name: &str, layer: usize) -> Option<Place> {
        Self::find(&self.main, name, layer).or_else(|| Self::find(&self.draft, name, layer))
    }

    fn find(decls: &[PoolDecl], name: &str, layer: usize) -> Option<Place> {
        let pool = decls.iter().position(|decl| decl.name == name)?;
        let buffer = decls[pool].layers.iter().position(|owner| *owner == layer)?;
        Some(Place { pool, buffer })
    }
}
