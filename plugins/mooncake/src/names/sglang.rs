//! The names that SGLang 0.5.23 gives the pages of the same model, rank and pool. They bind no weights, type, layout or page size.

use kvdock_plugin_api::{CacheMode, Component, ComponentKind, Error, ErrorKind, Identity, Pool, Result};

use crate::store::shape::{ObjectShape, Piece};

/// What stands before the name of a group.
pub const GROUP: &str = "sglang-hicache:";

/// Layouts of pools of keys and values that SGLang stores in this store.
const LAYOUTS: [&str; 3] = ["page_first", "page_first_direct", "page_head"];
/// Layouts of replicated pools.
const REPLICATED_LAYOUTS: [&str; 4] = ["page_first", "page_first_direct", "layer_first", "page_first_kv_split"];

/// What the names of a worker have in common.
#[derive(Debug, Clone)]
pub struct Sglang {
    /// Rank part of pools that differ between ranks; several where heads are split.
    sharded: Vec<String>,
    /// Rank part of pools that are the same on all ranks.
    replicated: String,
    /// The whole worker's pages are the same on all ranks.
    is_replicated: bool,
    /// In linker mode a page of a pool is one object.
    linker: bool,
    heads_are_split: bool,
}

fn refuse(pool: &Pool, what: &str) -> Error {
    let text = format!("pool {} ({}): key_scheme = \"sglang\": {what}", pool.id(), pool.name());
    Error::new(ErrorKind::Unsupported, text)
}

impl Sglang {
    /// The names of a worker.
    ///
    /// # Errors
    /// When its ranks are none that SGLang has.
    pub fn of(identity: &Identity, mode: CacheMode) -> Result<Sglang> {
        let ((tp, tp_size), (pp, pp_size), (cp, _), (dcp, dcp_size)) =
            (identity.tp, identity.pp, identity.cp, identity.dcp);
        let stage = |text: String, dash: &str| if pp_size > 1 { format!("{text}{dash}{pp}") } else { text };
        if mode == CacheMode::Linker {
            let ranks = format!("cp{cp}_pp{pp}");
            return Ok(Sglang {
                sharded: vec![format!("tp{tp}_{ranks}")],
                replicated: ranks,
                is_replicated: identity.replicated,
                linker: true,
                heads_are_split: false,
            });
        }
        let lcm = identity.tp_lcm_size;
        if lcm > 0 && !lcm.is_multiple_of(tp_size.max(1)) {
            let text =
                format!("key_scheme = \"sglang\": tp_lcm_size is {lcm}; it takes a multiple of the {tp_size} ranks");
            return Err(Error::new(ErrorKind::InvalidConfig, text));
        }
        let heads_are_split = !identity.replicated && lcm > tp_size;
        let split = if heads_are_split { lcm / tp_size.max(1) } else { 1 };
        let sharded = match heads_are_split {
            true => (tp * split..(tp + 1) * split).map(|rank| stage(rank.to_string(), "_")).collect(),
            false => vec![stage(tp.to_string(), "_")],
        };
        let replicated = match dcp_size > 1 {
            true => stage(format!("dcp{dcp}_cp{cp}"), "_"),
            false => stage(String::new(), ""),
        };
        Ok(Sglang { sharded, replicated, is_replicated: identity.replicated, linker: false, heads_are_split })
    }

    /// What stands before every key.
    pub fn prefix(&self, tag: &str, identity: &Identity) -> String {
        let model = identity.model_name.replace('/', "-");
        let mut prefix: String =
            [tag, &model].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("_");
        if identity.dcp.1 > 1 {
            let (tp, dcp, page) = (identity.tp.1, identity.dcp.1, identity.page_tokens);
            let (pp, cp) = (identity.pp.1, identity.cp.1);
            prefix.push_str(&format!("_tp{tp}_dcp{dcp}_page{page}_pp{pp}_cp{cp}"));
        }
        if !prefix.is_empty() {
            prefix.push('_');
        }
        prefix
    }

    /// The objects of a page of a pool, in the order of the pool's segments.
    ///
    /// # Errors
    /// When SGLang stores no such pool, or stores it otherwise.
    pub fn objects(&self, pool: &Pool) -> Result<Vec<ObjectShape>> {
        if pool.seal_segment().is_some() {
            return Err(refuse(pool, "objects of SGLang carry no seal, so the pool must have none"));
        }
        if pool.is_logical() {
            // 0.5.23 stores nothing of it, and takes its pages for there.
            return Ok(Vec::new());
        }
        let shared = self.replicated.as_str();
        let name = pool.name();
        if self.linker {
            let ranks = if self.is_replicated { shared } else { self.one() };
            let last = if name == "kv" { "k" } else { name };
            return Ok(vec![ObjectShape::new(format!("_{ranks}_{last}"), whole(pool))]);
        }
        // Where heads are split SGLang writes the list of ranks as Python does.
        let listed = match self.sharded.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.iter().map(|rank| format!("'{rank}'")).collect::<Vec<_>>().join(", ")),
        };
        let replicated = pool.is_replicated();
        match name {
            "kv" if replicated || self.is_replicated => {
                check_layout(pool, &REPLICATED_LAYOUTS)?;
                Ok(vec![ObjectShape::new(format!("_{shared}_k"), whole(pool))])
            }
            "kv" if self.heads_are_split && pool.layout() == "page_head" => self.split_heads(pool),
            "kv" => {
                check_layout(pool, &LAYOUTS)?;
                keys_and_values(pool, self.one(), "")
            }
            "mamba" => states(pool, &listed),
            "swa" if replicated || self.is_replicated => {
                Ok(vec![ObjectShape::new(format!("_{shared}_swa"), whole(pool))])
            }
            "swa" => keys_and_values(pool, &listed, "swa_"),
            "draft" if replicated => Ok(vec![ObjectShape::new(format!("_{shared}_draft_k"), whole(pool))]),
            "draft" => keys_and_values(pool, &listed, "draft_"),
            "draft_swa" if replicated => Ok(vec![ObjectShape::new(format!("_{shared}_draft_swa"), whole(pool))]),
            "draft_swa" => keys_and_values(pool, &listed, "draft_swa_"),
            "indexer" | "draft_indexer" => Ok(vec![ObjectShape::new(format!("_{shared}_{name}"), whole(pool))]),
            name if name.starts_with("deepseek_v4_") => {
                Ok(vec![ObjectShape::new(format!("_{shared}_{name}"), whole(pool))])
            }
            _ => Err(refuse(pool, "SGLang has no names for pages of this pool; set \"kvdock\"")),
        }
    }

    fn one(&self) -> &str {
        self.sharded.first().map_or("", String::as_str)
    }

    /// Heads outermost: each part of them is an object of the rank that has it where there are more ranks.
    fn split_heads(&self, pool: &Pool) -> Result<Vec<ObjectShape>> {
        let [k, v] = pool.segments() else {
            return Err(refuse(pool, "a page has one segment of keys and one of values there"));
        };
        let count = self.sharded.len() as u64;
        if !k.len.is_multiple_of(count) || !v.len.is_multiple_of(count) {
            return Err(refuse(pool, &format!("its heads can't be split into {count} parts")));
        }
        let part =
            |segment: usize, len: u64, at: u64| vec![Piece { segment, offset: len / count * at, len: len / count }];
        let ranks = self.sharded.iter().zip(0..);
        let both = ranks.flat_map(|(rank, at)| {
            [
                ObjectShape::new(format!("_{rank}_k"), part(0, k.len, at)),
                ObjectShape::new(format!("_{rank}_v"), part(1, v.len, at)),
            ]
        });
        Ok(both.collect())
    }
}

fn check_layout(pool: &Pool, layouts: &[&str]) -> Result<()> {
    if layouts.contains(&pool.layout()) {
        return Ok(());
    }
    let known = layouts.iter().map(|layout| format!("\"{layout}\"")).collect::<Vec<_>>().join(", ");
    Err(refuse(pool, &format!("SGLang stores no pages of layout \"{}\"; it takes {known}", pool.layout())))
}

fn whole(pool: &Pool) -> Vec<Piece> {
    let segments = pool.segments().iter().enumerate();
    segments.map(|(segment, at)| Piece { segment, offset: 0, len: at.len }).collect()
}

/// Of what kind a segment is: that of the components in it.
fn kind(pool: &Pool, segment: usize) -> Option<ComponentKind> {
    let inside = |component: &&Component| component.segment == segment;
    let mut kinds = pool.components().iter().filter(inside).map(|component| component.kind);
    let first = kinds.next()?;
    kinds.all(|kind| kind == first).then_some(first)
}

/// One object of keys and one of values.
fn keys_and_values(pool: &Pool, ranks: &str, name: &str) -> Result<Vec<ObjectShape>> {
    let of = |wanted: ComponentKind| -> Vec<Piece> {
        let segments = pool.segments().iter().enumerate().filter(|(segment, _)| kind(pool, *segment) == Some(wanted));
        segments.map(|(segment, at)| Piece { segment, offset: 0, len: at.len }).collect()
    };
    let (k, v) = (of(ComponentKind::K), of(ComponentKind::V));
    if k.is_empty() || v.is_empty() || k.len() + v.len() != pool.segments().len() {
        return Err(refuse(pool, "its segments are not keys and values, each of one kind, as SGLang stores them"));
    }
    Ok(vec![ObjectShape::new(format!("_{ranks}_{name}k"), k), ObjectShape::new(format!("_{ranks}_{name}v"), v)])
}

/// The states of recurrent layers: the temporal one if there is one, then the convolutions in order.
fn states(pool: &Pool, ranks: &str) -> Result<Vec<ObjectShape>> {
    let mut convolutions = 0;
    let mut objects = Vec::new();
    for (segment, at) in pool.segments().iter().enumerate() {
        let label = match kind(pool, segment) {
            Some(ComponentKind::TemporalState) => format!("_{ranks}_temporal"),
            Some(ComponentKind::ConvState) => {
                convolutions += 1;
                format!("_{ranks}_conv_{}", convolutions - 1)
            }
            _ => return Err(refuse(pool, "a segment holds neither a temporal state nor that of a convolution")),
        };
        if at.len > 0 {
            objects.push(ObjectShape::new(label, vec![Piece { segment, offset: 0, len: at.len }]));
        }
    }
    Ok(objects)
}
