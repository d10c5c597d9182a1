//! What the device refuses, and what it tells of a driver that fails.

use std::sync::Arc;

use kvdock_cuda::{Arithmetic, CudaDevice};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{
    AttentionSpec, Buf, Device, KernelError, KvDtype, KvSpec, MatrixShape, SeqSpan, WeightData, WeightFormat,
};

use super::rig::Rig;

#[test]
fn what_does_not_fit_is_refused_as_the_cpu_refuses_it() {
    let rig = Rig::looking();
    let (device, cpu) = (&rig.device, CpuDevice::new(1).unwrap());
    let x = device.upload(&[1.0; 8]).unwrap();
    let mut short = device.alloc(3).unwrap();
    let text = |result: Result<(), KernelError>| result.unwrap_err().to_string();
    assert_eq!(
        text(device.rms_norm(&x, &x, 1e-5, 1, &mut short)),
        "rms_norm: out is 3 elements long, expected at least 8 elements"
    );
    let foreign = cpu.upload(&[1.0; 8]).unwrap();
    let error = text(device.rms_norm(&foreign, &x, 1e-5, 1, &mut short));
    assert!(error.contains("x does not belong to device cuda 0 (Fake GPU, sm_90a)"), "{error}");
    let other = Rig::looking();
    assert!(text(other.device.rms_norm(&x, &x, 1e-5, 1, &mut short)).contains("does not belong"));
    other.end();
    let bytes = [0; 4 * 4 * 8];
    let table = WeightData {
        name: "w",
        shape: MatrixShape { rows: 4, cols: 8 },
        format: WeightFormat::F32,
        bytes: &bytes,
        row_order: None,
    };
    let table = device.upload_weight(&table).unwrap();
    assert_eq!(text(device.embed(&table, &[1, 4], &mut short)), "embed: index 4 at row 1, but the table has 4 rows");
    assert!(text(device.gather_rows(&x, 3, &[2], &mut short)).contains("index 2 at row 0, but the table has 2 rows"));
    let data = |bytes, order| WeightData {
        name: "blk.0.q",
        shape: MatrixShape { rows: 2, cols: 2 },
        format: WeightFormat::F32,
        bytes,
        row_order: order,
    };
    let error = device.upload_weight(&data(&[0; 15], None)).unwrap_err().to_string();
    assert!(error.contains("blk.0.q") && error.contains("15 bytes"), "{error}");
    assert!(device.upload_weight(&data(&[0; 16], Some(&[1, 1]))).unwrap_err().to_string().contains("twice"));
    let spec = KvSpec {
        layers: 1,
        kv_heads: 2,
        head_dim_k: 16,
        head_dim_v: 16,
        page_tokens: 4,
        pages: 2,
        dtype: KvDtype::F16,
    };
    let (pool, twin) = (device.alloc_kv_pool(spec).unwrap(), device.alloc_kv_pool(spec).unwrap());
    assert!(device.alloc_kv_pool(KvSpec { page_tokens: 0, ..spec }).is_err());
    let plan = device.plan(&*pool, &[SeqSpan { start: 0, len: 1, pages: &[1] }]).unwrap();
    let error = device.plan(&*pool, &[SeqSpan { start: 0, len: 1, pages: &[2] }]).unwrap_err().to_string();
    assert!(error.contains("page 2, but the pool has 2"), "{error}");
    let kv = device.alloc(32).unwrap();
    let mut out = device.alloc(48).unwrap();
    assert!(text(device.kv_write(&*twin, 0, &plan, &kv, &kv)).contains("another pool"));
    assert!(text(device.kv_write(&*pool, 1, &plan, &kv, &kv)).contains("layer is 1, expected below 1"));
    let attend = |heads, window, out: &mut Buf| {
        let spec = AttentionSpec { heads, scale: 1.0, window, sinks: None };
        text(device.attention(&*pool, 0, &plan, &kv, &spec, out))
    };
    assert!(attend(3, None, &mut out).contains("a multiple of 2 KV heads"));
    assert!(attend(2, Some(0), &mut out).contains("window is 0, expected at least 1"));
    drop((x, short, table, pool, twin, plan, kv, out));
    rig.end();
}

#[test]
fn an_old_gpu_and_a_full_one_are_told() {
    let old = Arc::new(super::fake::Fake::with_compute((7, 5)));
    let error = CudaDevice::new(old, Arc::new(super::emulated::Nothing), Arithmetic::Fast).err().unwrap().to_string();
    assert!(error.contains("Fake GPU has compute capability 7.5; the kernels need 8.0"), "{error}");

    let rig = Rig::looking();
    rig.fake.set_room(1000);
    let error = rig.device.alloc(1000).unwrap_err().to_string();
    assert!(error.starts_with("cannot allocate 4096 bytes for a buffer: alloc: out of memory"), "{error}");
    assert!(error.ends_with("1000 bytes of the GPU's memory are free"), "{error}");
    rig.fake.set_room(1 << 20);
    let x = rig.device.upload(&[1.0; 4]).unwrap();
    rig.fake.fail_next("synchronize");
    let error = rig.device.read(&x, 0, &mut [0.0; 4]).unwrap_err().to_string();
    assert!(error.contains("read: synchronize: failed as the test asked"), "{error}");
    // The memory of a copy that may still run is never given back.
    drop(x);
    let fake = rig.fake.clone();
    drop(rig.device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.kept(), (0, 4096));
}
