//! The real services: master, storage peers, official client.

use std::time::Duration;

use kvdock_plugin_mooncake::limit::Limit;
use kvdock_plugin_mooncake::rpc::Client;
use kvdock_plugin_mooncake::wire::{Rpc, rpc};
pub use kvdock_tests::mooncake::{Etcd, Master, Mode, Official, free_port, home};

/// Calls to a master past the plugin.
pub trait Calls {
    /// One call.
    fn call<M: Rpc>(&self, request: &M::Request<'_>) -> M::Reply;
    /// Names of all objects.
    fn keys(&self) -> Vec<String>;
}

impl Calls for Master {
    fn call<M: Rpc>(&self, request: &M::Request<'_>) -> M::Reply {
        let client = Client::new(&self.address(), 1).unwrap();
        client.call::<M>(request, &Limit::within(Duration::from_secs(20))).unwrap()
    }

    fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = match self.call::<rpc::GetReplicaListByRegex>(&(".*", "default")) {
            Ok(found) => found.0.into_iter().map(|(key, _)| key).collect(),
            Err(_) => Vec::new(),
        };
        keys.sort();
        keys
    }
}
