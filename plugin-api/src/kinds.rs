//! The named numbers of the boundary: memory kinds, element types, hit policies, scopes, states, capabilities.

use crate::error::wire_enum;

wire_enum! {
    /// Element type of a pool. Formats of their own (packed fp8 rows, states) are bytes.
    Dtype: u32, unknown => Bytes {
        /// Bytes without a common element type.
        Bytes = 0 => "bytes",
        /// IEEE half precision.
        F16 = 1 => "f16",
        /// bfloat16.
        Bf16 = 2 => "bf16",
        /// IEEE single precision.
        F32 = 3 => "f32",
        /// OCP fp8, 4 exponent bits.
        F8E4M3 = 4 => "f8_e4m3",
        /// OCP fp8, 5 exponent bits.
        F8E5M2 = 5 => "f8_e5m2",
    }
}

wire_enum! {
    /// Where a region lies.
    MemoryKind: u32, unknown => Unknown {
        /// A kind that this version does not know. A backend refuses it.
        Unknown = 0 => "unknown",
        /// Memory of this process, readable and writable by its threads.
        Host = 1 => "host",
        /// Device memory of a CUDA GPU; `device_uuid` says which.
        Cuda = 2 => "cuda",
        /// Host memory that is pinned for a CUDA GPU.
        CudaPinned = 3 => "cuda pinned",
    }
}

wire_enum! {
    /// Which pages of a pool a prefix needs.
    HitPolicy: u32, unknown => Unknown {
        /// A policy that this version does not know. A backend refuses it.
        Unknown = 0 => "unknown",
        /// All pages of the prefix.
        AllPages = 1 => "all_pages",
        /// The last `trailing_pages` pages of the prefix.
        TrailingPages = 2 => "trailing_pages",
        /// Block `i` is the anchor's pages from `i * block_pages` on; its group is the last `group_pages` of them. A block
        /// counts when its whole group is there. Never limits the prefix: the verdict is in the statuses of the pages.
        BlockGroups = 3 => "block_groups",
    }
}

wire_enum! {
    /// What `clear` removes.
    ClearScope: u32, unknown => Namespace {
        /// Everything under the namespace of this worker.
        Namespace = 1 => "namespace",
        /// Everything the backend can reach, of all namespaces.
        Everything = 2 => "everything",
    }
}

wire_enum! {
    /// How a backend feels.
    HealthState: u32, unknown => Failed {
        /// Reads and writes work.
        Ok = 1 => "ok",
        /// Part of it works, for instance reads but no writes; the reason says what.
        Degraded = 2 => "degraded",
        /// Nothing works.
        Failed = 3 => "failed",
    }
}

wire_enum! {
    /// What a pool is to the backend.
    PoolRole: u32, unknown => Side {
        /// The pool whose page indices identify a page.
        Anchor = 1 => "anchor",
        /// A pool that travels with the anchor.
        Side = 2 => "side",
    }
}

wire_enum! {
    /// What a component of a page holds.
    ComponentKind: u32, unknown => Other {
        /// Anything else.
        Other = 0 => "other",
        /// Keys.
        K = 1 => "k",
        /// Values.
        V = 2 => "v",
        /// Keys and values in one.
        Kv = 3 => "kv",
        /// Scales of a quantised component.
        Scale = 4 => "scale",
        /// A state that is not addressed by token.
        State = 5 => "state",
        /// The recurrent state of a linear-attention layer.
        TemporalState = 6 => "temporal state",
        /// A convolution state of a linear-attention layer; several follow one another in the order of their number.
        ConvState = 7 => "conv state",
    }
}

wire_enum! {
    /// How loud a log line is.
    LogLevel: u32, unknown => Info {
        /// Something failed.
        Error = 1 => "error",
        /// Something a person should look at.
        Warn = 2 => "warn",
        /// Something worth knowing.
        Info = 3 => "info",
        /// For those who look for a fault.
        Debug = 4 => "debug",
        /// Every step.
        Trace = 5 => "trace",
    }
}

wire_enum! {
    /// What a metric value does.
    MetricKind: u32, unknown => CounterAdd {
        /// Adds to a counter.
        CounterAdd = 1 => "counter",
        /// Sets a gauge.
        GaugeSet = 2 => "gauge",
        /// Observes a value of a distribution.
        Observe = 3 => "histogram",
    }
}

wire_enum! {
    /// What says that pages may be touched.
    ReadyKind: u32, unknown => Unknown {
        /// A kind that this version does not know. A backend refuses it.
        Unknown = 0 => "unknown",
        /// They may be touched at once.
        Now = 1 => "now",
        /// `handle` is the address of a 32-bit word that becomes 1. Read it atomically (acquire).
        HostFlag = 2 => "host flag",
        /// `handle` is a `CUevent`, recorded in the primary context of the device that the pages lie on.
        CudaEvent = 3 => "cuda event",
    }
}

wire_enum! {
    /// How the host uses an instance.
    CacheMode: u32, unknown => Hierarchical {
        /// Pages go between host memory and the store, by `batch_get` and `batch_set`. Registered pools lie in host memory.
        Hierarchical = 1 => "hierarchical",
        /// Pages go between the device and the store, by the linker face. Registered pools lie on the device.
        Linker = 2 => "linker",
    }
}

wire_enum! {
    /// One bit each of [`crate::v0_1::CapabilitiesOut`].
    Capability: u64, unknown => Linker {
        /// It has the linker face.
        Linker = 1 => "linker",
        /// Reads may name a range of layers.
        Ranges = 2 => "ranges",
        /// `batch_remove` works.
        Remove = 4 => "remove",
        /// `clear` works for the namespace.
        ClearNamespace = 8 => "clear_namespace",
        /// `clear` works for everything.
        ClearEverything = 16 => "clear_everything",
        /// What is stored is there for the next process once `flush` or `close` has returned. A power cut is not meant.
        Durable = 32 => "durable",
        /// What is stored can be read by other hosts.
        Shared = 64 => "shared",
        /// It verifies checksums of its own.
        Checksums = 128 => "checksums",
        /// It takes logical pools, by marker objects.
        LogicalPools = 256 => "logical_pools",
        /// It takes CUDA device memory.
        CudaMemory = 512 => "cuda_memory",
        /// It wants to hear which pages the worker itself holds.
        HeldPages = 1024 => "held_pages",
    }
}

wire_enum! {
    /// Where the worker holds pages of its own.
    HeldTier: u32, unknown => Unknown {
        /// A tier that this version does not know. A backend ignores it.
        Unknown = 0 => "unknown",
        /// Device memory.
        Device = 1 => "device",
        /// Host memory.
        Host = 2 => "host",
    }
}

wire_enum! {
    /// What happened to pages that the worker holds.
    HeldChange: u32, unknown => Unknown {
        /// A change that this version does not know. A backend ignores it.
        Unknown = 0 => "unknown",
        /// They are there now.
        Added = 1 => "added",
        /// They are gone.
        Removed = 2 => "removed",
        /// The tier holds no page any more; there are no keys.
        Cleared = 3 => "cleared",
    }
}
