//! The store's own types, as release 0.3.13 has them.

use super::message::{messages, numbers, variant};
use super::pack::Uuid;

numbers! {
    /// How far a replica is.
    pub ReplicaStatus {
        /// Space is set aside.
        INITIALIZED = 1,
        /// It is being written.
        PROCESSING = 2,
        /// It can be read.
        COMPLETE = 3,
        /// It is gone.
        REMOVED = 4,
        /// Writing failed.
        FAILED = 5,
    }
}

numbers! {
    /// Which replicas an end or a revoke is about.
    pub ReplicaType {
        /// Those in memory.
        MEMORY = 0,
        /// Those in a shared file system.
        DISK = 1,
        /// Those on an owner's disk.
        LOCAL_DISK = 2,
        /// All that a put has to write before it ends: memory, NVMe over fabrics, distributed file system.
        ALL = 4,
    }
}

numbers! {
    /// What the master thinks of a client.
    pub ClientStatus {
        /// It knows the client.
        OK = 1,
        /// It has forgotten the client's segments, or never knew the client.
        NEED_REMOUNT = 2,
    }
}

numbers! {
    /// How a segment is.
    pub SegmentStatus {
        /// Not mounted.
        UNDEFINED = 0,
        /// Mounted.
        OK = 1,
        /// Objects are moved away.
        DRAINING = 2,
        /// All objects are moved away.
        DRAINED = 3,
        /// Nothing new comes in; it goes when its grace is over.
        GRACEFULLY_UNMOUNTING = 4,
        /// It goes.
        UNMOUNTING = 5,
    }
}

messages! {
    /// One range in the memory of a peer.
    pub struct Buffer {
        /// Bytes.
        size: u64,
        /// Where it starts, in the peer's numbering.
        address: u64,
        /// `tcp` or `rdma`.
        protocol: String,
        /// The peer.
        endpoint: String,
    }

    /// A replica in memory.
    pub struct InMemory {
        /// Where.
        buffer: Buffer,
    }

    /// A replica on NVMe over fabrics.
    pub struct OnFabric {
        /// Where.
        buffer: Buffer,
    }

    /// A replica in a shared file system.
    pub struct OnDisk {
        /// Path of the file.
        path: String,
        /// Bytes.
        size: u64,
    }

    /// A replica on the disk of a peer.
    pub struct OnLocalDisk {
        /// The peer.
        client: Uuid,
        /// Bytes.
        size: u64,
        /// Where the peer is asked for it.
        endpoint: String,
    }

    /// A replica in a distributed file system.
    pub struct OnDistributed {
        /// Path of the file.
        path: String,
        /// Where in it.
        offset: u64,
        /// Bytes.
        size: u64,
        /// Bytes it takes there.
        aligned_size: u64,
        /// Number of the shard.
        shard: i32,
    }

    /// One copy of an object.
    pub struct Replica {
        /// Number.
        id: u64,
        /// Where it lies.
        place: Place,
        /// How far it is.
        status: ReplicaStatus,
    }

    /// Where an object can be read, and for how long.
    pub struct Replicas {
        /// The copies that can be read, those in memory first.
        list: Vec<Replica>,
        /// Milliseconds from now for which none of them is evicted.
        lease_ms: u64,
        /// CRC-64 of the object, if its writer left one.
        checksum: Option<u64>,
    }

    /// How an object is to be stored.
    pub struct ReplicateConfig {
        /// Copies in memory, on different segments.
        replica_num: u64,
        /// Copies on NVMe over fabrics.
        nof_replica_num: u64,
        /// Copies in a distributed file system.
        dfs_replica_num: u64,
        /// 0 leaves the soft pin as it is, 1 sets it, 2 takes it away.
        soft_pin_action: u8,
        /// How long a soft pin holds.
        soft_pin_ttl_ms: Option<u64>,
        /// Never evicted.
        with_hard_pin: bool,
        /// Names of the segments that are tried first.
        preferred_segments: Vec<String>,
        /// One such name: the older form.
        preferred_segment: String,
        /// As `preferred_segments`, for NVMe over fabrics.
        preferred_nof_segments: Vec<String>,
        /// Segments of the same host first.
        prefer_alloc_in_same_node: bool,
        /// What kind of data it is.
        data_type: u8,
        /// The writer's host.
        host_id: String,
        /// One group a key; objects of a group are evicted together.
        group_ids: Option<Vec<String>>,
    }

    /// An object whose put ends.
    pub struct ObjectMeta<'a> {
        /// Key.
        key: &'a str,
        /// CRC-64 of the object.
        checksum: Option<u64>,
    }

    /// Memory that a client lends to the store.
    pub struct Segment {
        /// Drawn anew for each mount.
        id: Uuid,
        /// Name, as `preferred_segments` have it.
        name: String,
        /// First address, in the owner's numbering.
        base: u64,
        /// Bytes.
        size: u64,
        /// Where it is reached; it stands in the replicas.
        endpoint: String,
        /// `tcp` or `rdma`.
        protocol: String,
        /// The owner's host.
        host_id: String,
    }

    /// Answer to a ping.
    pub struct Pong {
        /// Which leader the master follows; 0 without high availability.
        view_version: i64,
        /// What it thinks of the client.
        status: ClientStatus,
    }

    /// Tiers that the master has.
    pub struct StorageConfig {
        /// Folder of the shared file system; empty for none.
        fsdir: String,
        /// It evicts there.
        enable_disk_eviction: bool,
        /// Bytes it may use there; 0 for all.
        quota_bytes: u64,
    }
}

variant! {
    /// Where a replica lies.
    pub enum Place {
        /// In memory.
        Memory(InMemory) = 0,
        /// On NVMe over fabrics.
        Fabric(OnFabric) = 1,
        /// In a shared file system.
        Disk(OnDisk) = 2,
        /// On the disk of a peer.
        LocalDisk(OnLocalDisk) = 3,
        /// In a distributed file system.
        Distributed(OnDistributed) = 4,
    }
}

impl Default for ReplicateConfig {
    /// One copy in memory.
    fn default() -> ReplicateConfig {
        ReplicateConfig {
            replica_num: 1,
            nof_replica_num: 0,
            dfs_replica_num: 0,
            soft_pin_action: 0,
            soft_pin_ttl_ms: None,
            with_hard_pin: false,
            preferred_segments: Vec::new(),
            preferred_segment: String::new(),
            preferred_nof_segments: Vec::new(),
            prefer_alloc_in_same_node: false,
            data_type: 0,
            host_id: String::new(),
            group_ids: None,
        }
    }
}
