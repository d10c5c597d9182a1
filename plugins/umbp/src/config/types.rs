//! What a configuration is made of.

use std::path::PathBuf;
use std::time::Duration;

/// How pages are named in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// With identity.
    Kvdock,
    /// As SGLang names them.
    Sglang,
}

/// What a process may do in a directory of segments that several share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It has the directory alone; pages go there when memory is short, and at the end.
    Standalone,
    /// It writes every page to the directory as well.
    Leader,
    /// It reads what the leader writes.
    Follower,
}

/// What makes room in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The page used longest ago goes.
    Lru,
    /// Among the pages used longest ago, the one deepest in its chain goes.
    PrefixAwareLru,
}

/// What moves bytes to and from segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoBackend {
    /// io_uring where the kernel has it, else positional I/O.
    Uring,
    /// Positional I/O.
    Posix,
}

/// Memory of this process.
#[derive(Debug, Clone, PartialEq)]
pub struct Dram {
    /// Bytes of the pool.
    pub capacity: u64,
    /// Bytes of its pages.
    pub page: u64,
    /// Used part from which room is made.
    pub high: f64,
    /// Used part to which room is made.
    pub low: f64,
    /// Whether to map it with huge pages, and how large those are.
    pub huge_page: Option<u64>,
    /// NUMA nodes to bind it to; none for any.
    pub numa_nodes: Vec<u32>,
    /// What can't be bound is an error.
    pub numa_strict: bool,
    /// Touch all of it at the start.
    pub prefault: bool,
    /// Threads that do that; 0 for one a processor.
    pub prefault_threads: usize,
    /// How bytes are copied in and out.
    pub copies: Copies,
}

/// How bytes are copied into memory and out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copies {
    /// Threads of a set.
    pub write_threads: usize,
    /// Threads of a get.
    pub read_threads: usize,
    /// Bytes a thread that are worth having one more.
    pub worth: u64,
    /// Bytes from which what comes in is written past the caches; none for never.
    pub past_caches: Option<usize>,
}

/// Segment files.
#[derive(Debug, Clone, PartialEq)]
pub struct Ssd {
    /// Directories, one a drive.
    pub dirs: Vec<PathBuf>,
    /// Bytes over all of them.
    pub capacity: u64,
    /// Bytes of a segment file.
    pub segment: u64,
    /// What moves the bytes.
    pub io: IoBackend,
    /// Operations in flight at most.
    pub queue_depth: u32,
    /// Whether a write is on the disk when it is acknowledged.
    pub strict: bool,
    /// Used part from which room is made.
    pub high: f64,
    /// Used part to which room is made.
    pub low: f64,
    /// Past the page cache, where the file system lets it.
    pub direct: bool,
    /// Write checksums and verify them.
    pub verify: bool,
    /// Threads of a read.
    pub threads: usize,
    /// Drives that are written at once; 0 for all.
    pub shard_threads: usize,
    /// Those who want one object at the same time share one read of it.
    pub single_flight: bool,
}

/// Copies from memory to segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    /// The leader's copies happen after a set has answered.
    pub background: bool,
    /// Most pages that wait for their copy.
    pub queue: usize,
    /// Threads that copy.
    pub workers: usize,
    /// Most pages of one write.
    pub batch: usize,
}

/// The mode with a server of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standalone {
    /// Address of the server: a Unix socket.
    pub address: String,
    /// How long to wait for it at the start.
    pub startup: Duration,
    /// Identity of this worker at the master, for external KV reports; may be empty.
    pub node_id: String,
    /// Address that goes with it.
    pub node_address: String,
    /// Tags of the worker.
    pub tags: Vec<String>,
    /// Lists of names that the server is asked to remember; 0 for none.
    pub key_handles: usize,
    /// Bytes of a message at most.
    pub message: usize,
}
