//! Linker mode: pages go between device pools and storage, layer by layer, with no host tier between.
//!
//! The scheduler hands jobs down and never waits for storage:
//!
//! 1. `lookup` asks what storage has behind the pages that are on the device. The answer stays with the request.
//! 2. A request that is granted pages gets slots of its own for what storage has, and a [`LoadRun`]. All runs of a turn start as one batch.
//! 3. `load` watches the batch. Of a layer that storage has brought the checksums are taken, its copy to the device is started, and its gate opens:
//!    the forward, which waits before each layer for its gate alone ([`Arriving::wait`]), goes on. A device that copies by itself while it computes
//!    waits for the layer's copy itself ([`Arriving::before_layer`]); one that takes checksums takes those of what it got, when all of it is there.
//! 4. At the end each page has a verdict, by its seal. Only good pages go into the tree, up to the last place from which the sequence can be gone
//!    on: all tokens before it, the window before it, the state at it, as far as the model has such. If a bad one was used meanwhile, what that
//!    forward computed for the request is thrown away, and the rest is computed.
//!
//! Pages pass through *transit pages*, host memory that is registered with the plugins: a plugin needs no device support, pools may lie
//! anywhere, and a call that hangs holds transit pages, never a device slot. There are few of them, and none outlives its transfer.

mod coming;
mod load;
mod lookup;
mod run;
mod transit;

pub(crate) use load::{LoadBatch, load};
pub(crate) use lookup::{Answer, Hit, Lookup, look_up};
pub use run::{Arriving, Gate, Verdict};
pub(crate) use run::{LoadRun, LoadSpan, Origin};
