//! How the transport is set up.

/// Settings of a transport. The defaults are those of official Mooncake peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Names of devices; none for all that have an active port.
    pub devices: Vec<String>,
    /// Port of each device, from 1.
    pub port: u8,
    /// Place in the table of GIDs; none to choose.
    pub gid_index: Option<u8>,
    /// Queue pairs of a connection. Both sides need the same number.
    pub queues: usize,
    /// Requests under way on a queue pair.
    pub depth: u32,
    /// Entries of a device's completion queue: requests under way on all its queue pairs.
    pub completions: u32,
    /// Bytes of a request.
    pub slice: u32,
    /// How often a request that failed is made again.
    pub retries: u32,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            devices: Vec::new(),
            port: 1,
            gid_index: None,
            queues: 2,
            depth: 256,
            completions: 4096,
            slice: 64 << 10,
            retries: 9,
            service_level: 0,
            traffic_class: 0,
        }
    }
}
