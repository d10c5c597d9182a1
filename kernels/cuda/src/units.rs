//! The CUDA sources in the program, and the units they are compiled in.

use sha2::{Digest, Sha256};

use kvdock_kernels::KvDtype;
use kvdock_kernels::WeightFormat;
use kvdock_kernels::ops::RowFormat;

mod files {
    include!(concat!(env!("OUT_DIR"), "/cuda_sources.rs"));
}

/// A file with the macros that it is compiled with. It becomes one module on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Norms over rows and heads.
    Norm,
    /// Operations on elements, and gathers of rows.
    Elementwise,
    /// Rotary embeddings.
    Rope,
    /// New keys and values.
    KvWrite,
    /// Heads of new rows: norms, rotation, and the store of keys and values.
    Heads,
    /// Paged attention, split along the keys.
    Decode {
        /// Element type of the pool.
        dtype: KvDtype,
        /// Elements of a key.
        dim_k: u32,
        /// Elements of a value.
        dim_v: u32,
        /// Query heads that share the loads of a KV head.
        group: u32,
    },
    /// The same in tiles on tensor cores, for 16-bit pools.
    DecodeTiles {
        /// Element type of the pool.
        dtype: KvDtype,
        /// Elements of a key.
        dim_k: u32,
        /// Elements of a value.
        dim_v: u32,
        /// Query heads of a block, which share a KV head.
        group: u32,
    },
    /// Paged attention, in tiles on tensor cores.
    Prefill {
        /// Element type of the pool.
        dtype: KvDtype,
        /// Elements of a key.
        dim_k: u32,
        /// Elements of a value.
        dim_v: u32,
    },
    /// The same by products of warpgroups and bulk copies, for sm_90a alone.
    PrefillHopper {
        /// Element type of the pool.
        dtype: KvDtype,
        /// Elements of a key.
        dim_k: u32,
        /// Elements of a value.
        dim_v: u32,
    },
    /// Embeddings and products with few rows, of all weight formats.
    Gguf,
    /// Matrix products on tensor cores.
    Matmul {
        /// Format of the weights.
        format: WeightFormat,
        /// 16-bit parts that a number is cut into.
        parts: u32,
    },
    /// Pages between device and host.
    PageCopy,
    /// Checksums of pages.
    Seal,
    /// Routers, and what goes with experts.
    Moe,
    /// Weights of eight and four bits.
    Narrow,
    /// New rows in pools of pages.
    Rows,
    /// Attention over rows that are keys and values at once.
    Latent {
        /// How rows lie in their pages.
        format: RowFormat,
        /// Elements of a row.
        width: u32,
        /// How many of them are value.
        value: u32,
    },
    /// The same in tiles on tensor cores, for rows of 16 bits and packed ones.
    LatentTiles {
        /// How rows lie in their pages.
        format: RowFormat,
        /// Elements of a row.
        width: u32,
        /// How many of them are value.
        value: u32,
        /// Heads of a block: 16, 32 or 64.
        heads: u32,
        /// 16-bit parts that queries and weights are cut into.
        parts: u32,
    },
    /// Scores of an indexer, and the highest of them.
    Index,
    /// Scores of an indexer in tiles on tensor cores.
    IndexTiles {
        /// 16-bit parts that queries are cut into.
        parts: u32,
    },
    /// Compressors.
    Compress,
    /// Gated delta nets.
    Delta,
    /// Hyper-connections.
    Hyper,
    /// From logits to tokens.
    Sampling,
}

/// Options of every compilation.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

impl Unit {
    /// The file's name.
    pub const fn file(self) -> &'static str {
        match self {
            Self::Norm => "norm.cu",
            Self::Elementwise => "elementwise.cu",
            Self::Rope => "rope.cu",
            Self::KvWrite => "kv.cu",
            Self::Heads => "heads.cu",
            Self::Decode { .. } => "decode.cu",
            Self::DecodeTiles { .. } => "decode_tiles.cu",
            Self::Prefill { .. } => "prefill.cu",
            Self::PrefillHopper { .. } => "prefill_hopper.cu",
            Self::Gguf => "gguf.cu",
            Self::Matmul { .. } => "matmul.cu",
            Self::PageCopy => "page_copy.cu",
            Self::Seal => "seal.cu",
            Self::Moe => "moe.cu",
            Self::Narrow => "narrow.cu",
            Self::Rows => "rows.cu",
            Self::Latent { .. } => "latent.cu",
            Self::LatentTiles { .. } => "latent_tiles.cu",
            Self::Index => "index.cu",
            Self::IndexTiles { .. } => "index_tiles.cu",
            Self::Compress => "compress.cu",
            Self::Delta => "delta.cu",
            Self::Hyper => "hyper.cu",
            Self::Sampling => "sampling.cu",
        }
    }

    /// The macros, as options of the compiler.
    pub fn macros(self) -> Vec<String> {
        match self {
            Self::Decode { dtype, dim_k, dim_v, group } | Self::DecodeTiles { dtype, dim_k, dim_v, group } => vec![
                format!("-DKV_TYPE={}", type_number(dtype)),
                format!("-DDIM_K={dim_k}"),
                format!("-DDIM_V={dim_v}"),
                format!("-DGROUP={group}"),
            ],
            Self::Prefill { dtype, dim_k, dim_v } | Self::PrefillHopper { dtype, dim_k, dim_v } => {
                vec![
                    format!("-DKV_TYPE={}", type_number(dtype)),
                    format!("-DDIM_K={dim_k}"),
                    format!("-DDIM_V={dim_v}"),
                ]
            }
            Self::Matmul { format, parts } => {
                vec![format!("-DFORMAT={}", format_number(format)), format!("-DPARTS={parts}")]
            }
            Self::Latent { format, width, value } => row_macros(format, width, value),
            Self::LatentTiles { format, width, value, heads, parts } => {
                let mut macros = row_macros(format, width, value);
                macros.extend([format!("-DHEADS={heads}"), format!("-DPARTS={parts}")]);
                macros
            }
            Self::IndexTiles { parts } => vec![format!("-DPARTS={parts}")],
            _ => Vec::new(),
        }
    }

    /// Whether there is code of it for an architecture (`sm_90a`).
    pub fn is_for(self, architecture: &str) -> bool {
        !matches!(self, Self::PrefillHopper { .. }) || architecture == "sm_90a"
    }

    /// All options but the architecture.
    pub fn options(self) -> Vec<String> {
        let mut options: Vec<String> = OPTIONS.iter().map(|option| (*option).to_owned()).collect();
        options.extend(self.macros());
        options
    }

    /// The source; `None` only if the program was built without it.
    pub fn source(self) -> Option<&'static str> {
        files::FILES.iter().find(|(name, _)| *name == self.file()).map(|(_, text)| *text)
    }

    /// A digest over all that the machine code follows from, but for compiler and architecture.
    pub fn digest(self) -> [u8; 32] {
        let mut sha = Sha256::new();
        let mut part = |text: &str| {
            sha.update((text.len() as u64).to_le_bytes());
            sha.update(text);
        };
        part(self.file());
        part(self.source().unwrap_or_default());
        for (name, text) in headers() {
            part(name);
            part(text);
        }
        self.options().iter().for_each(|option| part(option));
        sha.finalize().into()
    }

    /// A name for people and for files: `decode-f16-64-64-4`.
    pub fn name(self) -> String {
        let stem = self.file().trim_end_matches(".cu");
        match self {
            Self::Decode { dtype, dim_k, dim_v, group } | Self::DecodeTiles { dtype, dim_k, dim_v, group } => {
                format!("{stem}-{}-{dim_k}-{dim_v}-{group}", dtype.name())
            }
            Self::Prefill { dtype, dim_k, dim_v } | Self::PrefillHopper { dtype, dim_k, dim_v } => {
                format!("{stem}-{}-{dim_k}-{dim_v}", dtype.name())
            }
            Self::Matmul { format, parts } => format!("{stem}-{}-{parts}", format_name(format)),
            Self::Latent { format, width, value } => format!("{stem}-{}-{width}-{value}", row_name(format)),
            Self::LatentTiles { format, width, value, heads, parts } => {
                format!("{stem}-{}-{width}-{value}-{heads}-{parts}", row_name(format))
            }
            Self::IndexTiles { parts } => format!("{stem}-{parts}"),
            _ => stem.to_owned(),
        }
    }
}

/// The files that sources may include.
pub fn headers() -> Vec<(&'static str, &'static str)> {
    files::FILES.iter().filter(|(name, _)| name.ends_with(".cuh")).copied().collect()
}

/// The number of an element type in the sources.
fn type_number(dtype: KvDtype) -> u32 {
    match dtype {
        KvDtype::F32 => 0,
        KvDtype::F16 => 1,
        KvDtype::BF16 => 2,
    }
}

/// The macros that say how rows lie.
fn row_macros(format: RowFormat, width: u32, value: u32) -> Vec<String> {
    let (kind, rope) = match format {
        RowFormat::Plain(dtype) => (type_number(dtype), 0),
        RowFormat::Packed { rope } => (3, rope),
        // No attention is over packed keys: their rows are not values.
        RowFormat::Key => (4, 0),
    };
    vec![format!("-DROW_TYPE={kind}"), format!("-DWIDTH={width}"), format!("-DVALUE={value}"), format!("-DROPE={rope}")]
}

/// A row's format in names.
fn row_name(format: RowFormat) -> String {
    match format {
        RowFormat::Plain(dtype) => dtype.name().to_owned(),
        RowFormat::Packed { rope } => format!("packed{rope}"),
        RowFormat::Key => "key".to_owned(),
    }
}

/// The format's number in the sources.
fn format_number(format: WeightFormat) -> usize {
    use WeightFormat as F;
    [F::F32, F::F16, F::BF16, F::Q4_0, F::Q4_1, F::Q8_0, F::Q4_K, F::Q5_K, F::Q6_K]
        .iter()
        .position(|known| *known == format)
        .unwrap_or_default()
}

/// The format's name in names of kernels.
pub(super) fn format_name(format: WeightFormat) -> String {
    format.name().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_has_its_source_and_a_digest_of_its_own() {
        let decode = |group| Unit::Decode { dtype: KvDtype::F16, dim_k: 64, dim_v: 64, group };
        let matmul = |format, parts| Unit::Matmul { format, parts };
        let latent_tiles = |heads, parts| Unit::LatentTiles {
            format: RowFormat::Plain(KvDtype::BF16),
            width: 576,
            value: 512,
            heads,
            parts,
        };
        let units = [
            Unit::Norm,
            Unit::Elementwise,
            Unit::Rope,
            Unit::KvWrite,
            Unit::Heads,
            decode(1),
            decode(2),
            Unit::Prefill { dtype: KvDtype::BF16, dim_k: 64, dim_v: 64 },
            Unit::PrefillHopper { dtype: KvDtype::BF16, dim_k: 64, dim_v: 64 },
            Unit::Gguf,
            matmul(WeightFormat::Q4_1, 2),
            matmul(WeightFormat::Q4_1, 1),
            matmul(WeightFormat::Q6_K, 1),
            Unit::PageCopy,
            Unit::Seal,
            Unit::Moe,
            Unit::Narrow,
            Unit::Rows,
            Unit::Latent { format: RowFormat::Plain(KvDtype::BF16), width: 576, value: 512 },
            Unit::Latent { format: RowFormat::Packed { rope: 64 }, width: 512, value: 512 },
            latent_tiles(32, 2),
            latent_tiles(64, 1),
            Unit::Index,
            Unit::IndexTiles { parts: 1 },
            Unit::IndexTiles { parts: 2 },
            Unit::DecodeTiles { dtype: KvDtype::F16, dim_k: 64, dim_v: 64, group: 2 },
            Unit::Compress,
            Unit::Delta,
            Unit::Hyper,
            Unit::Sampling,
        ];
        let digests: std::collections::HashSet<_> = units.iter().map(|unit| unit.digest()).collect();
        let names: std::collections::HashSet<_> = units.iter().map(|unit| unit.name()).collect();
        assert_eq!((digests.len(), names.len()), (units.len(), units.len()));
        for unit in units {
            assert!(unit.source().is_some_and(|text| text.contains("EXPORT(")), "{unit:?}");
        }
        assert!(headers().iter().any(|(name, _)| *name == "common.cuh"));
        assert_eq!(matmul(WeightFormat::Q6_K, 1).macros(), ["-DFORMAT=8", "-DPARTS=1"]);
    }
}
