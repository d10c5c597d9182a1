//! Cases of the reference's list about groups of pools, on the pools that models declare. `CASES.md` beside this file says which test is which.

use std::sync::Arc;

use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype};
use kvdock_models::testing::Fixture;
use kvdock_models::{LoadOptions, PoolSet, PoolSizes, load};

use super::*;
use crate::cache::layout::HostLayout;
use crate::cache::{CacheConfig, CacheManager, NoEvents};
use crate::plugin::backend::{HostPoolDescription, PoolGroup, PoolHit};

const RUNNING: usize = 2;

/// The cache's memory of a tiny model: 8 pages, 6 of windows, 4 saved states.
fn memory(name: &str) -> (CacheMemory, usize) {
    let folder = tempfile::tempdir().unwrap();
    Fixture::new(name).unwrap().write(folder.path()).unwrap();
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
    let spec = load(folder.path(), &LoadOptions::new(device.clone())).unwrap().spec().clone();
    let page_tokens = 16usize.next_multiple_of(spec.page_multiple);
    let sizes = PoolSizes { page_tokens, anchor_pages: 8, window_pages: 6, slots: RUNNING + 4, dtype: KvDtype::F16 };
    let pools = PoolSet::allocate(&*device, &spec.pools, sizes).unwrap();
    let room = CacheRoom { running: RUNNING, host_windows: 5, host_states: 3 };
    (CacheMemory::of_pools(&pools, spec.layers, room).unwrap(), page_tokens)
}

fn cache(name: &str, layout: HostLayout) -> (CacheManager, usize) {
    let (memory, page) = memory(name);
    let config = CacheConfig { host_pages: 7, host_layout: layout, ..CacheConfig::default() };
    (CacheManager::over(config, memory, Arc::new(NoEvents), Arc::new(|| {})).unwrap(), page)
}

fn described(name: &str) -> Vec<HostPoolDescription> {
    cache(name, HostLayout::PageFirst).0.storage().host_pools()
}

#[test]
fn p01_pages_that_are_nobodys_outside_or_too_few_are_refused() {
    let (mut cache, page) = cache("gpt_oss", HostLayout::PageFirst);
    let tokens: Vec<u32> = (0..2 * page as u32).collect();
    cache.begin(1, &tokens, &Default::default(), &Default::default());
    assert!(matches!(cache.acquire(1, &tokens), Ok(crate::cache::Acquire::Granted(_))));
    let mut pages = cache.alloc_pages(2).unwrap();
    let mut windows = cache.alloc_windows(2).unwrap();
    let mut commit = |pages: &[u32], windows: &[u32]| {
        cache.commit(1, &tokens, &mut pages.to_vec(), &mut windows.to_vec()).unwrap_err().to_string()
    };
    let outside = commit(&pages, &[windows[0], 6]);
    assert!(outside.contains("device page 6 is not its own"), "{outside}");
    let foreign = commit(&pages, &[windows[0], (0..6).find(|page| !windows.contains(page)).unwrap()]);
    assert!(foreign.contains("is not its own"), "{foreign}");
    let partial = commit(&pages, &windows[..1]);
    assert!(partial.contains("need 2 pages, 1 were given"), "{partial}");
    let none = commit(&pages[..1], &windows);
    assert!(none.contains("need 2 pages, 1 were given"), "{none}");
    cache.commit(1, &tokens, &mut pages, &mut windows).unwrap();
    cache.finish(1, &tokens, crate::cache::PageTables { pages, windows });
    cache.check_integrity().unwrap();
}

#[test]
fn p05_a_logical_anchor_has_no_bytes_and_brings_compressed_pools() {
    for name in ["dsv4", "dsv4q"] {
        let pools = described(name);
        let of = |group| -> Vec<&str> {
            pools.iter().filter(|pool| pool.group == group).map(|pool| pool.name.as_str()).collect()
        };
        let compressed = ["kv", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128"];
        assert_eq!(of(PoolGroup::Full), compressed, "{name}");
        let windows = ["swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"];
        assert_eq!(of(PoolGroup::Window), windows, "{name}");
        assert_eq!(of(PoolGroup::State), Vec::<&str>::new(), "what a running request alone needs is not stored");
        let logical: Vec<bool> = pools.iter().map(|pool| pool.logical).collect();
        assert_eq!(logical, [true, false, false, false, false, false, false], "{name}");
        let anchor = &pools[0];
        assert!(anchor.segments.is_empty() && anchor.components.is_empty() && anchor.layers == 0);
        let hits: Vec<PoolHit> = pools.iter().map(|pool| pool.hit).collect();
        assert_eq!(hits[..4], [PoolHit::AllPages; 4]);
        assert_eq!(hits[4..], [PoolHit::TrailingPages(1); 3], "a page holds the whole window");
    }
}

#[test]
fn p08_the_parts_of_a_page_cover_it_once_and_pools_share_no_byte() {
    for layout in [HostLayout::PageFirst, HostLayout::LayerFirst, HostLayout::PageFirstDirect, HostLayout::PageHead] {
        for name in Fixture::NAMES {
            let (cache, _) = cache(name, layout);
            for group in PoolGroup::ALL {
                let pools: Vec<HostPoolDescription> =
                    cache.storage().host_pools().into_iter().filter(|pool| pool.group == group).collect();
                let Some(first) = pools.first() else { continue };
                let mut taken = vec![false; first.bytes as usize];
                for pool in &pools {
                    assert_eq!((pool.base, pool.bytes), (first.base, first.bytes), "one region a group");
                    for page in 0..u64::from(pool.pages) {
                        for segment in &pool.segments {
                            let start = (segment.offset + page * segment.stride) as usize;
                            let part = &mut taken[start..start + segment.len as usize];
                            assert!(part.iter().all(|&byte| !byte), "{name}, {layout:?}: {} overlaps", pool.name);
                            part.fill(true);
                        }
                    }
                    let Some((_, payload)) = pool.segments.split_last() else { continue };
                    let whole: u64 = payload.iter().map(|segment| segment.len).sum();
                    let parts: u64 = pool.components.iter().map(|part| part.run_len * part.run_count).sum();
                    assert_eq!(parts, whole, "{name}, {layout:?}: {}", pool.name);
                }
            }
        }
    }
}
