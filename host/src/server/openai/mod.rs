//! The OpenAI API.

mod chat;
mod chat_stream;
mod common;
mod completions;
mod completions_stream;
mod logprobs;
mod messages;
mod models;

pub(super) use chat::{chat_completions, tokenize_chat};
pub(super) use common::failure;
pub(super) use completions::completions;
pub(super) use logprobs::number as logprob_number;
pub(super) use models::{list_models, one_model};
