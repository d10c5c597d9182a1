//! Sockets: binding, accepting, and ending connections in order.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::routes::Peer;

/// Most time for the head of a request to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause after an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Time that answers under way get once the server stops.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Listens on `host:port`; port 0 picks a free one.
///
/// # Errors
/// Names the address and what the system said.
pub async fn bind(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), String> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let explain = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::AddrInUse => "; set server.port to a free port, or 0",
            io::ErrorKind::PermissionDenied => "; ports below 1024 need privileges",
            io::ErrorKind::AddrNotAvailable => "; server.host is no address of this machine",
            _ => "",
        };
        format!("can't listen on {host}:{port}: {error}{hint}")
    };
    let listener = TcpListener::bind((bare, port)).await.map_err(explain)?;
    let address = listener.local_addr().map_err(explain)?;
    Ok((listener, address))
}

/// Accepts and serves connections until `stop` becomes true; then lets answers under way end.
pub async fn run(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>) {
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        match accepted {
            Ok((stream, peer)) => serve_one(stream, peer, &router, &graceful),
            Err(error) if is_about_one_connection(&error) => {
                tracing::debug!("a connection ended before it was accepted: {error}");
            }
            Err(error) => {
                tracing::warn!("can't accept connections right now: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    if tokio::time::timeout(LAST_ANSWERS, graceful.shutdown()).await.is_err() {
        tracing::warn!("some connections were still open at the end");
    }
}

fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

fn serve_one(stream: TcpStream, peer: SocketAddr, router: &Router, graceful: &GracefulShutdown) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("TCP_NODELAY: {error}");
    }
    let router = TowerToHyperService::new(router.clone());
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        router.call(request)
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%peer, "connection ended: {error}");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_an_error_that_names_it() {
        let (_listener, address) = bind("127.0.0.1", 0).await.unwrap();
        let error = bind("127.0.0.1", address.port()).await.unwrap_err();
        assert!(error.contains(&address.to_string()), "{error}");
        assert!(error.contains("server.port"), "{error}");
    }

    #[tokio::test]
    async fn an_ipv6_address_may_stand_in_brackets() {
        // Machines without IPv6 can't bind it, but must not take the brackets for a name.
        match bind("[::1]", 0).await {
            Ok((_, address)) => assert!(address.is_ipv6()),
            Err(error) => assert!(!error.contains("lookup"), "{error}"),
        }
    }
}
