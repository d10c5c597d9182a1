//! The HTTP faces and the command line, against the real program serving a tiny real model.

mod admin;
mod chat;
mod completions;
mod errors;
mod generate;
mod info;
mod lifecycle;
mod support;
