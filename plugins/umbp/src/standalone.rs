//! Standalone mode: memory and disk are those of a server of the node. Names and offsets go over its socket; bytes do not: the server maps the
//! pools by their descriptors.

mod batch;
pub mod client;
pub mod handoff;
mod objects;
mod regions;

pub use objects::Remote;

/// The paths of the two sockets of a server, by its address; none when it names no Unix socket.
pub fn paths(address: &str) -> Option<(String, String)> {
    let path = address.strip_prefix("unix://").or_else(|| address.strip_prefix("unix:")).unwrap_or(address);
    if !path.starts_with('/') || path.contains('\0') {
        return None;
    }
    let stem = path.strip_suffix(".grpc.sock").unwrap_or(path);
    let fd = format!("{stem}.fd.sock");
    // What the kernel's address has room for.
    (path.len() <= 107 && fd.len() <= 107).then(|| (path.to_owned(), fd))
}
