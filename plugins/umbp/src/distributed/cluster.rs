//! The cluster as one instance uses it: it starts the node, and ends it.

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use kvdock_plugin_api::{Call, Error, ErrorKind, Host, Identity, LogLevel, Result};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tonic::Code;

use super::data::serve::Server;
use super::limit::Limit;
use super::master::Master;
use super::metrics::Figures;
use super::node::{Node, Parts};
use super::peers::Peers;
use super::pool::Pool;
use super::rdma::Rdma;
use super::serve::Service;
use crate::config::{Config, DataPlane, Distributed, fail};
use crate::local::below::Below;

/// How long the master may take to take this node in.
const JOIN: Duration = Duration::from_secs(10);
/// How long the runtime may take to end.
const END: Duration = Duration::from_secs(5);
/// How long a port that is given may still be somebody else's: one that was just left can be so for a moment, in a process that is being started.
const LEFT: Duration = Duration::from_secs(3);
/// Between two looks at such a port.
const LOOK: Duration = Duration::from_millis(20);

/// What runs for the node.
#[derive(Debug)]
struct Running {
    runtime: Runtime,
    member: JoinHandle<()>,
    /// Writes out what memory has no room for, where there are segments.
    writer: Option<JoinHandle<()>>,
    /// Ends the service when it is dropped.
    service: tokio::sync::oneshot::Sender<()>,
}

/// This instance's node.
#[derive(Debug)]
pub struct Cluster {
    pub(super) node: Arc<Node>,
    pub(super) handle: tokio::runtime::Handle,
    running: Mutex<Option<Running>>,
}

/// A listener at a host's own address; where that is none of this machine's, as behind an address translation, on all.
fn listen(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    addresses.push(SocketAddr::from(([0; 8], port)));
    addresses.push(SocketAddr::from(([0; 4], port)));
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return Ok(listener);
            }
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// As [`listen`]; a port that is given may come free meanwhile.
fn listen_soon(host: &str, port: u16, limit: &Limit<'_>) -> std::io::Result<TcpListener> {
    let limit = limit.at_most(LEFT);
    loop {
        match listen(host, port) {
            Err(error) if port != 0 && error.kind() == std::io::ErrorKind::AddrInUse && limit.left().is_ok() => {
                std::thread::sleep(LOOK);
            }
            done => return done,
        }
    }
}

/// `host:port`; an IPv6 address stands in brackets.
fn join(host: &str, port: u16) -> String {
    match host.parse::<IpAddr>() {
        Ok(IpAddr::V6(_)) => format!("[{host}]:{port}"),
        _ => format!("{host}:{port}"),
    }
}

/// The address of this machine from which the master is reached. Nothing is sent for that.
fn own_address(master: &str) -> Option<String> {
    let master: SocketAddr = master.to_socket_addrs().ok()?.next()?;
    let any = if master.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(master).ok()?;
    Some(socket.local_addr().ok()?.ip().to_string())
}

/// A name that no other node has. It tells two processes apart also where one takes the other's place at once: the master keeps the name of
/// one that was killed for a while.
fn own_name(address: &str, identity: &Identity) -> (String, u64) {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let instance = now.wrapping_mul(1 << 10) ^ (u64::from(std::process::id()) << 4) ^ number;
    let (dp, pp, tp) = (identity.dp.0, identity.pp.0, identity.tp.0);
    (format!("{address}:dp{dp}:pp{pp}:tp{tp}:{instance:x}"), instance)
}

impl Cluster {
    /// Starts the node, and joins the master.
    ///
    /// # Errors
    /// When a port, a device or the master is not to be had; the text names the key.
    pub fn open(
        config: &Config,
        cluster: &Distributed,
        identity: &Identity,
        instance: &str,
        host: Host,
        call: &Call<'_>,
    ) -> Result<Cluster> {
        let mut cluster = cluster.clone();
        if cluster.node_address.is_empty() {
            cluster.node_address = own_address(&cluster.master).ok_or_else(|| {
                fail(
                    instance,
                    "node_address",
                    "it is needed: there is no way from here to the master that would tell it",
                )
            })?;
        }
        let (name, incarnation) = own_name(&cluster.node_address, identity);
        let id = if cluster.node_id.is_empty() { name } else { cluster.node_id.clone() };
        let busy = |key: &str, what: String| {
            let error = fail(instance, key, &what);
            Error { kind: ErrorKind::Unavailable, ..error }
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("kvdock-umbp-node")
            .enable_all()
            .build()
            .map_err(|error| busy("master_address", format!("no threads for the node: {error}")))?;
        let handle = runtime.handle().clone();
        let limit = Limit::of(call, JOIN);
        let service = listen_soon(&cluster.node_address, cluster.peer_port, &limit)
            .map_err(|error| busy("peer_service_port", format!("port {}: {error}", cluster.peer_port)))?;
        let data_host =
            if cluster.data_host.is_empty() { cluster.node_address.clone() } else { cluster.data_host.clone() };
        let data = listen_soon(&data_host, cluster.data_port, &limit)
            .map_err(|error| busy("io_engine_port", format!("port {}: {error}", cluster.data_port)))?;
        let port = |listener: &TcpListener| listener.local_addr().map_or(0, |address| address.port());
        let address = join(&cluster.node_address, port(&service));
        let data_address = join(&data_host, port(&data));

        let below = config.ssd.as_ref().map(|_| Below::open(config, host)).transpose().map_err(|error| {
            let message = format!("storage.{instance}.{}", error.message);
            Error { message, ..error }
        })?;
        let pool = Pool::new(&config.dram, cluster.lease, &mut |what| host.log(LogLevel::Warn, "umbp", &what))?;
        let pool = Arc::new(pool.above(below, config.promote));
        let rdma = open_rdma(&cluster, &pool, &format!("{address}#{incarnation:x}"), instance, &host)?;
        let figures = Arc::<Figures>::default();
        let master = Master::new(&handle, &cluster.master, &id, figures.clone())
            .map_err(|what| fail(instance, "master_address", &what))?;
        let node = Arc::new(Node::new(Parts {
            config: cluster,
            id,
            address,
            data_address,
            instance: incarnation,
            rdma,
            pool: pool.clone(),
            master,
            peers: Peers::new(&handle),
            figures: figures.clone(),
            host,
        }));
        let started = (|| -> std::io::Result<_> {
            let _inside = handle.enter();
            let data = tokio::net::TcpListener::from_std(data)?;
            tokio::spawn(Arc::new(Server::new(pool, figures, incarnation)).run(data));
            let service = tokio::net::TcpListener::from_std(service)?;
            let (end, ended) = tokio::sync::oneshot::channel::<()>();
            let incoming = tonic::transport::server::TcpIncoming::from(service).with_nodelay(Some(true));
            let serve = tonic::transport::Server::builder().serve_with_incoming_shutdown(
                Service(node.clone()),
                incoming,
                async {
                    // It is never sent; that the sender goes is the sign.
                    let _ = ended.await;
                },
            );
            tokio::spawn(serve);
            Ok(end)
        })();
        let service =
            started.map_err(|error| busy("peer_service_port", format!("its service can't start: {error}")))?;
        node.register(&Limit::of(call, JOIN)).map_err(|failed| {
            let hint = match failed.code {
                Some(Code::AlreadyExists) => format!(
                    " (node_id is {:?}; the master forgets a node that was killed after half a minute)",
                    node.id
                ),
                _ => String::new(),
            };
            let error = Error::from(failed);
            Error { message: format!("storage.{instance}.master_address: {}{hint}", error.message), ..error }
        })?;
        let run = node.clone();
        let member = std::thread::Builder::new()
            .name("kvdock-umbp-member".to_owned())
            .spawn(move || run.run())
            .map_err(|error| busy("master_address", format!("no thread for heartbeats: {error}")))?;
        let text = format!("node {} at {}, bytes at {}", node.id, node.address, node.data_address);
        node.host.log(LogLevel::Info, "umbp", &text);
        let mut running = Running { runtime, member, writer: None, service };
        if node.pool.has_below() {
            let pool = node.pool.clone();
            let thread = std::thread::Builder::new().name("kvdock-umbp-disk".to_owned());
            match thread.spawn(move || pool.write_out_until_stopped()) {
                Ok(thread) => running.writer = Some(thread),
                // What has to go is written out by those who need the room.
                Err(error) => host.log(LogLevel::Warn, "umbp", &format!("no thread that writes segments: {error}")),
            }
        }
        Ok(Cluster { node, handle, running: Mutex::new(Some(running)) })
    }

    /// Leaves the master, and ends what runs.
    pub(super) fn leave(&self) {
        let Some(Running { runtime, member, writer, service }) = self.running.lock().take() else { return };
        self.node.stop();
        self.node.pool.stop();
        // They catch nothing; one that panicked has ended too.
        for thread in std::iter::once(member).chain(writer) {
            let _ = thread.join();
        }
        drop(service);
        if let Some(rdma) = &self.node.rdma {
            rdma.transport().close();
        }
        runtime.shutdown_timeout(END);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.leave();
    }
}

fn open_rdma(cluster: &Distributed, pool: &Pool, server: &str, instance: &str, host: &Host) -> Result<Option<Rdma>> {
    if cluster.data_plane == DataPlane::Tcp {
        return Ok(None);
    }
    // SAFETY: the memory is the pool's, which the node keeps for longer than this; objects of others are written only to places that they were given.
    match unsafe { Rdma::open(&cluster.devices, server, pool.whole()) } {
        Ok(rdma) => Ok(Some(rdma)),
        Err(what) if cluster.data_plane == DataPlane::Rdma => {
            let what = format!("{what}; with data_plane = \"tcp\", or \"auto\", bytes go over TCP");
            Err(Error { kind: ErrorKind::Unavailable, ..fail(instance, "data_plane", &what) })
        }
        Err(what) => {
            host.log(LogLevel::Info, "umbp", &format!("bytes go over TCP: {what}"));
            Ok(None)
        }
    }
}
