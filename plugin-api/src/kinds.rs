//! The named numbers of the boundary: memory kinds, element types, hit policies, scopes, states.

use crate::error::wire_enum;

wire_enum! {
    /// Element type of a pool. Formats of their own (packed fp8 rows, states) are `Bytes`.
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
        /// Whole groups of `group_pages` keys that each stand for `block_pages` pages of the anchor.
        /// Never limits the prefix.
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
    /// What says that the pages of an offload may be read.
    ReadyKind: u32, unknown => Unknown {
        /// A kind that this version does not know. A backend refuses it.
        Unknown = 0 => "unknown",
        /// They may be read at once.
        Now = 1 => "now",
        /// `handle` is the address of a 32-bit word that becomes 1.
        HostFlag = 2 => "host flag",
        /// `handle` is a `CUevent` of the device's primary context.
        CudaEvent = 3 => "cuda event",
    }
}
