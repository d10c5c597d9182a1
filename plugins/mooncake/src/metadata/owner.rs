//! Whether a peer still has the memory that it has lent. That it does not answer proves nothing: the way to it may be cut from here alone.

use std::time::Duration;

use super::{Descriptor, Metadata, handshake};
use crate::limit::Limit;
use crate::net;

/// How long a peer may take to answer.
const TIME: Duration = Duration::from_secs(1);

/// What is known of the owner of some memory.
#[derive(Debug)]
pub enum Owner {
    /// Nobody listens any more where it did.
    Ended,
    /// Whoever listens there has this.
    Has(Box<Descriptor>),
    /// It does not answer, or nobody knows where it is.
    Unknown,
}

impl Owner {
    /// Whether memory at an address is proven to be gone.
    pub fn has_lost(&self, address: u64) -> bool {
        match self {
            Owner::Ended => true,
            // Another process may have come to the place; what it has is its own.
            Owner::Has(descriptor) => !descriptor.holds(address, 1),
            Owner::Unknown => false,
        }
    }
}

impl Metadata {
    /// Looks for the owner of memory, by the endpoint that stands in replicas.
    pub fn look_for(&self, endpoint: &str, limit: &Limit<'_>) -> Owner {
        let Ok((host, port)) = self.handshake_place(endpoint, limit) else { return Owner::Unknown };
        let Ok(left) = limit.left() else { return Owner::Unknown };
        if net::is_refused(&host, port, left.min(TIME)) {
            return Owner::Ended;
        }
        match handshake::ask(&host, port, &limit.at_most(TIME)) {
            Ok(descriptor) => Owner::Has(Box::new(descriptor)),
            Err(_) => Owner::Unknown,
        }
    }
}
