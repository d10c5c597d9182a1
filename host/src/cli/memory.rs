//! The device memory of a model, and what names its pages in storage.

use std::sync::Arc;

use kvdock_kernels::{Device, KvDtype};
use kvdock_models::{HitPolicy, KvGeometry, ModelSpec, PageSource, PoolDecl, PoolKind, PoolSet, PoolSizes};
use sha2::{Digest, Sha256};

use crate::cache::{CacheMemory, CacheRoom};
use crate::config::Amount;
use crate::engine::ModelMemory;

/// Saved states for each request that may run, and fewest of all, by `auto`.
const STATES_A_REQUEST: usize = 8;
const LEAST_STATES: usize = 8;

/// Tokens a page where `cache.page_size` leaves that open, and where the model has no wish.
pub(super) const PAGE_TOKENS: usize = 16;

/// The one pool that holds everything of a model, where it has only that.
fn one_pool(spec: &ModelSpec) -> Option<KvGeometry> {
    spec.kv.filter(|_| spec.pools.len() == 1 && spec.ranks == 1)
}

/// Tokens a page.
///
/// # Errors
/// A size that the model's pools do not divide.
pub(super) fn page_tokens(spec: &ModelSpec, wanted: Amount) -> Result<usize, String> {
    let multiple = spec.page_multiple.max(1);
    match wanted {
        Amount::Auto => Ok(PAGE_TOKENS.next_multiple_of(multiple)),
        Amount::Fixed(tokens) if (tokens as usize).is_multiple_of(multiple) => Ok(tokens as usize),
        Amount::Fixed(tokens) => Err(format!(
            "cache.page_size = {tokens}: a model of the family {} takes a multiple of {multiple}",
            spec.family
        )),
    }
}

fn bytes_of<'a>(pools: impl Iterator<Item = &'a PoolDecl>, page_tokens: usize, dtype: KvDtype) -> usize {
    pools.map(|pool| pool.page_bytes(page_tokens, dtype) * pool.layers.len()).sum()
}

fn from(spec: &ModelSpec, source: PageSource) -> impl Iterator<Item = &PoolDecl> {
    spec.pools.iter().filter(move |pool| pool.source == source)
}

/// Bytes that a page of all tokens takes on all ranks, with its share of the windows.
pub(super) fn page_bytes(spec: &ModelSpec, dtype: KvDtype, page_tokens: usize, window_ratio: f64) -> usize {
    if let Some(kv) = one_pool(spec) {
        return kv.pool(dtype, page_tokens, 1).page_bytes();
    }
    let windows = bytes_of(from(spec, PageSource::Window), page_tokens, dtype);
    spec.ranks
        * (bytes_of(from(spec, PageSource::Anchor), page_tokens, dtype)
            + (windows as f64 * window_ratio).ceil() as usize)
}

/// Whether prefixes of the model need recurrent states.
fn is_recurrent(spec: &ModelSpec) -> bool {
    spec.pools.iter().any(|pool| pool.kind == PoolKind::Recurrent)
}

/// Slots for recurrent states beside those of running requests: what `wanted` says, or a few for each request as far as an eighth of the
/// memory goes.
pub(super) fn saved_states(
    spec: &ModelSpec,
    dtype: KvDtype,
    wanted: Amount,
    running: usize,
    memory: Option<u64>,
) -> usize {
    if !is_recurrent(spec) {
        return 0;
    }
    let bytes = spec.ranks * bytes_of(spec.pools.iter().filter(|pool| pool.kind == PoolKind::Recurrent), 1, dtype);
    match wanted {
        Amount::Fixed(count) => count as usize,
        Amount::Auto => {
            let affordable = memory.map_or(usize::MAX, |memory| memory as usize / 8 / bytes.max(1));
            (STATES_A_REQUEST * running).min(affordable).max(LEAST_STATES)
        }
    }
}

/// How large the memory is made.
#[derive(Clone, Copy)]
pub(super) struct Room {
    /// Element type of keys and values.
    pub dtype: KvDtype,
    /// Tokens a page.
    pub page_tokens: usize,
    /// Pages of all tokens on the device.
    pub pages: usize,
    /// Pages of all tokens on the host.
    pub host_pages: usize,
    /// Those are transit pages.
    pub transit: bool,
    /// Window pages for each of those.
    pub window_ratio: f64,
    /// Tokens that a step computes at most of prompts.
    pub chunk: usize,
    /// Requests that run at a time: each has a slot where the model has pools of slots.
    pub running: usize,
    /// Slots for recurrent states beside those.
    pub saved: usize,
}

impl Room {
    /// Window pages on the device: by the ratio, and at least what a step of all running requests needs.
    fn window_pages(&self, window: usize) -> usize {
        let held = window.div_ceil(self.page_tokens.max(1)) + 2;
        let step = self.chunk.div_ceil(self.page_tokens.max(1));
        let least = self.running.max(1).saturating_mul(held).saturating_add(step + held);
        self.share(self.pages).max(least).min(self.pages).max(1)
    }

    /// Window pages on the host: by the ratio, and at least a window. Of transit pages offloads take up to a half, so at least two windows.
    fn host_window_pages(&self, window: usize) -> usize {
        let least = window.div_ceil(self.page_tokens.max(1));
        match self.transit && self.host_pages > 0 {
            true => self.share(self.host_pages).max(2 * least),
            false => self.share(self.host_pages).max(least).min(self.host_pages),
        }
    }

    fn share(&self, pages: usize) -> usize {
        (pages as f64 * self.window_ratio).ceil() as usize
    }
}

/// The memory of a model, and of its cache.
pub(super) struct Memory {
    pub model: ModelMemory,
    pub cache: CacheMemory,
}

/// Takes the memory on the devices of all ranks.
///
/// # Errors
/// Sizes that cannot be had.
pub(super) fn allocate(devices: &[Arc<dyn Device>], spec: &ModelSpec, room: Room) -> Result<Memory, String> {
    let Room { dtype, page_tokens, pages, running, saved, .. } = room;
    let failed = |error: &dyn std::fmt::Display| format!("cache.device_tokens: {error}");
    if let (Some(kv), [device]) = (one_pool(spec), devices) {
        let pool = device.alloc_kv_pool(kv.pool(dtype, page_tokens, pages)).map_err(|error| failed(&error))?;
        return Ok(Memory { model: ModelMemory::One(pool.clone()), cache: pool.into() });
    }
    let window = from(spec, PageSource::Window).map(|pool| pool.hit.pages(usize::MAX / 2, 1)).max().unwrap_or(0);
    let sizes = PoolSizes {
        page_tokens,
        anchor_pages: pages,
        window_pages: room.window_pages(window),
        slots: running.max(1) + saved,
        dtype,
    };
    let pools = PoolSet::allocate_ranks(devices, &spec.pools, sizes).map_err(|error| failed(&error))?;
    let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let room = CacheRoom {
        running: running.max(1),
        host_windows: small(room.host_window_pages(window)),
        host_states: small(saved * 2),
    };
    let cache = CacheMemory::of_pools(&pools, spec.layers, room).map_err(|error| error.to_string())?;
    Ok(Memory { model: ModelMemory::Pools(Arc::new(pools)), cache })
}

/// Names the arithmetic and, for a model of several pools, what their pages consist of: everything that decides the bytes of a page and
/// stands nowhere else in a namespace.
pub(super) fn numerics(spec: &ModelSpec, dtype: KvDtype, page_tokens: usize) -> String {
    if one_pool(spec).is_some() {
        return spec.numerics_id.clone();
    }
    let mut digest = Sha256::new();
    for pool in spec.pools.iter().filter(|pool| pool.hit != HitPolicy::Nothing) {
        digest.update(pool.identity(page_tokens, dtype).as_bytes());
        digest.update(b"\n");
    }
    let hex: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{} pools={hex}", spec.numerics_id)
}

/// Whether all ranks hold the same bytes of everything that storage keeps. It says what the pages are: also of a rank that has no others.
pub(super) fn replicated(spec: &ModelSpec) -> bool {
    let mut kept = spec.pools.iter().filter(|pool| pool.hit != HitPolicy::Nothing && pool.has_buffer());
    kept.all(PoolDecl::replicated)
}

#[cfg(test)]
mod tests {
    use kvdock_kernels::cpu::CpuDevice;
    use kvdock_models::testing::Fixture;
    use kvdock_models::{LoadOptions, load};

    use super::*;

    fn spec(fixture: &str) -> ModelSpec {
        let folder = tempfile::tempdir().unwrap();
        Fixture::new(fixture).unwrap().write(folder.path()).unwrap();
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        load(folder.path(), &LoadOptions::new(device)).unwrap().spec().clone()
    }

    fn room(page_tokens: usize) -> Room {
        Room {
            dtype: KvDtype::BF16,
            page_tokens,
            pages: 400,
            host_pages: 800,
            transit: false,
            window_ratio: 0.5,
            chunk: 64,
            running: 3,
            saved: 5,
        }
    }

    #[test]
    fn a_page_that_pools_do_not_divide_is_named() {
        let spec = spec("dsv4");
        let multiple = spec.page_multiple;
        let wrong = page_tokens(&spec, Amount::Fixed(multiple as u32 - 1)).unwrap_err();
        assert!(wrong.starts_with("cache.page_size = ") && wrong.contains(&multiple.to_string()), "{wrong}");
        assert_eq!(page_tokens(&spec, Amount::Auto), Ok(16usize.next_multiple_of(multiple)));
    }

    #[test]
    fn memory_is_as_large_as_its_pages_say() {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
        for name in
            ["qwen3_moe", "gpt_oss", "mimo", "glm_dsa", "deepseek_v32", "dsv4", "dsv4q", "qwen3_next", "qwen3_5"]
        {
            let spec = spec(name);
            let room = room(page_tokens(&spec, Amount::Auto).unwrap());
            let Memory { cache, .. } = allocate(std::slice::from_ref(&device), &spec, room).unwrap();
            let CacheMemory { full, window, state } = cache;
            let windows = window.as_ref().map_or(0, |window| window.memory.page_bytes());
            let bytes = page_bytes(&spec, KvDtype::BF16, room.page_tokens, 0.5);
            assert_eq!(full.page_bytes() + windows.div_ceil(2), bytes, "{name}");
            assert_eq!((full.pages(), full.page_tokens()), (400, room.page_tokens), "{name}");
            assert_eq!(
                window.map(|window| (window.memory.pages(), window.host_pages)),
                match name {
                    "gpt_oss" | "mimo" | "dsv4" | "dsv4q" => Some((200, 400)),
                    _ => None,
                }
            );
            let slots = state.map(|state| (state.running, state.memory.pages(), state.host_slots));
            assert_eq!(slots, ["qwen3_next", "qwen3_5"].contains(&name).then_some((3, 8, 10)), "{name}");
        }
    }

    #[test]
    fn windows_have_room_for_all_that_run() {
        let room = Room { window_ratio: 0.0, ..room(16) };
        // Three requests and one more, each with two pages of a window, and two at its ends; and a step of four pages.
        assert_eq!(room.window_pages(32), 4 * 4 + 4);
        assert_eq!(Room { pages: 10, ..room }.window_pages(32), 10, "there are never more than pages of all tokens");
        assert_eq!((room.host_window_pages(32), Room { host_pages: 0, ..room }.host_window_pages(32)), (2, 0));
        // A load takes a window, and offloads leave it one however few transit pages there are.
        let transit = Room { transit: true, host_pages: 2, ..room };
        assert_eq!((transit.host_window_pages(32), Room { host_pages: 0, ..transit }.host_window_pages(32)), (4, 0));
    }

    #[test]
    fn states_by_themselves_take_a_part_of_the_memory() {
        let spec = spec("qwen3_next");
        let auto = |memory| saved_states(&spec, KvDtype::F16, Amount::Auto, 4, memory);
        assert_eq!((auto(None), auto(Some(0))), (32, 8));
        assert_eq!(saved_states(&spec, KvDtype::F16, Amount::Fixed(3), 4, Some(0)), 3);
    }

    #[test]
    fn pools_of_other_bytes_have_another_name() {
        let spec = spec("glm_dsa");
        let mut other = spec.clone();
        other.pools[0].encoding = "another";
        let names: Vec<String> = [(&spec, KvDtype::F16), (&other, KvDtype::F16), (&spec, KvDtype::BF16)]
            .map(|(spec, dtype)| numerics(spec, dtype, 16))
            .into();
        assert!(names[0] != names[1] && names[0] != names[2] && names[1] != names[2], "{names:?}");
        let mut one = spec;
        let kv = KvGeometry { layers: 1, kv_heads: 1, head_dim_k: 8, head_dim_v: 8 };
        (one.pools, one.kv) = (vec![kv.declared()], Some(kv));
        assert_eq!(numerics(&one, KvDtype::F16, 16), one.numerics_id, "a model of one pool keeps its name");
    }
}
