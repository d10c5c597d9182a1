//! Decoders with a plain residual stream whose layers may differ: how they mix tokens (heads of keys and values with or
//! without a window, a gated delta net, latent attention with an indexer), and how they feed forward (MLP or experts).
//!
//! Each family reads its configuration and loads its weights into one [`run::Decoder`]; the forward pass is the same for
//! all of them.

mod common;
mod delta;
mod dsa;
mod gpt_oss;
mod gqa;
mod mimo;
mod mla;
mod qwen_hybrid;
mod qwen_moe;
mod run;

pub(super) use common::Basics;

use crate::families::blocks::Linear;
