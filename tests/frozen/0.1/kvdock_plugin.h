/* kvdock's boundary to storage plugins, ABI version 0.1.
 *
 * Made from the Rust types of the crate kvdock-plugin-api; do not edit. What a plugin and a host promise each other stands in ABI.md,
 * a worked example in examples/c-minimal.
 *
 * - When a call returns, with any status, nothing that works for the plugin (thread, device, DMA engine, other process)
 *   touches the memory of that call again.
 * - Unless a field says otherwise, what a struct points at lives until the call returns. A pointer with a count of 0 may be null.
 *   Text is UTF-8 without a trailing zero.
 * - Destination pages of calls in flight are disjoint, and the host neither reads nor writes them; it does not write source pages.
 * - Data calls run concurrently, also with one key in two calls.
 * - `close` is called once, after every other call has returned. It stops the plugin's threads before it returns.
 * - No call unwinds and none longjmps out. Reserved fields are written 0 and not read.
 * - A function that the plugin does not offer is there all the same and answers KVDOCK_ERROR_KIND_UNSUPPORTED.
 */
#ifndef KVDOCK_PLUGIN_H
#define KVDOCK_PLUGIN_H

#include <stdint.h>

#ifdef __cplusplus
#define KVDOCK_EXTERN_C extern "C"
#else
#define KVDOCK_EXTERN_C
#endif

/** Number of ABI version 0.1, as tables and the entry carry it. */
#define KVDOCK_ABI_VERSION_0_1 1u

/** In place of an index: none. */
#define KVDOCK_NONE 4294967295u

/** Why a call failed. */
enum kvdock_error_kind {
    /** The configuration is wrong; the message names the key. */
    KVDOCK_ERROR_KIND_INVALID_CONFIG = 1,
    /** Something named in the call does not exist. */
    KVDOCK_ERROR_KIND_NOT_FOUND = 2,
    /** The store can't be reached or is not ready. */
    KVDOCK_ERROR_KIND_UNAVAILABLE = 3,
    /** The deadline of the call passed. */
    KVDOCK_ERROR_KIND_TIMED_OUT = 4,
    /** The store has no room. */
    KVDOCK_ERROR_KIND_NO_SPACE = 5,
    /** Stored bytes failed a check. */
    KVDOCK_ERROR_KIND_CORRUPT = 6,
    /** The backend does not do this. */
    KVDOCK_ERROR_KIND_UNSUPPORTED = 7,
    /** The cancel flag of the call was set. */
    KVDOCK_ERROR_KIND_CANCELLED = 8,
    /** A fault of the backend itself. */
    KVDOCK_ERROR_KIND_INTERNAL = 9,
};

/** What became of one page of one pool in a batch call. */
enum kvdock_page_status {
    /** Not answered. The host writes it before a call; left standing it counts as failed. */
    KVDOCK_PAGE_STATUS_UNSET = 0,
    /** Found, read, written or removed. */
    KVDOCK_PAGE_STATUS_OK = 1,
    /** The store does not hold the page. */
    KVDOCK_PAGE_STATUS_MISSING = 2,
    /** Reading or writing failed; the error of the call or the log says why. */
    KVDOCK_PAGE_STATUS_FAILED = 3,
    /** The store holds the page, but its bytes failed a check or have another length. */
    KVDOCK_PAGE_STATUS_CORRUPT = 4,
    /** The store declines to take the page, for instance because it is full. */
    KVDOCK_PAGE_STATUS_REFUSED = 5,
};

/** Element type of a pool. Formats of their own (packed fp8 rows, states) are bytes. */
enum kvdock_dtype {
    /** Bytes without a common element type. */
    KVDOCK_DTYPE_BYTES = 0,
    /** IEEE half precision. */
    KVDOCK_DTYPE_F16 = 1,
    /** bfloat16. */
    KVDOCK_DTYPE_BF16 = 2,
    /** IEEE single precision. */
    KVDOCK_DTYPE_F32 = 3,
    /** OCP fp8, 4 exponent bits. */
    KVDOCK_DTYPE_F8_E4_M3 = 4,
    /** OCP fp8, 5 exponent bits. */
    KVDOCK_DTYPE_F8_E5_M2 = 5,
};

/** Where a region lies. */
enum kvdock_memory_kind {
    /** A kind that this version does not know. A backend refuses it. */
    KVDOCK_MEMORY_KIND_UNKNOWN = 0,
    /** Memory of this process, readable and writable by its threads. */
    KVDOCK_MEMORY_KIND_HOST = 1,
    /** Device memory of a CUDA GPU; `device_uuid` says which. */
    KVDOCK_MEMORY_KIND_CUDA = 2,
    /** Host memory that is pinned for a CUDA GPU. */
    KVDOCK_MEMORY_KIND_CUDA_PINNED = 3,
};

/** Which pages of a pool a prefix needs. */
enum kvdock_hit_policy {
    /** A policy that this version does not know. A backend refuses it. */
    KVDOCK_HIT_POLICY_UNKNOWN = 0,
    /** All pages of the prefix. */
    KVDOCK_HIT_POLICY_ALL_PAGES = 1,
    /** The last `trailing_pages` pages of the prefix. */
    KVDOCK_HIT_POLICY_TRAILING_PAGES = 2,
    /** Block `i` is the anchor's pages from `i * block_pages` on; its group is the last `group_pages` of them. A block
     * counts when its whole group is there. Never limits the prefix: the verdict is in the statuses of the pages.
     */
    KVDOCK_HIT_POLICY_BLOCK_GROUPS = 3,
};

/** What a pool is to the backend. */
enum kvdock_pool_role {
    /** The pool whose page indices identify a page. */
    KVDOCK_POOL_ROLE_ANCHOR = 1,
    /** A pool that travels with the anchor. */
    KVDOCK_POOL_ROLE_SIDE = 2,
};

/** What a component of a page holds. */
enum kvdock_component_kind {
    /** Anything else. */
    KVDOCK_COMPONENT_KIND_OTHER = 0,
    /** Keys. */
    KVDOCK_COMPONENT_KIND_K = 1,
    /** Values. */
    KVDOCK_COMPONENT_KIND_V = 2,
    /** Keys and values in one. */
    KVDOCK_COMPONENT_KIND_KV = 3,
    /** Scales of a quantised component. */
    KVDOCK_COMPONENT_KIND_SCALE = 4,
    /** A state that is not addressed by token. */
    KVDOCK_COMPONENT_KIND_STATE = 5,
    /** The recurrent state of a linear-attention layer. */
    KVDOCK_COMPONENT_KIND_TEMPORAL_STATE = 6,
    /** A convolution state of a linear-attention layer; several follow one another in the order of their number. */
    KVDOCK_COMPONENT_KIND_CONV_STATE = 7,
};

/** What `clear` removes. */
enum kvdock_clear_scope {
    /** Everything under the namespace of this worker. */
    KVDOCK_CLEAR_SCOPE_NAMESPACE = 1,
    /** Everything the backend can reach, of all namespaces. */
    KVDOCK_CLEAR_SCOPE_EVERYTHING = 2,
};

/** How a backend feels. */
enum kvdock_health_state {
    /** Reads and writes work. */
    KVDOCK_HEALTH_STATE_OK = 1,
    /** Part of it works, for instance reads but no writes; the reason says what. */
    KVDOCK_HEALTH_STATE_DEGRADED = 2,
    /** Nothing works. */
    KVDOCK_HEALTH_STATE_FAILED = 3,
};

/** How loud a log line is. */
enum kvdock_log_level {
    /** Something failed. */
    KVDOCK_LOG_LEVEL_ERROR = 1,
    /** Something a person should look at. */
    KVDOCK_LOG_LEVEL_WARN = 2,
    /** Something worth knowing. */
    KVDOCK_LOG_LEVEL_INFO = 3,
    /** For those who look for a fault. */
    KVDOCK_LOG_LEVEL_DEBUG = 4,
    /** Every step. */
    KVDOCK_LOG_LEVEL_TRACE = 5,
};

/** What a metric value does. */
enum kvdock_metric_kind {
    /** Adds to a counter. */
    KVDOCK_METRIC_KIND_COUNTER_ADD = 1,
    /** Sets a gauge. */
    KVDOCK_METRIC_KIND_GAUGE_SET = 2,
    /** Observes a value of a distribution. */
    KVDOCK_METRIC_KIND_OBSERVE = 3,
};

/** What says that pages may be touched. */
enum kvdock_ready_kind {
    /** A kind that this version does not know. A backend refuses it. */
    KVDOCK_READY_KIND_UNKNOWN = 0,
    /** They may be touched at once. */
    KVDOCK_READY_KIND_NOW = 1,
    /** `handle` is the address of a 32-bit word that becomes 1. Read it atomically (acquire). */
    KVDOCK_READY_KIND_HOST_FLAG = 2,
    /** `handle` is a `CUevent`, recorded in the primary context of the device that the pages lie on. */
    KVDOCK_READY_KIND_CUDA_EVENT = 3,
};

/** How the host uses an instance. */
enum kvdock_cache_mode {
    /** Pages go between host memory and the store, by `batch_get` and `batch_set`. Registered pools lie in host memory. */
    KVDOCK_CACHE_MODE_HIERARCHICAL = 1,
    /** Pages go between the device and the store, by the linker face. Registered pools lie on the device. */
    KVDOCK_CACHE_MODE_LINKER = 2,
};

/** One bit each of `kvdock_capabilities_out`. */
enum kvdock_capability {
    /** It has the linker face. */
    KVDOCK_CAPABILITY_LINKER = 1,
    /** Reads may name a range of layers. */
    KVDOCK_CAPABILITY_RANGES = 2,
    /** `batch_remove` works. */
    KVDOCK_CAPABILITY_REMOVE = 4,
    /** `clear` works for the namespace. */
    KVDOCK_CAPABILITY_CLEAR_NAMESPACE = 8,
    /** `clear` works for everything. */
    KVDOCK_CAPABILITY_CLEAR_EVERYTHING = 16,
    /** What is stored is there for the next process once `flush` or `close` has returned. A power cut is not meant. */
    KVDOCK_CAPABILITY_DURABLE = 32,
    /** What is stored can be read by other hosts. */
    KVDOCK_CAPABILITY_SHARED = 64,
    /** It verifies checksums of its own. */
    KVDOCK_CAPABILITY_CHECKSUMS = 128,
    /** It takes logical pools, by marker objects. */
    KVDOCK_CAPABILITY_LOGICAL_POOLS = 256,
    /** It takes CUDA device memory. */
    KVDOCK_CAPABILITY_CUDA_MEMORY = 512,
    /** It wants to hear which pages the worker itself holds. */
    KVDOCK_CAPABILITY_HELD_PAGES = 1024,
};

/** Where the worker holds pages of its own. */
enum kvdock_held_tier {
    /** A tier that this version does not know. A backend ignores it. */
    KVDOCK_HELD_TIER_UNKNOWN = 0,
    /** Device memory. */
    KVDOCK_HELD_TIER_DEVICE = 1,
    /** Host memory. */
    KVDOCK_HELD_TIER_HOST = 2,
};

/** What happened to pages that the worker holds. */
enum kvdock_held_change {
    /** A change that this version does not know. A backend ignores it. */
    KVDOCK_HELD_CHANGE_UNKNOWN = 0,
    /** They are there now. */
    KVDOCK_HELD_CHANGE_ADDED = 1,
    /** They are gone. */
    KVDOCK_HELD_CHANGE_REMOVED = 2,
    /** The tier holds no page any more; there are no keys. */
    KVDOCK_HELD_CHANGE_CLEARED = 3,
};

/** SHA-256 digest that names a page: the hash chain over the tokens up to its end. */
typedef uint8_t kvdock_page_key[32];

/** 0 is success; anything else is the KVDOCK_ERROR_KIND_* that also stands in the `kvdock_error_out`. */
typedef uint32_t kvdock_status;

typedef struct kvdock_bytes kvdock_bytes;
typedef struct kvdock_error_out kvdock_error_out;
typedef struct kvdock_call_context kvdock_call_context;
typedef struct kvdock_identity kvdock_identity;
typedef struct kvdock_capabilities_out kvdock_capabilities_out;
typedef struct kvdock_open_args kvdock_open_args;
typedef struct kvdock_host_table kvdock_host_table;
typedef struct kvdock_region kvdock_region;
typedef struct kvdock_segment kvdock_segment;
typedef struct kvdock_component kvdock_component;
typedef struct kvdock_pool_desc kvdock_pool_desc;
typedef struct kvdock_pool_query kvdock_pool_query;
typedef struct kvdock_exists_args kvdock_exists_args;
typedef struct kvdock_pool_transfer kvdock_pool_transfer;
typedef struct kvdock_batch_args kvdock_batch_args;
typedef struct kvdock_held_pages kvdock_held_pages;
typedef struct kvdock_stats kvdock_stats;
typedef struct kvdock_health_out kvdock_health_out;
typedef struct kvdock_backend_table kvdock_backend_table;
typedef struct kvdock_load_args kvdock_load_args;
typedef struct kvdock_start_args kvdock_start_args;
typedef struct kvdock_finish_args kvdock_finish_args;
typedef struct kvdock_ready_handle kvdock_ready_handle;
typedef struct kvdock_offload_args kvdock_offload_args;
typedef struct kvdock_offload_done kvdock_offload_done;
typedef struct kvdock_linker_table kvdock_linker_table;

/** Bytes that the callee may read until the call returns. Text is UTF-8. */
struct kvdock_bytes {
    /** First byte; may be null when `len` is 0. */
    const uint8_t *ptr;
    /** Number of bytes. */
    uint64_t len;
};

/** Where a failing call writes why. The host owns the buffer. */
struct kvdock_error_out {
    /** A KVDOCK_ERROR_KIND_*; 0 when nothing was written. */
    uint32_t kind;
    /** 1: the same call may succeed later. */
    uint8_t retryable;
    /** 1: the plugin panicked. The host fails the instance. */
    uint8_t panicked;
    /** Reserved, 0. */
    uint8_t reserved[2];
    /** Buffer for a message for a person, UTF-8. */
    uint8_t *message;
    /** Bytes the buffer can take. */
    uint64_t message_capacity;
    /** Bytes written; a longer message is cut at a character. */
    uint64_t message_len;
};

/** Deadline and cancel flag of a call. */
struct kvdock_call_context {
    /** When the call is late, in nanoseconds of CLOCK_MONOTONIC; 0 for never. */
    uint64_t deadline_ns;
    /** A word the host sets to a value other than 0 to ask the call to return. Read it atomically.
     * May be null.
     */
    const uint32_t *cancel;
    /** Number of the call, for logs. */
    uint64_t trace_id;
};

/** Who this worker is. Everything that changes the bytes of a page is bound in the namespace. */
struct kvdock_identity {
    /** SHA-256 over what the namespace binds: content digest of the weights, KV dtype, layout, page size, rank geometry,
     * numerics of the kernels. Pages under other namespaces are not ours.
     */
    uint8_t namespace_digest[32];
    /** The bound values as a JSON object, for a person and for readable key schemes. */
    kvdock_bytes namespace_json;
    /** Name of the model as clients use it. */
    kvdock_bytes model_name;
    /** SHA-256 of the weights. */
    uint8_t weights_digest[32];
    /** Which kernels write pages: bit-exact reuse holds among equal ids only. */
    kvdock_bytes numerics_id;
    /** Tokens a page. */
    uint32_t page_tokens;
    /** Tensor-parallel rank, among the ranks that share the attention of one request. */
    uint32_t tp_rank;
    /** Number of tensor-parallel ranks. */
    uint32_t tp_size;
    /** Pipeline stage. */
    uint32_t pp_rank;
    /** Number of pipeline stages. */
    uint32_t pp_size;
    /** Context-parallel rank. */
    uint32_t cp_rank;
    /** Number of context-parallel ranks. */
    uint32_t cp_size;
    /** Data-parallel rank. Pages do not depend on it. */
    uint32_t dp_rank;
    /** Number of data-parallel ranks. */
    uint32_t dp_size;
    /** Decode-context-parallel rank. */
    uint32_t dcp_rank;
    /** Number of decode-context-parallel ranks. */
    uint32_t dcp_size;
    /** Least common multiple of the tensor-parallel sizes that share pages by split heads; 0 for none. */
    uint32_t tp_lcm_size;
    /** 1: every tensor-parallel rank holds the same bytes, and only the writer stores them. */
    uint32_t replicated;
    /** 1: this rank stores pages that are replicated. */
    uint32_t writer;
};

/** What an instance can do, and what suits it, given its configuration and what it found when it opened. It is never more than the
 * note of the plugin declares.
 */
struct kvdock_capabilities_out {
    /** Bits of KVDOCK_CAPABILITY_*. A bit that the host does not know is ignored. */
    uint64_t flags;
    /** Alignment of addresses and lengths that avoids a copy, in bytes; 1 for none. */
    uint32_t alignment;
    /** Pages a call that suit it best. */
    uint32_t preferred_batch;
    /** Data calls at a time that suit it best; the host makes no more. */
    uint32_t concurrency;
    /** Reserved, 0. */
    uint32_t reserved;
};

/** What `open` takes. Everything it points at lives until `open` returns, but for `host` and `host_context`,
 * which live as long as the process.
 */
struct kvdock_open_args {
    /** Deadline and cancel flag of the call. */
    kvdock_call_context context;
    /** The configuration as a JSON object that fits the schema in the plugin's note. */
    kvdock_bytes config_json;
    /** Name of this instance in the host's configuration. */
    kvdock_bytes instance_name;
    /** Who this worker is. */
    const kvdock_identity *identity;
    /** What the host offers. */
    const kvdock_host_table *host;
    /** First argument of every function of `host`. */
    void *host_context;
    /** A KVDOCK_CACHE_MODE_*: which face the host will use. */
    uint32_t cache_mode;
    /** Reserved, 0. */
    uint32_t reserved;
};

/** What the host offers to a plugin. The functions may be called from any thread, do not block, never call back,
 * and stay valid for the life of the process. The first argument is `host_context` of `kvdock_open_args`.
 */
struct kvdock_host_table {
    /** Bytes of this table. */
    uint64_t size;
    /** Version of this table. */
    uint32_t abi_version;
    /** Reserved, 0. */
    uint32_t reserved;
    /** Writes a log line: level (a KVDOCK_LOG_LEVEL_*), target, message. */
    void (*log)(void *, uint32_t, kvdock_bytes, kvdock_bytes);
    /** Reports a metric: kind (a KVDOCK_METRIC_KIND_*), name, labels as a JSON object or empty, value. */
    void (*metric)(void *, uint32_t, kvdock_bytes, kvdock_bytes, double);
    /** Tells a change of health: state (a KVDOCK_HEALTH_STATE_*), reason. */
    void (*health_changed)(void *, uint32_t, kvdock_bytes);
    /** Tells that an offload has completed, so that the host need not poll. */
    void (*offload_completed)(void *);
    /** Tells that layers of a batch of loads were settled, so that the host need not poll the words. */
    void (*layers_settled)(void *, uint64_t);
};

/** A range of memory that pages lie in. It stays valid from registration until `unregister` or
 * `close` returns. Pools may share regions.
 */
struct kvdock_region {
    /** First byte, as this process sees it; for device memory its address on the device. */
    void *base;
    /** Bytes. */
    uint64_t len;
    /** A KVDOCK_MEMORY_KIND_*. An unknown kind is refused. */
    uint32_t memory_kind;
    /** Descriptor of the memfd (host memory) or dma-buf (device memory) behind the region, or -1. Owned by the host, and valid as long as
     * the region; duplicate it to keep it.
     */
    int32_t fd;
    /** Where in the descriptor the region starts, in bytes. */
    uint64_t fd_offset;
    /** UUID of the device the memory lies on; zero for host memory. */
    uint8_t device_uuid[16];
    /** Reserved, 0. */
    uint64_t flags;
};

/** One piece of every page of a pool. Page `i` has it at `base of region + offset + i * stride`. */
struct kvdock_segment {
    /** Index into the regions of the pool. */
    uint32_t region;
    /** Reserved, 0. */
    uint32_t reserved;
    /** Byte offset of page 0's piece in the region. */
    uint64_t offset;
    /** Bytes from one page's piece to the next page's. */
    uint64_t stride;
    /** Bytes of the piece. */
    uint64_t len;
};

/** Where one layer's part of a page lies: `run_count` runs of `run_len` bytes, `run_stride` bytes apart,
 * in one segment.
 */
struct kvdock_component {
    /** Layer, from 0 in this pipeline stage, and the same in all pools. Several components may have one layer. */
    uint32_t layer;
    /** A KVDOCK_COMPONENT_KIND_*. */
    uint32_t kind;
    /** Index into the segments of the pool. */
    uint32_t segment;
    /** Reserved, 0. */
    uint32_t reserved;
    /** Byte offset of the first run in the segment. */
    uint64_t offset;
    /** Bytes of a run. */
    uint64_t run_len;
    /** Bytes from run to run. */
    uint64_t run_stride;
    /** Number of runs. */
    uint64_t run_count;
};

/** A pool of pages. */
struct kvdock_pool_desc {
    /** Number by which transfers name the pool, chosen by the host for this instance. What is stored goes by `name`. */
    uint32_t pool;
    /** A KVDOCK_POOL_ROLE_*. */
    uint32_t role;
    /** 1: the pool owns page indices and no bytes. A backend registers no memory for it and keeps the
     * existence of its pages by marker objects.
     */
    uint32_t logical;
    /** A KVDOCK_DTYPE_*. */
    uint32_t dtype;
    /** Name of the pool: `kv`, `swa`, `indexer`, ... */
    kvdock_bytes name;
    /** Layout of a page: `layer_first`, `page_first`, `page_first_direct`, `page_head`,
     * `page_first_kv_split`, or a name of the pool's own.
     */
    kvdock_bytes layout;
    /** Pages in the pool. */
    uint64_t page_count;
    /** Tokens of the sequence a page stands for; 0 for a state that stands for the whole prefix up to its key. */
    uint32_t page_tokens;
    /** Layers with a part in the page; 0 for a logical pool. */
    uint32_t layers;
    /** Bytes of a page over all segments, the seal included; 0 for a logical pool. A page is stored with exactly this many bytes. */
    uint64_t page_bytes;
    /** Regions. */
    const kvdock_region *regions;
    /** Number of regions. */
    uint64_t region_count;
    /** Pieces of a page, in the order in which they make up the stored page. */
    const kvdock_segment *segments;
    /** Number of segments. */
    uint64_t segment_count;
    /** Parts of a page by layer. */
    const kvdock_component *components;
    /** Number of components. */
    uint64_t component_count;
    /** The segment that is the host's seal, or KVDOCK_NONE. A backend moves it as payload. */
    uint32_t seal_segment;
    /** A KVDOCK_HIT_POLICY_*. An unknown policy is refused. */
    uint32_t hit_policy;
    /** For trailing pages: how many. */
    uint32_t trailing_pages;
    /** For block groups: anchor pages of a block. */
    uint32_t block_pages;
    /** For block groups: keys of a group. */
    uint32_t group_pages;
    /** Pool whose page indices this pool shares, or KVDOCK_NONE. */
    uint32_t indices_from_pool;
    /** 1: every rank holds the same bytes. */
    uint32_t replicated;
    /** Reserved, 0. */
    uint32_t reserved;
};

/** A pool that an exists or lookup call asks about. */
struct kvdock_pool_query {
    /** Number of the pool. */
    uint32_t pool;
    /** A KVDOCK_HIT_POLICY_*. */
    uint32_t hit_policy;
    /** For trailing pages: how many. */
    uint32_t trailing_pages;
    /** For block groups: anchor pages of a block. */
    uint32_t block_pages;
    /** For block groups: keys of a group. */
    uint32_t group_pages;
    /** The first pages of the chain that the worker holds in this pool already: the store need not have them. */
    uint32_t held_pages;
};

/** Asks which prefixes of a chain of pages can be restored. */
struct kvdock_exists_args {
    /** Deadline and cancel flag. */
    kvdock_call_context context;
    /** Keys of the chain, `key_count * 32` bytes. */
    const kvdock_page_key *keys;
    /** Number of keys. */
    uint64_t key_count;
    /** The pools a prefix needs. */
    const kvdock_pool_query *pools;
    /** Number of pools. */
    uint64_t pool_count;
    /** Pages of the sequence before the first key. */
    uint64_t chain_position;
    /** Keys of those pages from the start of the sequence, or none. */
    const kvdock_page_key *prefix_keys;
    /** Number of `prefix_keys`: `chain_position` or 0. */
    uint64_t prefix_key_count;
    /** Number of the request, the same in `lookup`, `load` and `cancel_queued_load`; 0 for none. */
    uint64_t request;
    /** Out, `key_count + 1` bytes: 1 at `n` when the first `n` keys can be restored in full, for every pool. The host writes 0 before
     * the call.
     */
    uint8_t *restorable;
    /** Out, `pool_count * key_count` bytes, pool after pool: a KVDOCK_PAGE_STATUS_* for every page that was looked at.
     * The host writes 0 before the call. May be null.
     */
    uint8_t *present;
};

/** Pages of one pool in a batch. */
struct kvdock_pool_transfer {
    /** Number of the pool. */
    uint32_t pool;
    /** First layer of a range. Ranges need the capability `ranges`, and are for reads: a set, a remove or an offload names whole pages.
     * A range moves the components of its layers, and the seal.
     */
    uint32_t layer_first;
    /** Number of layers; 0 for the whole page. */
    uint32_t layer_count;
    /** Pages from the chain position of the call to the first key. On a set, an offload or a load the keys follow one another in the chain,
     * so that key `i` is page `chain_position + chain_offset + i` of its sequence.
     */
    uint32_t chain_offset;
    /** Keys, one a page. */
    const kvdock_page_key *keys;
    /** Page indices into the pool, one a key. */
    const uint32_t *pages;
    /** Number of keys. */
    uint64_t count;
    /** Out: one KVDOCK_PAGE_STATUS_* a key. The host writes 0 before the call. */
    uint8_t *statuses;
};

/** A `batch_get`, `batch_set` or `batch_remove`. */
struct kvdock_batch_args {
    /** Deadline and cancel flag. */
    kvdock_call_context context;
    /** The pools' parts. On a set, side pools come first and the anchor last. */
    const kvdock_pool_transfer *transfers;
    /** Number of parts. */
    uint64_t transfer_count;
    /** Pages of the sequence before the part of the chain that this call is about. */
    uint64_t chain_position;
    /** Keys of those pages from the start of the sequence, or none. */
    const kvdock_page_key *prefix_keys;
    /** Number of `prefix_keys`: `chain_position` or 0. */
    uint64_t prefix_key_count;
    /** Session that the request names, or empty. */
    kvdock_bytes session_id;
};

/** Pages that the worker itself holds have changed. Advisory: for a store that tells other workers who holds what. */
struct kvdock_held_pages {
    /** Deadline and cancel flag. */
    kvdock_call_context context;
    /** A KVDOCK_HELD_TIER_*. */
    uint32_t tier;
    /** A KVDOCK_HELD_CHANGE_*. */
    uint32_t change;
    /** Keys of the pages. */
    const kvdock_page_key *keys;
    /** Number of keys. */
    uint64_t key_count;
};

/** Figures of a store. A figure that the backend does not know is 0. */
struct kvdock_stats {
    /** Pages stored. */
    uint64_t pages;
    /** Bytes used. */
    uint64_t bytes_used;
    /** Bytes that may be used; 0 when unbounded or unknown. */
    uint64_t bytes_total;
    /** Calls that failed since `open`. */
    uint64_t failures;
    /** Mean time of a `batch_get` since `open`, in nanoseconds; 0 when it is not known. */
    uint64_t get_mean_ns;
    /** Mean time of a `batch_set` since `open`, in nanoseconds; 0 when it is not known. */
    uint64_t set_mean_ns;
};

/** Answer of `health`. */
struct kvdock_health_out {
    /** A KVDOCK_HEALTH_STATE_*. */
    uint32_t state;
    /** Reserved, 0. */
    uint32_t reserved;
    /** Buffer for the reason, UTF-8. */
    uint8_t *reason;
    /** Bytes the buffer can take. */
    uint64_t reason_capacity;
    /** Bytes written. */
    uint64_t reason_len;
};

/** The functions of a plugin. `*mut c_void` is the instance that `open` made.
 *
 * Order of calls: `open`, `capabilities`, `register_mem_pool_host`, `register_v2_side_pools` (any number of times, later again),
 * `pools_ready` (once; may refuse), traffic, `close`. When a step fails, the host calls `close`, unless `open` itself failed.
 * Later registrations and the calls from `clear` to `report_held_pages` may run beside data calls.
 */
struct kvdock_backend_table {
    /** Bytes of this table. */
    uint64_t size;
    /** Version of this table. */
    uint32_t abi_version;
    /** Reserved, 0. */
    uint32_t reserved;
    /** Makes an instance. When it fails, nothing is left behind. */
    kvdock_status (*open)(const kvdock_open_args *, void **, kvdock_error_out *);
    /** What this instance can do. Called once, after `open`. */
    kvdock_status (*capabilities)(void *, kvdock_capabilities_out *, kvdock_error_out *);
    /** Registers the anchor pool. */
    kvdock_status (*register_mem_pool_host)(void *, const kvdock_call_context *, const kvdock_pool_desc *, kvdock_error_out *);
    /** Registers side pools; all or none. */
    kvdock_status (*register_v2_side_pools)(void *, const kvdock_call_context *, const kvdock_pool_desc *, uint64_t, kvdock_error_out *);
    /** Takes registered pools back, by number, when no call names them any more. */
    kvdock_status (*unregister)(void *, const kvdock_call_context *, const uint32_t *, uint64_t, kvdock_error_out *);
    /** All pools known so far are registered; the plugin may refuse them. */
    kvdock_status (*pools_ready)(void *, const kvdock_call_context *, kvdock_error_out *);
    /** Which prefixes can be restored. */
    kvdock_status (*batch_exists)(void *, const kvdock_exists_args *, kvdock_error_out *);
    /** Reads pages. */
    kvdock_status (*batch_get)(void *, const kvdock_batch_args *, kvdock_error_out *);
    /** Stores pages. A page that is stored already is a success. */
    kvdock_status (*batch_set)(void *, const kvdock_batch_args *, kvdock_error_out *);
    /** Removes pages. `pages` of the transfers may be null. A page that is not there is a success. */
    kvdock_status (*batch_remove)(void *, const kvdock_batch_args *, kvdock_error_out *);
    /** Removes everything of a KVDOCK_CLEAR_SCOPE_*. */
    kvdock_status (*clear)(void *, const kvdock_call_context *, uint32_t, kvdock_error_out *);
    /** Figures of the store. */
    kvdock_status (*stats)(void *, const kvdock_call_context *, kvdock_stats *, kvdock_error_out *);
    /** How the backend feels. */
    kvdock_status (*health)(void *, const kvdock_call_context *, kvdock_health_out *, kvdock_error_out *);
    /** Makes what was stored as durable as the backend promises. */
    kvdock_status (*flush)(void *, const kvdock_call_context *, kvdock_error_out *);
    /** Tells which pages the worker holds itself, if the instance has the capability `held_pages`. */
    kvdock_status (*report_held_pages)(void *, const kvdock_held_pages *, kvdock_error_out *);
    /** Stops the plugin's threads and frees the instance. With any status the instance is gone. */
    kvdock_status (*close)(void *, const kvdock_call_context *, kvdock_error_out *);
    /** The linker face, or null. */
    const kvdock_linker_table *linker;
};

/** Queues the load of a request. The array of transfers is copied by the call; what the transfers name (keys, page indices,
 * statuses, and the pages) and `prefix_keys` live, and belong to the load, until `finish_layer_wise_loading` of its batch,
 * `cancel_queued_load` or `reset` returns.
 */
struct kvdock_load_args {
    /** Number of the request. */
    uint64_t request;
    /** The pools' parts. */
    const kvdock_pool_transfer *transfers;
    /** Number of parts. */
    uint64_t transfer_count;
    /** Pages of the sequence before the part of the chain that this load is about. */
    uint64_t chain_position;
    /** Keys of those pages, or none. */
    const kvdock_page_key *prefix_keys;
    /** Number of `prefix_keys`. */
    uint64_t prefix_key_count;
};

/** Starts everything that is queued as one batch. With nothing queued every layer is settled at once. */
struct kvdock_start_args {
    /** Deadline and cancel flag of the whole load: the flag lives until `finish_layer_wise_loading` of the batch returns. */
    kvdock_call_context context;
    /** Number of the batch, chosen by the host. */
    uint64_t batch;
    /** What to wait for before a page is written: until then earlier users of the slots may still read them. The array is copied by the
     * call; what the handles name lives until `finish_layer_wise_loading` of the batch returns.
     */
    const kvdock_ready_handle *ready;
    /** Number of handles. */
    uint64_t ready_count;
    /** `layer_count` words of the host (`layer_done_counter`). The plugin stores 1 (release) into word `l` when layer `l` of every
     * queued request is settled: loaded, and its bytes are where every later reader sees them, or failed. Then it calls `layers_settled` of the
     * host. The words live until `finish_layer_wise_loading` of the batch returns.
     */
    uint32_t *layer_done;
    /** Number of layers. */
    uint64_t layer_count;
};

/** Waits for a batch. When it returns, with any status, every layer is settled, every status of the batch's transfers is written, and no page
 * is touched again. At the deadline the plugin ends the load; it does not return before it is quiet.
 */
struct kvdock_finish_args {
    /** Deadline and cancel flag. */
    kvdock_call_context context;
    /** Number of the batch. */
    uint64_t batch;
};

/** Says when pages may be touched. */
struct kvdock_ready_handle {
    /** A KVDOCK_READY_KIND_*. An unknown kind is refused. */
    uint32_t kind;
    /** Reserved, 0. */
    uint32_t reserved;
    /** What the kind says. */
    uint64_t handle;
};

/** Queues the store of pages of several pools: all become visible or none. The arrays of transfers and handles are copied by the
 * call; what the transfers name (keys, page indices, statuses, and the pages) and `prefix_keys` live, and belong to the
 * operation, until it is popped or `reset` returns.
 */
struct kvdock_offload_args {
    /** Number of the operation, chosen by the host. */
    uint64_t operation;
    /** Deadline, in nanoseconds of CLOCK_MONOTONIC; 0 for never. */
    uint64_t deadline_ns;
    /** The pools' parts. */
    const kvdock_pool_transfer *transfers;
    /** Number of parts. */
    uint64_t transfer_count;
    /** What to wait for before a page is read; all of them. What the handles name lives as long as the operation. */
    const kvdock_ready_handle *ready;
    /** Number of handles. */
    uint64_t ready_count;
    /** Pages of the sequence before the part of the chain that this operation is about. */
    uint64_t chain_position;
    /** Keys of those pages, or none. */
    const kvdock_page_key *prefix_keys;
    /** Number of `prefix_keys`. */
    uint64_t prefix_key_count;
    /** Session that the request names, or empty. Copied by the call. */
    kvdock_bytes session_id;
};

/** A completed offload. */
struct kvdock_offload_done {
    /** Number of the operation. */
    uint64_t operation;
    /** 0 when everything was stored, else a KVDOCK_ERROR_KIND_*. */
    uint32_t status;
    /** 1: the same operation may succeed later. */
    uint32_t retryable;
};

/** The functions of the linker face. `lookup` counts as a data call and may run beside any other. `finish_layer_wise_loading` and
 * `cancel_queued_load` may run beside any call but `reset`. The others come from one thread at a time.
 */
struct kvdock_linker_table {
    /** Bytes of this table. */
    uint64_t size;
    /** Version of this table. */
    uint32_t abi_version;
    /** Reserved, 0. */
    uint32_t reserved;
    /** Which prefixes can be restored into the device pools. */
    kvdock_status (*lookup)(void *, const kvdock_exists_args *, kvdock_error_out *);
    /** Queues a load. Whether it refuses depends on the transfers alone. */
    kvdock_status (*load)(void *, const kvdock_load_args *, kvdock_error_out *);
    /** Starts what is queued. Does not wait. */
    kvdock_status (*start_layer_wise_loading)(void *, const kvdock_start_args *, kvdock_error_out *);
    /** Waits for the end of a batch. */
    kvdock_status (*finish_layer_wise_loading)(void *, const kvdock_finish_args *, kvdock_error_out *);
    /** Takes a queued load back. Success means that it was queued and has not started. */
    kvdock_status (*cancel_queued_load)(void *, uint64_t, kvdock_error_out *);
    /** Queues an offload. */
    kvdock_status (*offload)(void *, const kvdock_offload_args *, kvdock_error_out *);
    /** How many completed offloads wait to be popped. */
    uint64_t (*num_completed_offloads)(void *);
    /** Pops the oldest completed offload, in the order of their queueing; waits for none: KVDOCK_ERROR_KIND_NOT_FOUND when there is none. */
    kvdock_status (*pop_completed_offload)(void *, kvdock_offload_done *, kvdock_error_out *);
    /** Cancels what is queued, ends what runs, forgets completed offloads. When it returns, nothing of them is touched again. */
    kvdock_status (*reset)(void *, const kvdock_call_context *, kvdock_error_out *);
};

/* The description of the types above, and its SHA-256. Both stand in the note of a plugin. */
#define KVDOCK_TYPES_SHA256_0_1 "b80c2a6b2e6dff61a030ec42d22ce6598bc5e07f1750e7c84b11a9587b9c6735"
#define KVDOCK_TYPES_JSON_0_1 \
    "\"" \
    "PageKey 32 1 \\n" \
    "Status 4 4 \\n" \
    "Bytes 16 8 ptr:0:8:*const u8;len:8:8:u64\\n" \
    "ErrorOut 32 8 kind:0:4:u32;retryable:4:1:u8;panicked:5:1:u8;reserved:6:2:u8[2];message:8:8:*mut u8;message_capacity:16:8:u64;message_len:24:8:u64\\n" \
    "CallContext 24 8 deadline_ns:0:8:u64;cancel:8:8:*const u32;trace_id:16:8:u64\\n" \
    "Identity 168 8 namespace_digest:0:32:u8[32];namespace_json:32:16:Bytes;model_name:48:16:Bytes;weights_digest:64:32:u8[32];numerics_id:96:16:Bytes;page_tokens:112:4:u32;tp_rank:116:4:u32;tp_size:120:4:u32;pp_rank:124:4:u32;pp_size:128:4:u32;cp_rank:132:4:u32;cp_size:136:4:u32;dp_rank:140:4:u32;dp_size:144:4:u32;dcp_rank:148:4:u32;dcp_size:152:4:u32;tp_lcm_size:156:4:u32;replicated:160:4:u32;writer:164:4:u32\\n" \
    "CapabilitiesOut 24 8 flags:0:8:u64;alignment:8:4:u32;preferred_batch:12:4:u32;concurrency:16:4:u32;reserved:20:4:u32\\n" \
    "OpenArgs 88 8 context:0:24:CallContext;config_json:24:16:Bytes;instance_name:40:16:Bytes;identity:56:8:*const Identity;host:64:8:*const HostTable;host_context:72:8:*mut c_void;cache_mode:80:4:u32;reserved:84:4:u32\\n" \
    "HostTable 56 8 size:0:8:u64;abi_version:8:4:u32;reserved:12:4:u32;log:16:8:unsafe extern \\\"C\\\" fn(*mut c_void, u32, Bytes, Bytes);metric:24:8:unsafe extern \\\"C\\\" fn(*mut c_void, u32, Bytes, Bytes, f64);health_changed:32:8:unsafe extern \\\"C\\\" fn(*mut c_void, u32, Bytes);offload_completed:40:8:unsafe extern \\\"C\\\" fn(*mut c_void);layers_settled:48:8:unsafe extern \\\"C\\\" fn(*mut c_void, u64)\\n" \
    "Region 56 8 base:0:8:*mut c_void;len:8:8:u64;memory_kind:16:4:u32;fd:20:4:i32;fd_offset:24:8:u64;device_uuid:32:16:u8[16];flags:48:8:u64\\n" \
    "Segment 32 8 region:0:4:u32;reserved:4:4:u32;offset:8:8:u64;stride:16:8:u64;len:24:8:u64\\n" \
    "Component 48 8 layer:0:4:u32;kind:4:4:u32;segment:8:4:u32;reserved:12:4:u32;offset:16:8:u64;run_len:24:8:u64;run_stride:32:8:u64;run_count:40:8:u64\\n" \
    "PoolDesc 152 8 pool:0:4:u32;role:4:4:u32;logical:8:4:u32;dtype:12:4:u32;name:16:16:Bytes;layout:32:16:Bytes;page_count:48:8:u64;page_tokens:56:4:u32;layers:60:4:u32;page_bytes:64:8:u64;regions:72:8:*const Region;region_count:80:8:u64;segments:88:8:*const Segment;segment_count:96:8:u64;components:104:8:*const Component;component_count:112:8:u64;seal_segment:120:4:u32;hit_policy:124:4:u32;trailing_pages:128:4:u32;block_pages:132:4:u32;group_pages:136:4:u32;indices_from_pool:140:4:u32;replicated:144:4:u32;reserved:148:4:u32\\n" \
    "PoolQuery 24 4 pool:0:4:u32;hit_policy:4:4:u32;trailing_pages:8:4:u32;block_pages:12:4:u32;group_pages:16:4:u32;held_pages:20:4:u32\\n" \
    "ExistsArgs 104 8 context:0:24:CallContext;keys:24:8:*const PageKey;key_count:32:8:u64;pools:40:8:*const PoolQuery;pool_count:48:8:u64;chain_position:56:8:u64;prefix_keys:64:8:*const PageKey;prefix_key_count:72:8:u64;request:80:8:u64;restorable:88:8:*mut u8;present:96:8:*mut u8\\n" \
    "PoolTransfer 48 8 pool:0:4:u32;layer_first:4:4:u32;layer_count:8:4:u32;chain_offset:12:4:u32;keys:16:8:*const PageKey;pages:24:8:*const u32;count:32:8:u64;statuses:40:8:*mut u8\\n" \
    "BatchArgs 80 8 context:0:24:CallContext;transfers:24:8:*const PoolTransfer;transfer_count:32:8:u64;chain_position:40:8:u64;prefix_keys:48:8:*const PageKey;prefix_key_count:56:8:u64;session_id:64:16:Bytes\\n" \
    "HeldPages 48 8 context:0:24:CallContext;tier:24:4:u32;change:28:4:u32;keys:32:8:*const PageKey;key_count:40:8:u64\\n" \
    "Stats 48 8 pages:0:8:u64;bytes_used:8:8:u64;bytes_total:16:8:u64;failures:24:8:u64;get_mean_ns:32:8:u64;set_mean_ns:40:8:u64\\n" \
    "HealthOut 32 8 state:0:4:u32;reserved:4:4:u32;reason:8:8:*mut u8;reason_capacity:16:8:u64;reason_len:24:8:u64\\n" \
    "BackendTable 152 8 size:0:8:u64;abi_version:8:4:u32;reserved:12:4:u32;open:16:8:unsafe extern \\\"C\\\" fn(*const OpenArgs, *mut *mut c_void, *mut ErrorOut) -> Status;capabilities:24:8:unsafe extern \\\"C\\\" fn(*mut c_void, *mut CapabilitiesOut, *mut ErrorOut) -> Status;register_mem_pool_host:32:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *const PoolDesc, *mut ErrorOut) -> Status;register_v2_side_pools:40:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *const PoolDesc, u64, *mut ErrorOut) -> Status;unregister:48:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *const u32, u64, *mut ErrorOut) -> Status;pools_ready:56:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status;batch_exists:64:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const ExistsArgs, *mut ErrorOut) -> Status;batch_get:72:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status;batch_set:80:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status;batch_remove:88:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status;clear:96:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, u32, *mut ErrorOut) -> Status;stats:104:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *mut Stats, *mut ErrorOut) -> Status;health:112:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *mut HealthOut, *mut ErrorOut) -> Status;flush:120:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status;report_held_pages:128:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const HeldPages, *mut ErrorOut) -> Status;close:136:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status;linker:144:8:*const LinkerTable\\n" \
    "LoadArgs 48 8 request:0:8:u64;transfers:8:8:*const PoolTransfer;transfer_count:16:8:u64;chain_position:24:8:u64;prefix_keys:32:8:*const PageKey;prefix_key_count:40:8:u64\\n" \
    "StartArgs 64 8 context:0:24:CallContext;batch:24:8:u64;ready:32:8:*const ReadyHandle;ready_count:40:8:u64;layer_done:48:8:*mut u32;layer_count:56:8:u64\\n" \
    "FinishArgs 32 8 context:0:24:CallContext;batch:24:8:u64\\n" \
    "ReadyHandle 16 8 kind:0:4:u32;reserved:4:4:u32;handle:8:8:u64\\n" \
    "OffloadArgs 88 8 operation:0:8:u64;deadline_ns:8:8:u64;transfers:16:8:*const PoolTransfer;transfer_count:24:8:u64;ready:32:8:*const ReadyHandle;ready_count:40:8:u64;chain_position:48:8:u64;prefix_keys:56:8:*const PageKey;prefix_key_count:64:8:u64;session_id:72:16:Bytes\\n" \
    "OffloadDone 16 8 operation:0:8:u64;status:8:4:u32;retryable:12:4:u32\\n" \
    "LinkerTable 88 8 size:0:8:u64;abi_version:8:4:u32;reserved:12:4:u32;lookup:16:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const ExistsArgs, *mut ErrorOut) -> Status;load:24:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const LoadArgs, *mut ErrorOut) -> Status;start_layer_wise_loading:32:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const StartArgs, *mut ErrorOut) -> Status;finish_layer_wise_loading:40:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const FinishArgs, *mut ErrorOut) -> Status;cancel_queued_load:48:8:unsafe extern \\\"C\\\" fn(*mut c_void, u64, *mut ErrorOut) -> Status;offload:56:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const OffloadArgs, *mut ErrorOut) -> Status;num_completed_offloads:64:8:unsafe extern \\\"C\\\" fn(*mut c_void) -> u64;pop_completed_offload:72:8:unsafe extern \\\"C\\\" fn(*mut c_void, *mut OffloadDone, *mut ErrorOut) -> Status;reset:80:8:unsafe extern \\\"C\\\" fn(*mut c_void, *const CallContext, *mut ErrorOut) -> Status\\n" \
    "\""

/** JSON written without quotes around it: KVDOCK_JSON({"type": "object"}). */
#define KVDOCK_JSON(...) #__VA_ARGS__

/* The JSON object of a note. */
#define KVDOCK_NOTE_JSON(name, version, license, description, capabilities, config_schema, check_config) \
    "{\"note\":1,\"name\":\"" name "\",\"version\":\"" version "\",\"license\":\"" license "\"," \
    "\"description\":\"" description "\",\"abi\":[\"0.1\"],\"panic\":\"unwind\"," \
    "\"capabilities\":" capabilities ",\"config_schema\":" config_schema ",\"check_config\":" check_config "," \
    "\"types_sha256\":{\"0.1\":\"" KVDOCK_TYPES_SHA256_0_1 "\"},\"types\":{\"0.1\":" KVDOCK_TYPES_JSON_0_1 "}}"

#ifdef __cplusplus
#define KVDOCK_NOTE_ROOM(text) ((sizeof(text) + 3) / 4 * 4)
#else
/* The terminating zero of the text has no place in the section. */
#define KVDOCK_NOTE_ROOM(text) ((sizeof(text) + 2) / 4 * 4)
#endif

#define KVDOCK_NOTE_OF(text) \
    __attribute__((used, section(".note.kvdock"), aligned(4))) static const struct { \
        uint32_t owner_bytes; \
        uint32_t text_bytes; \
        uint32_t type; \
        char owner[8]; \
        char json[KVDOCK_NOTE_ROOM(text)]; \
    } kvdock_note = {7, sizeof(text) - 1, 0x6b766463u, "kvdock", text}

/** Writes the note of a plugin, which the host reads before it loads the file. Used once, outside of functions. All arguments are string literals.
 *
 * `name` is what a configuration calls the plugin: lower-case letters, digits, `-` and `_`. `license` is an SPDX expression. `capabilities` is a JSON
 * object: `linker`, `ranges`, `remove`, `clear_namespace`, `clear_everything`, `durable`, `shared`, `checksums`, `logical_pools`,
 * `cuda_memory` and `held_pages` are true or false, and false when missing; `alignment`, `preferred_batch` and `concurrency` are
 * numbers. `config_schema` is the JSON Schema of the configuration, `check_config` a configuration to try the plugin with, in which
 * `{scratch}` stands for a fresh folder. KVDOCK_JSON saves the escapes.
 */
#define KVDOCK_PLUGIN_NOTE(name, version, license, description, capabilities, config_schema, check_config) \
    KVDOCK_NOTE_OF(KVDOCK_NOTE_JSON(name, version, license, description, capabilities, config_schema, check_config))

/** The entry of a plugin, which the plugin defines: the address of its table for an ABI version (a `kvdock_backend_table` for
 * KVDOCK_ABI_VERSION_0_1), or null. It has no other effect, and the table stays as it is for the life of the process.
 */
KVDOCK_EXTERN_C __attribute__((visibility("default"))) const void *kvdock_plugin_entry(uint32_t abi_version);

#endif
