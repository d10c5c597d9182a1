//! The functions of the master.

use std::sync::OnceLock;

use super::ErrorCode;
use super::envelope::type_hash;
use super::frame::function_id;
use super::pack::{Decode, Encode, Malformed, Map, Reader, Shape, Uuid, Writer};
use super::types::{
    ObjectMeta, Pong, Replica, ReplicaType, Replicas, ReplicateConfig, Segment, SegmentStatus, StorageConfig,
};

/// A value or an error of the store.
pub type Expected<T> = Result<T, ErrorCode>;

/// A namespace on NVMe over fabrics: identifier, name, first address, bytes, endpoint.
pub type FabricSegment = (Uuid, String, u64, u64, String);

/// A function of the master.
pub trait Rpc {
    /// Name of the method.
    const NAME: &'static str;
    /// Its arguments.
    type Request<'a>: Encode + Decode<'a>;
    /// Its answer.
    type Reply: Encode + std::fmt::Debug + PartialEq + for<'a> Decode<'a>;
    /// Number of the function.
    fn id() -> u32;
    /// Type hash of the arguments; none when there are none, for then there is no message.
    fn request_hash() -> Option<u32>;
    /// Type hash of the answer.
    fn reply_hash() -> u32;
}

/// The arguments of a function that has none: no message at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoArguments;

impl Shape for NoArguments {
    fn literal(_: &mut Vec<u8>) {}
}
impl Encode for NoArguments {
    fn encode(&self, _: &mut Writer) {}
}
impl Decode<'_> for NoArguments {
    fn decode(_: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(NoArguments)
    }
}

macro_rules! master {
    ($lt:lifetime; $($name:ident($request:ty) -> $reply:ty;)+) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of the master.")]
            #[derive(Debug, Clone, Copy)]
            pub enum $name {}

            impl Rpc for $name {
                const NAME: &'static str = stringify!($name);
                type Request<$lt> = $request;
                type Reply = $reply;
                fn id() -> u32 {
                    static ID: OnceLock<u32> = OnceLock::new();
                    *ID.get_or_init(|| function_id(concat!("mooncake::WrappedMasterService::", stringify!($name))))
                }
                fn request_hash() -> Option<u32> {
                    static HASH: OnceLock<Option<u32>> = OnceLock::new();
                    *HASH.get_or_init(|| {
                        let mut literal = Vec::new();
                        <Self::Request<'static> as Shape>::literal(&mut literal);
                        (!literal.is_empty()).then(type_hash::<Self::Request<'static>>)
                    })
                }
                fn reply_hash() -> u32 {
                    static HASH: OnceLock<u32> = OnceLock::new();
                    *HASH.get_or_init(type_hash::<Self::Reply>)
                }
            }
        )+

        /// Calls a macro with the name of each function: what is said of one can be said of all.
        #[cfg(test)]
        macro_rules! for_each_rpc {
            ($each:ident) => { $($each!($name);)+ };
        }
        #[cfg(test)]
        pub(crate) use for_each_rpc;
    };
}

// Arguments: client, key, size and tenant stand in this order wherever they occur.
master! { 'a;
    ServiceReady(NoArguments) -> Expected<String>;
    GetFsdir(NoArguments) -> Expected<String>;
    GetStorageConfig(NoArguments) -> Expected<StorageConfig>;
    Ping(Uuid) -> Expected<Pong>;

    ExistKey((&'a str, &'a str)) -> Expected<bool>;
    BatchExistKey((Vec<&'a str>, &'a str)) -> Vec<Expected<bool>>;
    GetReplicaList((&'a str, &'a str)) -> Expected<Replicas>;
    BatchGetReplicaList((Vec<&'a str>, &'a str)) -> Vec<Expected<Replicas>>;
    GetReplicaListByRegex((&'a str, &'a str)) -> Expected<Map<String, Vec<Replica>>>;

    PutStart((Uuid, &'a str, u64, ReplicateConfig, &'a str)) -> Expected<Vec<Replica>>;
    PutEnd((Uuid, ObjectMeta<'a>, ReplicaType, &'a str)) -> Expected<()>;
    PutRevoke((Uuid, &'a str, ReplicaType, &'a str)) -> Expected<()>;
    BatchPutStart((Uuid, Vec<&'a str>, Vec<u64>, ReplicateConfig, &'a str)) -> Vec<Expected<Vec<Replica>>>;
    BatchPutEnd((Uuid, Vec<ObjectMeta<'a>>, ReplicaType, &'a str)) -> Vec<Expected<()>>;
    BatchPutRevoke((Uuid, Vec<&'a str>, ReplicaType, &'a str)) -> Vec<Expected<()>>;
    UpsertStart((Uuid, &'a str, u64, ReplicateConfig, &'a str)) -> Expected<Vec<Replica>>;
    UpsertEnd((Uuid, ObjectMeta<'a>, ReplicaType, &'a str)) -> Expected<()>;
    UpsertRevoke((Uuid, &'a str, ReplicaType, &'a str)) -> Expected<()>;
    BatchUpsertStart((Uuid, Vec<&'a str>, Vec<u64>, ReplicateConfig, &'a str)) -> Vec<Expected<Vec<Replica>>>;
    BatchUpsertEnd((Uuid, Vec<ObjectMeta<'a>>, &'a str)) -> Vec<Expected<()>>;
    BatchUpsertRevoke((Uuid, Vec<&'a str>, &'a str)) -> Vec<Expected<()>>;

    Remove((&'a str, bool, &'a str)) -> Expected<()>;
    BatchRemove((Vec<&'a str>, bool, &'a str)) -> Vec<Expected<()>>;
    RemoveByRegex((&'a str, bool, &'a str)) -> Expected<i64>;
    RemoveAll((bool, &'a str)) -> i64;
    PollRemoveAll(Uuid) -> Expected<bool>;

    MountSegment((Segment, Uuid)) -> Expected<()>;
    ReMountSegment((Vec<Segment>, Uuid)) -> Expected<()>;
    UnmountSegment((Uuid, Uuid)) -> Expected<()>;
    GracefulUnmountSegment((Uuid, Uuid, u64)) -> Expected<()>;
    QuerySegmentStatus(&'a str) -> Expected<SegmentStatus>;
    QuerySegmentStatusById(Uuid) -> Expected<SegmentStatus>;
    BatchQueryIp(Vec<Uuid>) -> Expected<Map<Uuid, Vec<String>>>;
    BatchReplicaClear((Vec<&'a str>, Uuid, &'a str)) -> Expected<Vec<String>>;

    // What owners of other tiers and movers of replicas call.
    EvictDiskReplica((Uuid, &'a str, &'a str, ReplicaType)) -> Expected<()>;
    BatchEvictDiskReplica((Uuid, Vec<&'a str>, &'a str, ReplicaType)) -> Vec<Expected<()>>;
    MountLocalDiskSegment((Uuid, bool)) -> Expected<()>;
    UnmountLocalDiskSegment(Uuid) -> Expected<()>;
    ReportSsdCapacity((Uuid, i64)) -> Expected<()>;
    OffloadObjectHeartbeat((Uuid, bool)) -> Expected<Vec<(String, String, i64)>>;
    NotifyOffloadSuccess((Uuid, Vec<(&'a str, &'a str, i64)>, Vec<(i64, i64, i64, i64, &'a str)>)) -> Expected<()>;
    PromotionObjectHeartbeat(Uuid) -> Expected<Vec<(String, String, i64)>>;
    PromotionAllocStart((Uuid, &'a str, &'a str, u64, Vec<&'a str>)) -> Expected<(Replica,)>;
    NotifyPromotionSuccess((Uuid, &'a str, &'a str)) -> Expected<()>;
    NotifyPromotionFailure((Uuid, &'a str, &'a str)) -> Expected<()>;
    MountNoFSegment((FabricSegment, Uuid)) -> Expected<()>;
    ReMountNoFSegment((Vec<FabricSegment>, Uuid)) -> Expected<()>;
    UnmountNoFSegment((Uuid, Uuid)) -> Expected<()>;
    GetAllNoFSegments(NoArguments) -> Expected<Vec<FabricSegment>>;
    GetNoFSegmentsByName(&'a str) -> Expected<Vec<(Uuid, Uuid)>>;
    FetchTasks((Uuid, u64)) -> Expected<Vec<(Uuid, i32, String, i64, u32)>>;
    MarkTaskToComplete((Uuid, (Uuid, i32, &'a str))) -> Expected<()>;
    QueryTask(Uuid) -> Expected<(Uuid, i32, i32, i64, i64, Uuid, String)>;
    CreateCopyTask((&'a str, &'a str, Vec<&'a str>)) -> Expected<Uuid>;
    CreateMoveTask((&'a str, &'a str, &'a str, &'a str)) -> Expected<Uuid>;
    CopyStart((Uuid, &'a str, &'a str, &'a str, Vec<&'a str>)) -> Expected<(Replica, Vec<Replica>)>;
    CopyEnd((Uuid, &'a str, &'a str)) -> Expected<()>;
    CopyRevoke((Uuid, &'a str, &'a str)) -> Expected<()>;
    MoveStart((Uuid, &'a str, &'a str, &'a str, &'a str)) -> Expected<(Replica, Option<Replica>)>;
    MoveEnd((Uuid, &'a str, &'a str)) -> Expected<()>;
    MoveRevoke((Uuid, &'a str, &'a str)) -> Expected<()>;
    DynamicReplicaCopyStart((Uuid, &'a str, &'a str, &'a str, Vec<&'a str>, Uuid, u64)) -> Expected<(Replica, Vec<Replica>)>;
    DynamicReplicaCopyEnd((Uuid, &'a str, &'a str, Uuid, u64)) -> Expected<()>;
    DynamicReplicaCopyRevoke((Uuid, &'a str, &'a str, Uuid, u64)) -> Expected<()>;
}
