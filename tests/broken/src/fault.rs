//! Which fault is planted. One compilation gives every broken plugin: a test copies the built file and writes the name of a
//! fault over the marker.

use std::sync::OnceLock;

use kvdock_plugin_api::{Error, ErrorKind, Result};

/// The marker; what follows the `=` is the name of the fault, padded with `.`.
#[used]
static MARKER: [u8; 64] = *b"kvdock-planted-fault=none.......................................";

macro_rules! faults {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)+) => {
        /// A fault that may be planted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Fault { $($(#[doc = $doc])+ $variant,)+ }

        impl Fault {
            fn of(name: &str) -> Option<Fault> {
                match name { $($name => Some(Fault::$variant),)+ _ => None }
            }
        }

        /// Every name, so that a test helper can see in the file whether a fault is known.
        #[used]
        static NAMES: &[u8] = concat!("kvdock-known-faults=", $($name, "|",)+).as_bytes();
    };
}

faults! {
    /// No fault at all.
    None = "none",

    // Faults of a running server.
    /// `batch_get` never returns.
    HangInGet = "hang_in_get",
    /// `batch_set` never returns.
    HangInSet = "hang_in_set",
    /// `batch_exists` never returns.
    HangInExists = "hang_in_exists",
    /// `open` never returns.
    HangInOpen = "hang_in_open",
    /// `close` never returns.
    HangInClose = "hang_in_close",
    /// `open` panics.
    PanicInOpen = "panic_in_open",
    /// Registering the anchor panics.
    PanicInRegister = "panic_in_register",
    /// `pools_ready` panics.
    PanicInPoolsReady = "panic_in_pools_ready",
    /// `batch_exists` panics.
    PanicInExists = "panic_in_exists",
    /// `batch_get` panics.
    PanicInGet = "panic_in_get",
    /// `batch_set` panics.
    PanicInSet = "panic_in_set",
    /// `batch_remove` panics.
    PanicInRemove = "panic_in_remove",
    /// `clear` panics.
    PanicInClear = "panic_in_clear",
    /// `stats` panics.
    PanicInStats = "panic_in_stats",
    /// `health` panics, but not the first time, which is asked for by the attach.
    PanicInHealth = "panic_in_health",
    /// `flush` panics.
    PanicInFlush = "panic_in_flush",
    /// `close` panics.
    PanicInClose = "panic_in_close",
    /// `batch_get` gives bytes of the right length that were never stored, as good.
    GarbageGet = "garbage_get",
    /// `batch_get` writes the first half of a page and calls it good.
    HalfGet = "half_get",
    /// `batch_get` gives one page's bytes for another key, as good.
    SwappedGet = "swapped_get",
    /// `batch_get` says `Ok` and writes nothing.
    NothingGet = "nothing_get",
    /// The process ends when an instance is opened with the configuration of the check.
    AbortInCheck = "abort_in_check",
    /// A page that is read takes 300 milliseconds.
    SlowGet = "slow_get",
    /// `batch_set` does not return before a second after its deadline, and does not look at its cancel flag.
    LateSet = "late_set",
    /// `batch_get` does not return before a second after its deadline, and writes its pages then.
    LateGet = "late_get",
    /// Every second data call fails with an error that a retry helps.
    ErrorRetryableThenOk = "error_retryable_then_ok",
    /// Every data call fails with an error that says a retry may help.
    ErrorAlways = "error_always",
    /// Every data call fails with an error that says that no retry helps.
    ErrorFatal = "error_fatal",
    /// Every set is refused.
    RefuseSets = "refuse_sets",
    /// `health` says failed.
    HealthFailed = "health_failed",

    // No faults, but what a plugin does that has a device: the test has one whose memory this process reaches.
    /// Instances take memory of a GPU, and say so; the note has to say it as well.
    DeviceMemory = "device_memory",
    /// The same; a load that finds a file `hold` in the plugin's folder waits until that is gone, and writes its pages then, whatever was asked of it
    /// meanwhile.
    DeviceMemoryWaits = "device_memory_waits",

    // Faults of the instance of the second of several ranks; those of the others are right.
    /// `open` fails.
    OpenFailsForRank1 = "open_fails_for_rank_1",
    /// `batch_get` never returns.
    HangInGetOfRank1 = "hang_in_get_of_rank_1",
    /// `batch_get` panics.
    PanicInGetOfRank1 = "panic_in_get_of_rank_1",
    /// `batch_get` fails with an error that says that no retry helps.
    ErrorInGetOfRank1 = "error_in_get_of_rank_1",
    /// `batch_get` gives bytes of the right length that were never stored, as good.
    GarbageGetOfRank1 = "garbage_get_of_rank_1",
    /// Every set is refused.
    RefuseSetsOfRank1 = "refuse_sets_of_rank_1",
    /// A load layer by layer never starts: the call does not return.
    HangInLoadOfRank1 = "hang_in_load_of_rank_1",
    /// The start of a load layer by layer panics.
    PanicInLoadOfRank1 = "panic_in_load_of_rank_1",
    /// The start of a load layer by layer fails.
    ErrorInLoadOfRank1 = "error_in_load_of_rank_1",
    /// A load layer by layer gives bytes of the right length that were never stored, as good.
    GarbageLoadOfRank1 = "garbage_load_of_rank_1",
    /// Every offload is refused.
    RefuseOffloadsOfRank1 = "refuse_offloads_of_rank_1",

    // Below the safe traits.
    /// The entry answers its table for every version.
    EntryAnyVersion = "entry_any_version",
    /// The table says that it is shorter than it is.
    TableSize = "table_size",
    /// Instances have no linker face by their capabilities, but the table is there.
    LinkerUndeclared = "linker_undeclared",
    /// Instances remove pages, and say that they do not.
    RemoveUndeclared = "remove_undeclared",
    /// Instances read ranges of layers, and say that they do not.
    RangesUndeclared = "ranges_undeclared",
    /// Instances take logical pools, and say that they do not.
    LogicalUndeclared = "logical_undeclared",
    /// Takes memory of kind 77 for host memory.
    AcceptsUnknownMemory = "accepts_unknown_memory",
    /// Takes device memory for host memory.
    AcceptsDeviceMemory = "accepts_device_memory",
    /// Registers side pools one by one, and keeps those before the one that it refuses.
    RegistersSome = "registers_some",
    /// After a refused side pool no instance can be opened any more.
    RefusalIsForEver = "refusal_is_for_ever",
    /// `batch_get` skips a pool that is not registered.
    SkipsUnknownPool = "skips_unknown_pool",
    /// Errors of `batch_get` have no message.
    ErrorWithoutMessage = "error_without_message",
    /// `batch_exists` fails where the host has no room for the statuses.
    NeedsPresent = "needs_present",
    /// `batch_exists` takes an unknown hit policy for that of all pages.
    AcceptsUnknownPolicy = "accepts_unknown_policy",
    /// `clear` takes an unknown scope for the namespace.
    AcceptsUnknownScope = "accepts_unknown_scope",

    // From open to close.
    /// Keys of the configuration that it does not know are ignored.
    IgnoresUnknownKeys = "ignores_unknown_keys",
    /// Values of the configuration that it can't read are ignored.
    IgnoresWrongValues = "ignores_wrong_values",
    /// `close` fails when the pools were never ready.
    NoEarlyClose = "no_early_close",
    /// Every instance leaves a thread behind.
    LeaksThread = "leaks_thread",
    /// Every instance leaves a file open.
    LeaksFile = "leaks_file",
    /// Changes the working directory.
    ChangesFolder = "changes_folder",
    /// A folder that was open before in the process is empty.
    ForgetsOnReopen = "forgets_on_reopen",
    /// A folder that another process wrote is empty.
    OtherProcessForgets = "other_process_forgets",
    /// The process ends by a signal when it exits.
    DiesAtExit = "dies_at_exit",
    /// A page of the pool named `middle` lies half in the file until the next flush.
    HalfOnDisk = "half_on_disk",
    /// `report_held_pages` does not return when its deadline has passed.
    HangWhenLate = "hang_when_late",
    /// `report_held_pages` returns six seconds after its deadline.
    LateReport = "late_report",
    /// A report of no pages is an error.
    EmptyReportFails = "empty_report_fails",
    /// `flush` of an empty store is an error.
    EmptyFlushFails = "empty_flush_fails",
    /// `flush` of an empty store ends the process.
    AbortsOnEmptyFlush = "aborts_on_empty_flush",
    /// More bytes are used than there are.
    TooManyBytes = "too_many_bytes",
    /// Degraded, without a reason.
    DegradedWithoutReason = "degraded_without_reason",

    // Pools.
    /// Loses a byte of pages in the layout `page_head` without a seal.
    LosesPageHead = "loses_page_head",
    /// Loses a byte of pages with convolution states.
    LosesConvStates = "loses_conv_states",
    /// Loses a byte of pages with segments in several regions.
    LosesFarSeal = "loses_far_seal",
    /// Loses a byte of pages of a pool that begins inside of its region.
    LosesInSharedRegion = "loses_in_shared_region",
    /// Loses a byte of pages of a pool that shares the indices of another one.
    LosesSharedIndices = "loses_shared_indices",
    /// Loses a byte of pages of an anchor of four pages.
    LosesInSmallPool = "loses_in_small_pool",
    /// Refuses pages of one byte.
    RefusesOneByte = "refuses_one_byte",
    /// Finds nothing in the pool of number 7.
    MissesPoolSeven = "misses_pool_seven",
    /// Refuses a side pool named `swa` when the pools are ready.
    NoLaterPools = "no_later_pools",
    /// Refuses a pool that names the bytes of another one.
    RefusesSameBytes = "refuses_same_bytes",
    /// Does not give a pool named `swa` back.
    KeepsPools = "keeps_pools",
    /// Finds no markers.
    MissesMarkers = "misses_markers",
    /// The name of a pool is that of the pool that was registered last under its number, in any instance.
    GlobalPoolNames = "global_pool_names",
    /// The same key in pools with pages of 128 bytes is the same page.
    MixesPools = "mixes_pools",

    // Data calls.
    /// A batch without parts is an error.
    EmptyBatchFails = "empty_batch_fails",
    /// A missing page gets no status.
    UnsetStatuses = "unset_statuses",
    /// Pieces are read in words of eight bytes; what is left over is not.
    CutsOddPieces = "cuts_odd_pieces",
    /// A set changes a byte of the page that it reads.
    WritesSources = "writes_sources",
    /// Pages beyond the 8192nd of a set are dropped.
    DropsBeyond8192 = "drops_beyond_8192",
    /// The second pool of a get of more than 32 pages is missing.
    SecondPoolMissing = "second_pool_missing",
    /// A key that comes twice in a get is missing the second time.
    MissesDuplicates = "misses_duplicates",
    /// A page that is stored already is stored again.
    Overwrites = "overwrites",
    /// Stored bytes of another length are cut or filled up.
    AnyLength = "any_length",
    /// Another session does not find what was stored.
    MissesOtherSessions = "misses_other_sessions",
    /// A range of layers is read as the whole page.
    RangesIgnored = "ranges_ignored",
    /// Two sets of one key at a time: the second is refused.
    OneSetterAKey = "one_setter_a_key",
    /// A page of a pool of 64 pages is seen half for a moment.
    TornPages = "torn_pages",
    /// Does not look at the pages that the worker holds.
    IgnoresHeld = "ignores_held",
    /// What comes after a gap is said to be missing.
    MissingAfterGap = "missing_after_gap",
    /// A question without keys and pools is an error.
    EmptyQuestionFails = "empty_question_fails",
    /// Finds pages of other namespaces.
    FindsForeign = "finds_foreign",
    /// Removed pages stay.
    KeepsRemoved = "keeps_removed",
    /// A key that comes twice in a remove fails the second time.
    RemoveTwiceFails = "remove_twice_fails",
    /// Removes pages of other namespaces too.
    RemovesForeign = "removes_foreign",
    /// `clear` forgets the pool named `side`.
    ClearKeepsSide = "clear_keeps_side",
    /// `clear` of everything clears the namespace.
    ClearEverythingOwn = "clear_everything_own",
    /// `clear` of the namespace clears everything.
    ClearsForeign = "clears_foreign",
    /// A set that is late says `Ok` of pages that it did not store.
    LateSetLies = "late_set_lies",
    /// A set that is cancelled says `Ok` of pages that it did not store.
    CancelledSetLies = "cancelled_set_lies",
    /// After a late flush no set succeeds any more.
    SticksAfterLate = "sticks_after_late",
    /// A get writes a byte between pages.
    WritesBeside = "writes_beside",
    /// A get that is cancelled writes its pages after it has returned.
    WritesAfterReturn = "writes_after_return",
    /// A set with a session reads its keys after it has returned.
    ReadsArgumentsLate = "reads_arguments_late",
    /// A page is written after `close`.
    TouchesAfterClose = "touches_after_close",

    // The linker face.
    /// `lookup` answers the longest length only.
    LookupLongestOnly = "lookup_longest_only",
    /// The second part of an offload gets no statuses.
    OffloadForgetsStatus = "offload_forgets_status",
    /// An offload reads its pages before the flags come.
    OffloadReadsEarly = "offload_reads_early",
    /// An offload becomes visible page by page.
    OffloadPageByPage = "offload_page_by_page",
    /// An offload that is late stores its first part.
    OffloadLateStores = "offload_late_stores",
    /// The offload that completed last is popped first.
    OffloadLastFirst = "offload_last_first",
    /// An offload with an unknown ready handle is taken.
    OffloadUnknownReady = "offload_unknown_ready",
    /// Popping nothing is an error of the store.
    PopEmptyFails = "pop_empty_fails",
    /// A load of the pool named `side` changes a byte.
    LoadWrongBytes = "load_wrong_bytes",
    /// A missing page of a load gets no status.
    LoadUnsetMissing = "load_unset_missing",
    /// The host is not told of settled layers.
    LayersNotTold = "layers_not_told",
    /// Layers are settled before their bytes are there.
    LayersSettledEarly = "layers_settled_early",
    /// A load of a range of layers loads all of them.
    LoadAllLayers = "load_all_layers",
    /// Without loads no layer is settled.
    EmptyStartUnsettled = "empty_start_unsettled",
    /// A load writes its pages before the flags come.
    LoadWritesEarly = "load_writes_early",
    /// A start with an unknown ready handle is taken.
    StartUnknownReady = "start_unknown_ready",
    /// A second load of a queued request is taken.
    DoubleLoadTaken = "double_load_taken",
    /// A load skips a pool that is not registered.
    LoadSkipsUnknownPool = "load_skips_unknown_pool",
    /// Of several queued loads a cancelled one stays.
    CancelKeepsLoad = "cancel_keeps_load",
    /// Cancelling what is not queued succeeds.
    CancelAlwaysOk = "cancel_always_ok",
    /// Finishing what does not run succeeds.
    FinishUnknownOk = "finish_unknown_ok",
    /// A finish at its deadline leaves a thread that writes when the flag comes.
    FinishLeavesWriter = "finish_leaves_writer",
    /// A reset leaves a thread that writes when the flag comes.
    ResetLeavesWriter = "reset_leaves_writer",
    /// A finish keeps every other call out while it waits.
    FinishKeepsLock = "finish_keeps_lock",
    /// A reset does not forget completed offloads.
    ResetKeepsCompletions = "reset_keeps_completions",
    /// After many loads pages are said to be missing that were loaded.
    TiresAfterMany = "tires_after_many",
}

/// Whether this fault is planted.
pub fn is(fault: Fault) -> bool {
    planted() == Ok(fault)
}

/// What is planted.
///
/// # Errors
/// The name, when it is no fault of this plugin.
pub fn planted() -> std::result::Result<Fault, &'static str> {
    static PLANTED: OnceLock<std::result::Result<Fault, &'static str>> = OnceLock::new();
    *PLANTED.get_or_init(|| {
        // SAFETY: a static is readable. Volatile, because the bytes in the file are not those that the compiler saw.
        let marker: &'static [u8; 64] = Box::leak(Box::new(unsafe { std::ptr::read_volatile(&raw const MARKER) }));
        let text = std::str::from_utf8(marker).unwrap_or("(no UTF-8)");
        let name = text.split_once('=').map_or(text, |(_, name)| name).trim_end_matches('.');
        Fault::of(name).ok_or(name)
    })
}

/// Whether instances take memory of a GPU.
pub fn takes_device_memory() -> bool {
    is(Fault::DeviceMemory) || is(Fault::DeviceMemoryWaits)
}

/// Refuses a name that is no fault.
///
/// # Errors
/// When the marker was overwritten with something else.
pub fn check() -> Result<()> {
    planted().map(|_| ()).map_err(|name| {
        Error::new(ErrorKind::InvalidConfig, format!("the planted fault {name:?} is none of this plugin's"))
    })
}

/// Runs `body` on a thread of its own after a while. It outlives whoever starts it; that is the fault.
pub fn later(milliseconds: u64, body: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        body();
    });
}

/// A call that never returns.
pub fn hang() -> ! {
    loop {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
}
