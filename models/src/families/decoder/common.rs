//! What the families' loaders share.

use std::sync::Arc;

use kvdock_kernels::ops::{Activation, Experts};

use super::run::{Decoder, Net, Place};
use crate::families::blocks::keys::Keys;
use crate::families::blocks::load::Loader;
use crate::families::blocks::moe::{Mlp, group};
use crate::families::blocks::replay::Streams;
use crate::families::blocks::share::Cut;
use crate::families::{Build, Geometry, Parts};
use crate::{KvGeometry, ModelError, PoolDecl};

/// Layers above this are none.
const MAX_LAYERS: usize = 4096;
/// Experts above this are none.
const MAX_EXPERTS: usize = 1 << 16;

/// Sizes that every family has under the same keys.
pub(crate) struct Basics {
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    /// The longest sequence. A family whose rotary embedding is stretched sets what that one serves.
    pub(crate) context: usize,
    /// Layers behind the others that predict further tokens; the checkpoint may have them, this crate's decoders do not.
    pub(crate) predicting: usize,
    pub(crate) tied: bool,
}

impl Basics {
    pub(crate) fn read(keys: &Keys<'_>) -> Result<Self, ModelError> {
        keys.expect("hidden_act", &["silu"])?;
        let layers = keys.size("num_hidden_layers")?;
        if layers > MAX_LAYERS {
            return Err(keys.inconsistent(format!("at most {MAX_LAYERS} layers, found {layers}")));
        }
        let predicting = keys.count_or("num_nextn_predict_layers", 0)?;
        if predicting > MAX_LAYERS {
            return Err(keys.inconsistent(format!("at most {MAX_LAYERS} predicting layers, found {predicting}")));
        }
        Ok(Self {
            vocab: keys.size("vocab_size")?,
            hidden: keys.size("hidden_size")?,
            layers,
            context: keys.size("max_position_embeddings")?,
            predicting,
            tied: keys.flag_or("tie_word_embeddings", false)?,
        })
    }

    /// Heads that are shared evenly among KV heads.
    pub(crate) fn check_heads(keys: &Keys<'_>, heads: usize, kv_heads: usize) -> Result<(), ModelError> {
        if heads.is_multiple_of(kv_heads) {
            return Ok(());
        }
        Err(keys.inconsistent(format!(
            "a number of heads that is a multiple of the KV heads, found {heads} and {kv_heads}"
        )))
    }

    /// Experts, of which some are chosen.
    pub(crate) fn check_experts(keys: &Keys<'_>, experts: usize, chosen: usize) -> Result<(), ModelError> {
        if (1..=MAX_EXPERTS).contains(&experts) && (1..=experts).contains(&chosen) {
            return Ok(());
        }
        Err(keys
            .inconsistent(format!("1 to {MAX_EXPERTS} experts and up to as many chosen, found {experts} and {chosen}")))
    }

    /// The parts of a model whose layers have been loaded.
    pub(super) fn parts(
        &self,
        build: &Build<'_>,
        net: Net,
        kv: Option<KvGeometry>,
        pools: Vec<PoolDecl>,
    ) -> Result<Parts, ModelError> {
        let geometry = Geometry {
            vocab_size: self.vocab,
            context_length: self.context,
            hidden: self.hidden,
            layers: self.layers,
            kv,
            pools,
            draft_pools: Vec::new(),
            page_multiple: 1,
        };
        let (device, share) = (Arc::clone(build.device), build.share.clone());
        Ok(Parts {
            geometry,
            finish: Box::new(move |spec| Arc::new(Decoder { spec, net, device, share, streams: Streams::default() })),
        })
    }

    /// Embedding, final norm and output matrix, below `prefix`; layers are still to come.
    pub(super) fn net(
        &self,
        loader: &Loader<'_>,
        prefix: &str,
        eps: f32,
        plus_one: bool,
        window: usize,
    ) -> Result<Net, ModelError> {
        let norm = format!("{prefix}.norm.weight");
        let further = format!("{prefix}.layers.{}.input_layernorm.weight", self.layers + self.predicting);
        loader.refuse_further_layer(&further, self.layers)?;
        Ok(Net {
            embedding: loader.vocabulary(&format!("{prefix}.embed_tokens.weight"), self.vocab, self.hidden)?,
            layers: Vec::with_capacity(self.layers),
            norm: if plus_one {
                loader.vector_plus_one(&norm, self.hidden)?
            } else {
                loader.vector(&norm, self.hidden)?
            },
            head: if self.tied { None } else { Some(loader.vocabulary("lm_head.weight", self.vocab, self.hidden)?) },
            eps,
            window,
        })
    }
}

/// `BASE.{gate,up,down}_proj`, of which a rank holds its share of the columns.
pub(super) fn mlp(loader: &Loader<'_>, base: &str, width: usize, hidden: usize) -> Result<Mlp, ModelError> {
    let columns = loader.deal(width, "columns of an MLP")?;
    mlp_part(loader, base, width, hidden, (&Cut::Rows(columns.clone()), &Cut::Cols(columns)))
}

fn mlp_part(
    loader: &Loader<'_>,
    base: &str,
    width: usize,
    hidden: usize,
    (wide, narrow): (&Cut, &Cut),
) -> Result<Mlp, ModelError> {
    let linear = |part: &str, shape, cut: &Cut| loader.linear_part(&format!("{base}.{part}_proj"), shape, cut, false);
    Ok(Mlp {
        gate: linear("gate", (width, hidden), wide)?,
        up: linear("up", (width, hidden), wide)?,
        down: linear("down", (hidden, width), narrow)?,
        activation: Activation::Silu,
    })
}

/// A rank's share of the experts below `base`: one by one, or all in `gate_up_proj` `[experts, 2 · width, hidden]` and `down_proj`.
pub(super) fn experts(
    loader: &Loader<'_>,
    base: &str,
    count: usize,
    width: usize,
    hidden: usize,
) -> Result<Experts, ModelError> {
    let held = loader.deal(count, "experts")?;
    let first = held.start;
    let fused = format!("{base}.gate_up_proj");
    if !loader.has(&fused)? {
        let one = |expert| mlp_part(loader, &format!("{base}.{expert}"), width, hidden, (&Cut::Whole, &Cut::Whole));
        return Ok(group(loader.device(), held.map(one).collect::<Result<_, _>>()?, first)?);
    }
    let down = format!("{base}.down_proj");
    let linear = |name: &str, rows, cols, values| {
        Ok::<_, ModelError>(super::Linear { weight: loader.upload(name, rows, cols, &values)?, bias: None })
    };
    let experts = held
        .map(|expert| {
            let both = loader.slice(&fused, (expert, count), 2 * width, hidden)?;
            Ok(Mlp {
                gate: linear(&fused, width, hidden, both.rows(hidden, 0..width))?,
                up: linear(&fused, width, hidden, both.rows(hidden, width..2 * width))?,
                down: linear(&down, hidden, width, loader.slice(&down, (expert, count), hidden, width)?)?,
                activation: Activation::Silu,
            })
        })
        .collect::<Result<Vec<_>, ModelError>>()?;
    Ok(group(loader.device(), experts, first)?)
}

/// Gives the layers of each pool their buffers, in order of the layers.
pub(super) struct Places {
    counts: Vec<usize>,
    total: usize,
}

impl Places {
    pub(super) fn new(pools: usize) -> Self {
        Self { counts: vec![0; pools], total: 0 }
    }

    pub(super) fn next(&mut self, pool: usize) -> Place {
        let place = Place { pool, buffer: self.counts[pool], alone: self.total };
        self.counts[pool] += 1;
        self.total += 1;
        place
    }
}
