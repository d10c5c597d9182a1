//! HTTP in and out: the OpenAI API, the native API, the admin endpoints and metrics.
//!
//! A [`Server`] listens before the model is loaded (so that a port in use is found out at once,
//! and `/health` can say what is going on) and gets what it serves with [`Server::ready`].

mod auth;
mod body;
mod error;
mod fields;
mod listen;
mod native;
mod openai;
mod query;
mod reading;
mod routes;
mod sampling;
mod sse;
mod state;
mod storage_routes;
mod storage_status;
mod usage;

pub use auth::Keys;
pub use error::ApiError;
pub use listen::{bind, run};
pub use routes::router;
pub use state::{Served, Server};
