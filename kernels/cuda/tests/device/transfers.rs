//! Pages that come and go while steps are computed: a layer waits for its own copy, and for no other.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::ops::RowOps;
use kvdock_kernels::{AttentionSpec, Device, KvDtype, KvSpec, PageSpec, SeqSpan};

use super::host_pages::{Host, LAYOUTS, filled, spec};
use super::rig::Rig;

#[test]
fn what_comes_layer_by_layer_is_what_was_taken_out() {
    for layout in LAYOUTS {
        for pinned in [false, true] {
            let rig = Rig::computing(Arithmetic::Reproducible);
            let spec = KvSpec { pages: 80, ..spec(KvDtype::F16) };
            let (pool, other) = (filled(&rig.device, spec), rig.device.alloc_kv_pool(spec).unwrap());
            let pages: Vec<u32> = (0..70).map(|page| (page * 7 + 3) % 80).collect();
            let (mut host, mut back) = (Host::new(spec, layout, 70), Host::new(spec, layout, 70));
            if pinned {
                host.pin(&*pool);
                back.pin(&*other);
            }
            let places = |host: &mut Host| {
                pages.iter().enumerate().map(|(index, page)| (*page, host.page(index))).collect::<Vec<_>>()
            };
            // SAFETY: the pages are there, the host's are used by nobody else, and each transfer is waited for before they are
            // looked at or used again.
            unsafe {
                pool.begin_pages_out(&places(&mut host)).unwrap().wait().unwrap();
                back.k.copy_from_slice(&host.k);
                back.v.copy_from_slice(&host.v);
                let coming = other.begin_pages_in(&places(&mut back)).unwrap();
                for layer in 0..spec.layers {
                    coming.before_layer(layer).unwrap();
                }
                coming.wait().unwrap();
                back.k.fill(0);
                back.v.fill(0);
                other.begin_pages_out(&places(&mut back)).unwrap().wait().unwrap();
            }
            assert_eq!((&host.k, &host.v), (&back.k, &back.v), "{layout}");
            assert!(host.k.iter().any(|byte| *byte != 0xEE && *byte != 0));
            let fake = rig.fake.clone();
            drop((pool, other));
            rig.end();
            if pinned {
                let launches = fake.launched().iter().filter(|name| name.starts_with("kv_pages_in")).count();
                assert_eq!(launches, spec.layers, "one launch a layer for all pages");
            }
        }
    }
}

/// A step whose layers wait for theirs: the fake driver's clocks find a layer that reads what may still come.
#[test]
fn a_layer_waits_for_its_own_pages() {
    let rig = Rig::looking();
    let spec = KvSpec { head_dim_v: 24, ..spec(KvDtype::F32) };
    let pool = filled(&rig.device, spec);
    let mut host = Host::new(spec, "page_head", 2);
    host.pin(&*pool);
    let device = &rig.device;
    let q = device.alloc(2 * 24).unwrap();
    let mut out = device.alloc(2 * 24).unwrap();
    let attend = AttentionSpec { heads: 2, scale: 1.0, window: None, sinks: None };
    let plan = device.plan(&*pool, &[SeqSpan { start: 7, len: 1, pages: &[4, 6] }]).unwrap();
    let pages = [(4, host.page(0)), (6, host.page(1))];
    // SAFETY: the pages are there; layers wait for them below, and the transfer is dropped before the host's pages.
    let coming = unsafe { pool.begin_pages_in(&pages).unwrap() };
    let before = rig.fake.count("synchronize") + rig.fake.count("wait_here");
    for layer in 0..spec.layers {
        coming.before_layer(layer).unwrap();
        device.attention(&*pool, layer, &plan, &q, &attend, &mut out).unwrap();
    }
    let after = rig.fake.count("synchronize") + rig.fake.count("wait_here");
    assert_eq!(before, after, "nobody waits in this process");
    coming.wait().unwrap();
    drop((coming, pool, q, out, plan));
    rig.end();
}

/// Layers that are asked for one by one, while earlier ones are computed with: each waits for what was queued before the load began, and for
/// nothing that was queued later.
#[test]
fn layers_come_while_earlier_ones_are_computed_with() {
    let rig = Rig::looking();
    let spec = KvSpec { head_dim_v: 24, ..spec(KvDtype::F32) };
    let pool = filled(&rig.device, spec);
    let mut host = Host::new(spec, "layer_first", 2);
    host.pin(&*pool);
    let device = &rig.device;
    let q = device.alloc(2 * 24).unwrap();
    let mut out = device.alloc(2 * 24).unwrap();
    let attend = AttentionSpec { heads: 2, scale: 1.0, window: None, sinks: None };
    let plan = device.plan(&*pool, &[SeqSpan { start: 7, len: 1, pages: &[4, 6] }]).unwrap();
    let pages = [(4, host.page(0)), (6, host.page(1))];
    let moment = pool.moment().unwrap();
    let mut coming = Vec::new();
    let (waits, before) = (rig.fake.count("wait"), rig.fake.count("synchronize"));
    for layer in 0..spec.layers {
        // SAFETY: the pages are there; the layer waits for them below, and what was computed after the moment touched earlier layers alone.
        let transfer = unsafe { pool.begin_layer_in(&moment, layer, &pages).unwrap() };
        transfer.before_layer(layer).unwrap();
        device.attention(&*pool, layer, &plan, &q, &attend, &mut out).unwrap();
        coming.push(transfer);
    }
    assert_eq!(rig.fake.count("wait") - waits, 2 * spec.layers, "each copy for the moment, each layer for its copy");
    assert_eq!(rig.fake.count("synchronize"), before, "nobody waits in this process for what is computed or copied");
    // SAFETY: there is no such layer, so nothing is copied.
    assert!(unsafe { pool.begin_layer_in(&moment, spec.layers, &pages) }.is_err());
    drop((coming, moment, pool, q, out, plan));
    rig.end();
}

/// The same without the wait for the last layer is found, and a wait for the first layer alone does not hold up for the others.
#[test]
fn a_layer_that_does_not_wait_is_found() {
    let rig = Rig::looking();
    let spec = KvSpec { head_dim_v: 24, ..spec(KvDtype::F32) };
    let pool = filled(&rig.device, spec);
    let mut host = Host::new(spec, "layer_first", 1);
    host.pin(&*pool);
    let device = &rig.device;
    let q = device.alloc(2 * 24).unwrap();
    let mut out = device.alloc(2 * 24).unwrap();
    let attend = AttentionSpec { heads: 2, scale: 1.0, window: None, sinks: None };
    let plan = device.plan(&*pool, &[SeqSpan { start: 7, len: 1, pages: &[4, 6] }]).unwrap();
    // SAFETY: as above.
    let coming = unsafe { pool.begin_pages_in(&[(4, host.page(0))]).unwrap() };
    coming.before_layer(0).unwrap();
    device.attention(&*pool, 0, &plan, &q, &attend, &mut out).unwrap();
    assert_eq!(rig.fake.violations(), Vec::<String>::new(), "layer 0 has come");
    device.attention(&*pool, 1, &plan, &q, &attend, &mut out).unwrap();
    let found = rig.fake.violations();
    assert!(found.iter().any(|line| line.contains("not ordered behind")), "{found:?}");
    drop((coming, pool, q, out, plan));
}

/// What is computed after pages were asked to go out may overwrite them once it waits for that.
#[test]
fn pages_are_overwritten_when_they_are_out() {
    let rig = Rig::looking();
    let spec = spec(KvDtype::F16);
    let pool = filled(&rig.device, spec);
    let mut host = Host::new(spec, "page_first", 1);
    host.pin(&*pool);
    let device = &rig.device;
    let (k, v) = (device.alloc(2 * 24).unwrap(), device.alloc(2 * 10).unwrap());
    let plan = device.plan(&*pool, &[SeqSpan { start: 0, len: 1, pages: &[4] }]).unwrap();
    // SAFETY: the page is there, and the transfer is dropped before the host's page.
    let going = unsafe { pool.begin_pages_out(&[(4, host.page(0))]).unwrap() };
    going.before_layer(0).unwrap();
    for layer in 0..spec.layers {
        device.kv_write(&*pool, layer, &plan, &k, &v).unwrap();
    }
    assert!(!going.is_done().unwrap(), "the fake driver says so only where it is asked to");
    going.wait().unwrap();
    drop((going, pool, k, v, plan));
    rig.end();
}

/// Pages of bytes wait for what was computed before a moment alone; what is computed later sees them.
#[test]
fn pages_of_bytes_come_while_others_are_computed_with() {
    let rig = Rig::looking();
    let pool = rig.device.alloc_page_pool(PageSpec { layers: 2, page_bytes: 64, pages: 4 }).unwrap();
    pool.copy_page(0, 1).unwrap();
    let moment = pool.moment().unwrap();
    pool.copy_page(0, 2).unwrap();
    let marked = rig.fake.count("record");
    pool.copy_layer_in_after(Some(&moment), 1, 0, &[7; 64]).unwrap();
    assert_eq!(rig.fake.count("record"), marked, "nothing is asked of what was computed since");
    pool.copy_page(1, 3).unwrap();
    let mut back = [0; 64];
    pool.copy_layer_out(3, 0, &mut back).unwrap();
    assert_eq!(back, [7; 64]);
    assert_eq!(rig.fake.violations(), Vec::<String>::new());
    // A page that was computed since is none to come behind that moment.
    pool.copy_page(0, 2).unwrap();
    pool.copy_layer_in_after(Some(&moment), 2, 0, &[7; 64]).unwrap();
    let found = rig.fake.violations();
    assert!(found.iter().any(|line| line.contains("not ordered behind")), "{found:?}");
    drop((moment, pool));
}
