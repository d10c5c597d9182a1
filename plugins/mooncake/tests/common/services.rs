//! The real services: master, storage peers, official client.

use std::time::Duration;

use kvdock_plugin_mooncake::limit::Limit;
use kvdock_plugin_mooncake::metadata::Metadata;
use kvdock_plugin_mooncake::rpc::Client;
use kvdock_plugin_mooncake::wire::types::Place;
use kvdock_plugin_mooncake::wire::{Rpc, rpc};
pub use kvdock_tests::mooncake::{Etcd, Master, Mode, Official, Port, home};

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

/// Puts a port of ours before the data port of the peer that has the only object; gives the peer's own. The peer is found through the metadata
/// server.
pub fn stand_before(master: &Master, port: u16) -> u16 {
    let listed = master.call::<rpc::GetReplicaListByRegex>(&(".*", "default")).unwrap();
    let Place::Memory(memory) = &listed.0[0].1[0].place else { panic!("{listed:?}") };
    let metadata = Metadata::parse(&master.metadata(Mode::Http)).unwrap();
    let limit = Limit::within(Duration::from_secs(20));
    let mut descriptor = metadata.find(&memory.buffer.endpoint, &limit).unwrap().descriptor;
    let own = std::mem::replace(&mut descriptor.tcp_data_port, port);
    let (host, handshake) = metadata.handshake_place(&memory.buffer.endpoint, &limit).unwrap();
    let Metadata::Server(server) = metadata else { panic!("there is a server") };
    server.publish(&host, handshake, &descriptor).unwrap();
    own
}
