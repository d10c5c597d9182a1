//! Decode steps that are recorded and queued again.

use kvdock_kernels::{
    AttentionSpec, Buf, Device, KernelError, KvDtype, KvPool, KvSpec, Plan, RopeScaling, RopeSpec, RopeStyle, SeqSpan,
};

use super::rig::Rig;

pub const SPEC: KvSpec =
    KvSpec { layers: 2, kv_heads: 1, head_dim_k: 16, head_dim_v: 16, page_tokens: 4, pages: 40, dtype: KvDtype::F16 };

/// One step: rotates and writes a key and value for each row, attends, and adds the result to what is in `x`.
pub fn step(
    device: &dyn Device,
    pool: &dyn KvPool,
    plan: &Plan,
    rope: &kvdock_kernels::Rope,
    x: &mut Buf,
    out: &mut Buf,
) -> Result<(), KernelError> {
    for layer in 0..2 {
        device.rope(rope, plan, x, 1, 16)?;
        device.kv_write(pool, layer, plan, x, x)?;
        let spec = AttentionSpec { heads: 1, scale: 0.25, window: None, sinks: None };
        device.attention(pool, layer, plan, x, &spec, out)?;
        device.add(x, out, plan.rows() * 16)?;
    }
    Ok(())
}

pub fn rope(device: &dyn Device, max_positions: usize) -> kvdock_kernels::Rope {
    let spec = RopeSpec {
        style: RopeStyle::Half,
        offset: 0,
        dim: 16,
        theta: 100.0,
        scaling: RopeScaling::None,
        frequency_divisors: None,
        max_positions,
    };
    device.upload_rope(&spec).unwrap()
}

#[test]
fn other_shapes_are_recorded_apart_and_prompts_not_at_all() {
    let rig = Rig::looking();
    let device = &rig.device;
    let pool = device.alloc_kv_pool(SPEC).unwrap();
    let calls = std::cell::Cell::new(0);
    let ask = |key, seqs: &[SeqSpan<'_>]| {
        let plan = device.plan(&*pool, seqs).unwrap();
        device
            .repeat(key, &plan, &mut |_| {
                calls.set(calls.get() + 1);
                Ok(())
            })
            .unwrap();
    };
    let one = [SeqSpan { start: 3, len: 1, pages: &[1] }];
    let two = [SeqSpan { start: 3, len: 1, pages: &[1] }, SeqSpan { start: 5, len: 1, pages: &[2, 3] }];
    let prompt = [SeqSpan { start: 0, len: 2, pages: &[1] }];
    for _ in 0..5 {
        ask(1, &one);
        ask(2, &one);
        ask(1, &two);
        ask(1, &prompt);
    }
    // Two runs kernel by kernel and one to be recorded, for each of three; every prompt.
    assert_eq!(calls.get(), 3 * 3 + 5);
    assert_eq!(rig.fake.count("begin_capture"), 3);
    assert_eq!(rig.fake.count("launch_graph"), 3 * 3);
    // More than are kept push out the oldest.
    for key in 10..80 {
        (0..3).for_each(|_| ask(key, &one));
    }
    assert!(rig.fake.count("destroy_graph") >= 9, "{}", rig.fake.count("destroy_graph"));
    drop(pool);
    let fake = rig.fake.clone();
    rig.end();
    assert_eq!(fake.count("destroy_graph"), fake.count("end_capture"));
}

#[test]
fn positions_beyond_the_table_are_refused_by_recordings_too() {
    let rig = Rig::looking();
    let device = &rig.device;
    let pool = device.alloc_kv_pool(SPEC).unwrap();
    let rope = rope(device, 8);
    let (mut x, mut out) = (device.alloc(16).unwrap(), device.alloc(16).unwrap());
    let mut at = |position| {
        let plan = device.plan(&*pool, &[SeqSpan { start: position, len: 1, pages: &[1, 2, 3] }]).unwrap();
        device.repeat(9, &plan, &mut |plan| step(device, &*pool, plan, &rope, &mut x, &mut out))
    };
    (4..8).for_each(|position| at(position).unwrap());
    let error = at(8).unwrap_err().to_string();
    assert!(error.contains("position is 8, expected below 8"), "{error}");
    at(7).unwrap();
    drop((pool, rope, x, out));
    rig.end();
}

#[test]
fn a_step_that_fails_while_it_is_recorded_leaves_no_recording() {
    let rig = Rig::looking();
    let device = &rig.device;
    let pool = device.alloc_kv_pool(SPEC).unwrap();
    let mut x = device.alloc(16).unwrap();
    let plan = device.plan(&*pool, &[SeqSpan { start: 0, len: 1, pages: &[1] }]).unwrap();
    let mut ask = |fail: bool| {
        device.repeat(1, &plan, &mut |_| {
            let y = device.alloc(16)?;
            device.add(&mut x, &y, if fail { 17 } else { 16 })
        })
    };
    // An allocation in a recording is freed under it here, so only failing ones are recorded.
    ask(false).unwrap();
    ask(false).unwrap();
    assert!(ask(true).unwrap_err().to_string().contains("at least 17"));
    assert_eq!((rig.fake.count("begin_capture"), rig.fake.count("end_capture")), (1, 1));
    assert_eq!(rig.fake.count("destroy_graph"), 1);
    ask(false).unwrap();
    drop((pool, x, plan));
    rig.end();
}
