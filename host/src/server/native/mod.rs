//! The native API, with SGLang's fields.

mod generate;
mod generate_answer;
mod health;
mod info;
mod tokenize;
mod upkeep;

pub(super) use generate::generate;
pub(super) use health::{health, health_generate};
pub(super) use info::{model_info, server_info};
pub(super) use tokenize::{detokenize, tokenize};
pub(super) use upkeep::{abort_request, flush_cache, read_tiers};
