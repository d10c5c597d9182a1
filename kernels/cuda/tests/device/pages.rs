//! Pages between the GPU and the host: every layout, pinned or not, beside what is computed.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype, KvSpec, SeqSpan};

use super::host_pages::{Host, LAYOUTS, filled, spec};
use super::rig::{Rig, floats};

#[test]
fn pages_leave_and_come_back_in_every_layout() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    let cpu = CpuDevice::new(1).unwrap();
    for dtype in [KvDtype::F16, KvDtype::F32] {
        let spec = spec(dtype);
        let reference = filled(&cpu, spec);
        for layout in LAYOUTS {
            for pinned in [true, false] {
                let what = format!("{layout} {dtype:?} pinned {pinned}");
                let mut expected = Host::new(spec, layout, 4);
                let mut host = Host::new(spec, layout, 4);
                let pool = filled(&rig.device, spec);
                if pinned {
                    host.pin(&*pool);
                }
                // One page, several at once, and one layer alone.
                for (to, page) in [(0, 7), (2, 3), (1, 8)] {
                    // SAFETY: the pages are there and used by nobody else.
                    unsafe { reference.copy_page_out(page, &expected.page(to)).unwrap() };
                }
                let many = [(3, host.page(2)), (8, host.page(1))];
                // SAFETY: as above.
                unsafe {
                    reference.copy_layer_out(4, 1, &expected.page(3)).unwrap();
                    pool.copy_page_out(7, &host.page(0)).unwrap();
                    pool.copy_pages_out(&many).unwrap();
                    pool.copy_layer_out(4, 1, &host.page(3)).unwrap();
                }
                assert_eq!((&host.k, &host.v), (&expected.k, &expected.v), "{what}");

                // Into another pool, and out of it again.
                let other = rig.device.alloc_kv_pool(spec).unwrap();
                let mut back = Host::new(spec, layout, 4);
                if pinned {
                    // SAFETY: `host` outlives the pool.
                    assert!(unsafe { other.pin_host(back.k.as_mut_ptr(), back.k.len()) }.unwrap());
                }
                let many = [(5, host.page(0)), (1, host.page(2))];
                // SAFETY: as above.
                unsafe {
                    other.copy_pages_in(&many).unwrap();
                    other.copy_page_in(0, &host.page(1)).unwrap();
                    other.copy_layer_in(2, 1, &host.page(3)).unwrap();
                    for (to, page) in [(0, 5), (2, 1), (1, 0)] {
                        other.copy_page_out(page, &back.page(to)).unwrap();
                    }
                    other.copy_layer_out(2, 1, &back.page(3)).unwrap();
                }
                assert_eq!((&back.k, &back.v), (&expected.k, &expected.v), "{what}");
                drop((pool, other));
            }
        }
    }
    rig.end();
}

#[test]
fn a_new_pool_reads_as_zero_and_takes_its_memory() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    let spec = spec(KvDtype::BF16);
    let pool = rig.device.alloc_kv_pool(spec).unwrap();
    assert!(rig.fake.kept().0 >= (spec.pages * spec.page_bytes()) as u64);
    let mut host = Host::new(spec, "page_first", 1);
    // SAFETY: the page is there and used by nobody else.
    unsafe { pool.copy_page_out(8, &host.page(0)).unwrap() };
    assert!(host.k.iter().chain(&host.v).all(|byte| *byte == 0));
    // SAFETY: both are refused before anything is copied.
    let errors = unsafe { [pool.copy_page_out(9, &host.page(0)), pool.copy_layer_in(0, 3, &host.page(0))] };
    let texts = errors.map(|error| error.unwrap_err().to_string());
    assert_eq!(texts, ["copy_page_out: page 9, but the pool has 9", "copy_layer_in: layer 3, but the pool has 3"]);
    drop(pool);
    rig.end();
}

/// Copies of several threads beside steps of another one, over pages of their own: nothing is unordered, and every page is what was written.
#[test]
fn copies_run_beside_steps() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    let spec = spec(KvDtype::F16);
    let pool = filled(&rig.device, spec);
    let cpu_pool = filled(&CpuDevice::new(1).unwrap(), spec);
    let mut hosts: Vec<Host> = LAYOUTS.iter().map(|layout| Host::new(spec, layout, 2)).collect();
    hosts[0].pin(&*pool);
    hosts[1].pin(&*pool);
    std::thread::scope(|scope| {
        for (index, host) in hosts.iter_mut().enumerate() {
            let (pool, cpu_pool) = (&pool, &cpu_pool);
            scope.spawn(move || {
                // Pages 0 to 7 are the threads' own, page 8 the steps'.
                let pages = [2 * index as u32, 2 * index as u32 + 1];
                let mut expected = Host::new(spec, host.layout, 2);
                for _ in 0..4 {
                    host.k.fill(0);
                    host.v.fill(0);
                    let jobs = [(pages[0], host.page(0)), (pages[1], host.page(1))];
                    // SAFETY: these pages belong to this thread, on both sides.
                    unsafe {
                        pool.copy_pages_out(&jobs).unwrap();
                        cpu_pool.copy_page_out(pages[0], &expected.page(0)).unwrap();
                        cpu_pool.copy_page_out(pages[1], &expected.page(1)).unwrap();
                        pool.copy_page_in(pages[0], &host.page(0)).unwrap();
                    }
                    assert_eq!((&host.k, &host.v), (&expected.k, &expected.v));
                }
            });
        }
        let device = &rig.device;
        let mut x = device.alloc(5 * 2 * 24).unwrap();
        for number in 0..8 {
            device.write(&mut x, 0, &floats(number, 5 * 2 * 24)).unwrap();
            let plan = device.plan(&*pool, &[SeqSpan { start: 0, len: 5, pages: &[8] }]).unwrap();
            (0..3).for_each(|layer| device.kv_write(&*pool, layer, &plan, &x, &x).unwrap());
        }
    });
    assert_eq!(rig.fake.violations(), Vec::<String>::new());
    drop(pool);
    rig.end();
}

#[test]
fn checksums_are_those_of_the_host_pages() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    for dtype in [KvDtype::F16, KvDtype::F32] {
        // More pages than a launch takes.
        let spec = KvSpec { pages: 67, ..spec(dtype) };
        let pool = filled(&rig.device, spec);
        let pages: Vec<u32> = (0..66).map(|page| 66 - page).collect();
        let mut host = Host::new(spec, "page_first", pages.len());
        let places: Vec<_> = pages.iter().enumerate().map(|(index, page)| (*page, host.page(index))).collect();
        // SAFETY: the pages are there and used by nobody else.
        unsafe { pool.copy_pages_out(&places).unwrap() };
        for by_heads in [false, true] {
            let mut expected = Vec::new();
            for (_, place) in &places {
                let parts = [
                    (place.k, spec.head_dim_k, place.k_layer_stride, place.k_head_stride, place.k_token_stride),
                    (place.v, spec.head_dim_v, place.v_layer_stride, place.v_head_stride, place.v_token_stride),
                ];
                for (at, dim, by_layer, by_head, by_token) in parts {
                    for layer in 0..spec.layers {
                        let (outer, inner) = if by_heads {
                            (spec.kv_heads, spec.page_tokens)
                        } else {
                            (spec.page_tokens, spec.kv_heads)
                        };
                        let mut sum = 0;
                        for (outer, inner) in (0..outer).flat_map(|outer| (0..inner).map(move |inner| (outer, inner))) {
                            let (head, token) = if by_heads { (outer, inner) } else { (inner, outer) };
                            let row = at.wrapping_add(layer * by_layer + head * by_head + token * by_token);
                            // SAFETY: the row lies in the host's page, which has been copied.
                            sum = crc32c::crc32c_append(sum, unsafe {
                                std::slice::from_raw_parts(row, dim * dtype.bytes())
                            });
                        }
                        expected.push(sum);
                    }
                }
            }
            assert_eq!(
                pool.checksums(&pages, by_heads, None).unwrap(),
                Some(expected),
                "{dtype:?}, by heads {by_heads}"
            );
        }
        assert!(pool.checksums(&[67], false, None).is_err(), "a page that is not there");
    }
    assert_eq!(filled(&CpuDevice::new(1).unwrap(), spec(KvDtype::F16)).checksums(&[0], false, None).unwrap(), None);
    rig.end();
}
