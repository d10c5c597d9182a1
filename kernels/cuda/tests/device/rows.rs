//! Pools of pages of rows in the memory of a GPU, and attention over them, against the CPU's device.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::ops::{ElementOps, RowAttention, RowFormat, RowLayout, RowOps, RowPool, RowRun, RowSpan};
use kvdock_kernels::{Device, KvDtype, PageSpec};

use super::rig::{Rig, assert_near, floats};

const SPEC: PageSpec = PageSpec { layers: 3, page_bytes: 4096, pages: 9 };

#[test]
fn pages_come_and_go_layer_by_layer() {
    let rig = Rig::looking();
    let pool = rig.device.alloc_page_pool(SPEC).unwrap();
    let mut out = vec![1; SPEC.page_bytes];
    for (page, layer, byte) in [(4, 1, 7), (8, 2, 9), (4, 0, 3)] {
        pool.copy_layer_out(page, layer, &mut out).unwrap();
        assert!(out.iter().all(|byte| *byte == 0), "a new pool is zeros");
        pool.copy_layer_in(page, layer, &vec![byte; SPEC.page_bytes]).unwrap();
        pool.copy_layer_out(page, layer, &mut out).unwrap();
        assert!(out.iter().all(|found| *found == byte));
    }
    pool.copy_page(4, 5).unwrap();
    pool.clear_page(4).unwrap();
    for (page, layer, byte) in [(5, 0, 3), (5, 1, 7), (5, 2, 0), (4, 1, 0), (8, 2, 9)] {
        pool.copy_layer_out(page, layer, &mut out).unwrap();
        assert!(out.iter().all(|found| *found == byte), "page {page} layer {layer}");
    }
    let refused = [
        pool.copy_layer_in(9, 0, &out).unwrap_err().to_string(),
        pool.copy_layer_in(0, 3, &out).unwrap_err().to_string(),
        pool.copy_page(0, 9).unwrap_err().to_string(),
        pool.read(0).map(|_| ()).unwrap_err().to_string(),
    ];
    for (error, part) in refused.iter().zip(["page 9", "layer 3", "page 9", "memory of a device"]) {
        assert!(error.contains(part), "{error}");
    }
    rig.fake.fail_next("to_host");
    assert!(pool.copy_layer_out(0, 0, &mut out).unwrap_err().to_string().contains("as the test asked"));
    pool.copy_layer_out(8, 2, &mut out).unwrap();
    assert!(out.iter().all(|found| *found == 9));
    let fake = rig.fake.clone();
    drop(pool);
    drop(rig.device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.kept(), (0, SPEC.page_bytes as u64), "the memory of the copy that failed");
}

/// Pages of another device, and of the host, are no pages of this one.
#[test]
fn pools_of_others_are_refused() {
    let rig = Rig::looking();
    let other = Rig::looking();
    let layout = RowLayout { format: RowFormat::Plain(KvDtype::F32), page_rows: 4, elements: 8 };
    let slots = rig.device.upload_indices(&[0]).unwrap();
    let x = rig.device.alloc(8).unwrap();
    for pool in [other.device.alloc_page_pool(SPEC).unwrap(), CpuDevice::new(1).unwrap().alloc_page_pool(SPEC).unwrap()]
    {
        let rows = RowPool::new(&pool, 0, layout).unwrap();
        let error = rig.device.write_rows(&rows, &slots, &x).unwrap_err().to_string();
        assert!(error.contains("does not belong to device"), "{error}");
    }
    let pool = rig.device.alloc_page_pool(SPEC).unwrap();
    let rows = RowPool::new(&pool, 0, layout).unwrap();
    let far = rig.device.upload_indices(&[36]).unwrap();
    assert!(rig.device.write_rows(&rows, &far, &x).unwrap_err().to_string().contains("36"));
    assert!(RowPool::new(&pool, 3, layout).is_err());
    assert!(RowPool::new(&pool, 0, RowLayout { page_rows: 200, ..layout }).is_err());
    drop((slots, far, x, pool));
    rig.end();
    other.end();
}

/// Rows are written, some are picked, and queries attend to a window and to what was picked.
#[test]
fn rows_are_written_picked_and_attended_to() {
    let (tokens, heads, index_heads, top_k) = (43, 9, 4, 6);
    // Fast arithmetic rounds queries and weights to the type of plain rows of 16 bits.
    for (arithmetic, format, width, page_rows, tolerance) in [
        (Arithmetic::Fast, RowFormat::Plain(KvDtype::F32), 40, 5, 2e-5),
        (Arithmetic::Reproducible, RowFormat::Plain(KvDtype::F16), 24, 8, 2e-5),
        (Arithmetic::Fast, RowFormat::Plain(KvDtype::F16), 24, 8, 4e-3),
        (Arithmetic::Reproducible, RowFormat::Plain(KvDtype::BF16), 24, 8, 2e-5),
        (Arithmetic::Fast, RowFormat::Plain(KvDtype::BF16), 24, 8, 3e-2),
        (Arithmetic::Fast, RowFormat::Packed { rope: 16 }, 80, 6, 2e-5),
        (Arithmetic::Reproducible, RowFormat::Packed { rope: 12 }, 76, 6, 2e-5),
    ] {
        let compute = |device: &dyn Device| {
            let layout = |format, elements| RowLayout { format, page_rows, elements };
            let spec = PageSpec { layers: 2, page_bytes: page_rows * (4 * width + 8), pages: 12 };
            let (pool, keys) = (device.alloc_page_pool(spec).unwrap(), device.alloc_page_pool(spec).unwrap());
            let key_format = if matches!(format, RowFormat::Packed { .. }) { RowFormat::Key } else { format };
            let rows = RowPool::new(&pool, 1, layout(format, width)).unwrap();
            let index = RowPool::new(&keys, 0, layout(key_format, 16)).unwrap();
            let table: Vec<u32> = (0..10).map(|page| (page * 7 + 3) % 12).collect();
            let slots: Vec<u32> =
                (0..tokens).map(|row| table[row / page_rows] * page_rows as u32 + (row % page_rows) as u32).collect();
            let slots = device.upload_indices(&slots).unwrap();
            device.write_rows(&rows, &slots, &device.upload(&floats(1, tokens * width)).unwrap()).unwrap();
            device.write_rows(&index, &slots, &device.upload(&floats(2, tokens * 16)).unwrap()).unwrap();
            // Rows of the step at several positions; the last sees nothing of the first run.
            let ends = [43, 3, 30, 6, 7];
            let windowed = ends.map(|end| RowSpan { table: 0, first: end - end.min(4), count: end.min(4) });
            let whole = ends.map(|end| RowSpan { table: 0, first: 0, count: if end == 7 { 0 } else { end } });
            let window = device.spans(&[&table], &windowed, page_rows, 12).unwrap();
            let all = device.spans(&[&table], &whole, page_rows, 12).unwrap();
            let queries = device.upload(&floats(3, ends.len() * index_heads * 16)).unwrap();
            let weights = device.upload(&floats(4, ends.len() * index_heads)).unwrap();
            let picks = device.pick(&index, &all, &queries, &weights, index_heads, top_k).unwrap();
            let q = device.upload(&floats(5, ends.len() * heads * width)).unwrap();
            let sinks = device.upload(&floats(6, heads)).unwrap();
            let value = width - 8;
            let attention = RowAttention { heads, width, value, scale: 0.3, sinks: Some(&sinks) };
            let mut out = device.alloc(ends.len() * heads * value).unwrap();
            let mut read = vec![0.0; out.len()];
            let runs = [
                RowRun { pool: rows, spans: &window, picks: None },
                RowRun { pool: rows, spans: &all, picks: Some(&picks) },
            ];
            device.attend_rows(&q, &attention, &runs, &mut out).unwrap();
            device.read(&out, 0, &mut read).unwrap();
            let both = read.clone();
            let without = RowAttention { sinks: None, ..attention };
            device.attend_rows(&q, &without, &runs[1..], &mut out).unwrap();
            device.read(&out, 0, &mut read).unwrap();
            [both, read].concat()
        };
        let rig = Rig::computing(arithmetic);
        let (found, expected) = (compute(&rig.device), compute(&CpuDevice::new(1).unwrap()));
        assert_near(&format!("{format:?}, {arithmetic:?}"), &found, &expected, tolerance);
        assert!(expected.iter().any(|x| x.abs() > 0.01));
        rig.end();
    }
}
