//! DeepSeek-V4: attention over a window of tokens and over rows that sum up 4 or 128 tokens each, several residual
//! streams, experts by token id in the first layers, and a layer that predicts the token after the next.

mod attention;
mod compressor;
mod config;
mod hyper;
mod load;
mod pools;
mod run;
mod step;

use std::sync::Arc;

use super::{Build, Family, Geometry, Parts};
use crate::ModelError;
use crate::families::blocks::keys::Keys;
use crate::families::blocks::load::Loader;
use crate::families::blocks::replay::Streams;

inventory::submit! {
    Family {
        name: "deepseek_v4",
        gguf: &[],
        hf: &["DeepseekV4ForCausalLM"],
        latents: false,
        build,
    }
}

fn build(input: &Build<'_>) -> Result<Parts, ModelError> {
    let loader = Loader::new(input, &["fp8"])?;
    let config = config::Config::read(&Keys(loader.config()))?;
    let places = pools::Pools::new(&config, input.packed_rows);
    let net = load::net(&loader, &config, &places)?;
    let geometry = Geometry {
        vocab_size: config.vocab,
        context_length: config.context,
        hidden: config.hidden,
        layers: config.layers,
        kv: None,
        pools: places.main,
        draft_pools: if net.drafts.is_empty() { Vec::new() } else { places.draft },
        page_multiple: places.page_multiple,
    };
    let (device, share) = (Arc::clone(input.device), input.share.clone());
    Ok(Parts {
        geometry,
        finish: Box::new(move |spec| Arc::new(run::DeepseekV4 { spec, net, device, share, kept: Streams::default() })),
    })
}
