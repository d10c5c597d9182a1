//! What is ordered before what when pages and small data move; no kernel runs.

use kvdock_kernels::{AttentionSpec, Device, KvDtype, KvSpec, SeqSpan};

use super::host_pages::{Host, filled, spec};
use super::rig::{Rig, floats};

/// A page that a step still reads is filled anew: the copy waits for the step, and the next step sees what came.
#[test]
fn a_page_is_filled_anew_only_when_steps_have_read_it() {
    let rig = Rig::looking();
    let spec = KvSpec { head_dim_v: 24, ..spec(KvDtype::F32) };
    let pool = filled(&rig.device, spec);
    let mut host = Host::new(spec, "page_head", 1);
    host.pin(&*pool);
    let device = &rig.device;
    let q = device.alloc(2 * 24).unwrap();
    let mut out = device.alloc(2 * 24).unwrap();
    let attend = AttentionSpec { heads: 2, scale: 1.0, window: None, sinks: None };
    for _ in 0..3 {
        let plan = device.plan(&*pool, &[SeqSpan { start: 7, len: 1, pages: &[4, 6] }]).unwrap();
        device.attention(&*pool, 2, &plan, &q, &attend, &mut out).unwrap();
        // SAFETY: the page is there; what the step still reads is for the pool to wait for.
        unsafe { pool.copy_page_in(4, &host.page(0)).unwrap() };
    }
    drop((pool, q, out));
    rig.end();
}

/// After a copy that failed nothing of the host's is in use any more.
#[test]
fn a_copy_that_fails_is_told_and_leaves_nothing_behind() {
    let rig = Rig::looking();
    let spec = spec(KvDtype::F16);
    let pool = filled(&rig.device, spec);
    for pinned in [false, true] {
        let mut host = Host::new(spec, "page_first", 2);
        if pinned {
            host.pin(&*pool);
        }
        rig.fake.fail_next("launch");
        // SAFETY: the page is there and used by nobody else.
        let error = unsafe { pool.copy_page_out(1, &host.page(0)) }.unwrap_err().to_string();
        assert!(error.contains("kv_pages_out: launch: failed as the test asked"), "{error}");
        // SAFETY: as above.
        unsafe { pool.copy_page_out(1, &host.page(0)).unwrap() };
        if pinned {
            // The pool keeps it pinned to its end.
            std::mem::forget(host);
        }
    }
    rig.fake.fail_next("pin_host");
    let mut host = Host::new(spec, "page_first", 1);
    // SAFETY: the range is there.
    let error = unsafe { pool.pin_host(host.k.as_mut_ptr(), 16) }.unwrap_err().to_string();
    assert!(error.contains("pinned host pages"), "{error}");
    let fake = rig.fake.clone();
    drop(pool);
    drop(rig.device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    // The page on its way of the copy that failed.
    assert_eq!(fake.kept(), (0, spec.page_bytes() as u64));
}

/// Small uploads reuse their pinned memory only when its last copy has run, whether queries find that or nobody asks.
#[test]
fn pinned_memory_of_uploads_is_used_again_in_time() {
    for eager in [false, true] {
        let rig = Rig::looking();
        rig.fake.set_eager(eager);
        let mut x = rig.device.alloc(50_000).unwrap();
        for round in 0..40 {
            let values = floats(round, 1000 * (1 + round as usize % 50));
            rig.device.write(&mut x, 0, &values).unwrap();
            if round % 7 == 0 {
                let mut back = vec![0.0; values.len()];
                rig.device.read(&x, 0, &mut back).unwrap();
                assert_eq!(back, values);
            }
        }
        assert!(rig.fake.count("alloc_host") < 30, "{}", rig.fake.count("alloc_host"));
        assert_eq!(rig.fake.count("wait_here") > 8, !eager);
        drop(x);
        rig.end();
    }
}
