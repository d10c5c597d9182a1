//! Steps with numbers from the host between their kernels: recorded, queued again, and recorded anew when they are others.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::ops::ElementOps;
use kvdock_kernels::{Buf, Device, KernelError, KvPool, SeqSpan};

use super::repeats::{SPEC, rope, step};
use super::rig::{Rig, floats};

/// A step of sequences at these positions, each with 16 pages of its own, whose rows are turned round by numbers from the host.
fn whole(
    device: &dyn Device,
    pool: &dyn KvPool,
    rope: &kvdock_kernels::Rope,
    at: &[u32],
    x: &mut Buf,
) -> Result<(), KernelError> {
    let tables: Vec<Vec<u32>> = (0..at.len() as u32).map(|seq| (16 * seq..16 * seq + 16).collect()).collect();
    let seqs: Vec<SeqSpan<'_>> =
        at.iter().zip(&tables).map(|(start, pages)| SeqSpan { start: *start, len: 1, pages }).collect();
    let plan = device.plan(pool, &seqs)?;
    let order: Vec<u32> = (0..at.len() as u32).map(|row| (row + at[0]) % at.len() as u32).collect();
    let mut turned = device.scratch(at.len() * 16)?;
    device.gather_rows(x, 16, &order, &mut turned)?;
    let mut out = device.scratch(at.len() * 16)?;
    step(device, pool, &plan, rope, &mut turned, &mut out)?;
    device.add(x, &turned, at.len() * 16)
}

#[test]
fn replayed_steps_compute_what_steps_kernel_by_kernel_compute() {
    for arithmetic in [Arithmetic::Reproducible, Arithmetic::Fast] {
        let rig = Rig::computing(arithmetic);
        let run = |recorded: bool| {
            let device = &rig.device;
            let pool = device.alloc_kv_pool(SPEC).unwrap();
            let rope = rope(device, 64);
            let mut x = device.alloc(32).unwrap();
            let mut all = Vec::new();
            for position in 0..20_u32 {
                // Rows come and go.
                let at = [position, position + 4];
                let at = if position % 7 == 6 { &at[..1] } else { &at[..] };
                device.write(&mut x, 0, &floats(u64::from(position), 32)).unwrap();
                let mut work = || whole(device, &*pool, &rope, at, &mut x);
                if recorded {
                    device.replay(1, &mut work).unwrap()
                } else {
                    work().unwrap()
                };
                let mut values = [0.0; 32];
                device.read(&x, 0, &mut values).unwrap();
                all.extend(values.map(f32::to_bits));
            }
            all
        };
        let expected = run(false);
        let launched = rig.fake.launched().len();
        assert_eq!(rig.fake.count("launch_graph"), 0);
        assert_eq!(run(true), expected, "{arithmetic:?}");
        assert_eq!(rig.fake.launched().len(), 2 * launched, "the same kernels run, each once");
        // Two shapes, each kernel by kernel once; splits and arrays stay as they are.
        assert_eq!((rig.fake.count("launch_graph"), rig.fake.count("end_capture")), (18, 2));
        rig.end();
    }
}

/// Other buffers, other pools, other sizes: what was recorded is not queued with them.
#[test]
fn a_recording_is_never_queued_for_another_step() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    let device = &rig.device;
    let rope = rope(device, 64);
    let pools = [device.alloc_kv_pool(SPEC).unwrap(), device.alloc_kv_pool(SPEC).unwrap()];
    let mut buffers = [device.alloc(32).unwrap(), device.alloc(32).unwrap()];
    let mut graphs = Vec::new();
    for round in 0..3_usize {
        for (number, x) in buffers.iter_mut().enumerate() {
            for pool in &pools {
                let at = [round as u32, round as u32 + 2];
                device.write(x, 0, &floats(number as u64, 32)).unwrap();
                device.replay(1, &mut || whole(device, &**pool, &rope, &at, x)).unwrap();
                let mut found = [0.0; 32];
                device.read(x, 0, &mut found).unwrap();
                assert!(found.iter().all(|value| value.is_finite()));
            }
        }
        graphs.push((rig.fake.count("end_capture"), rig.fake.count("launch_graph")));
    }
    assert_eq!(graphs, [(0, 0), (4, 4), (4, 8)], "each of the four has a recording of its own");
    drop((pools, buffers, rope));
    let fake = rig.fake.clone();
    rig.end();
    assert_eq!(fake.count("destroy_graph"), 4);
}

/// What can't be recorded is done as it is, and so is what fails; then nothing has been queued twice.
#[test]
fn steps_that_can_t_be_recorded_are_queued_as_they_are() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    let device = &rig.device;
    let mut x = device.alloc(16).unwrap();
    for round in 1..=4 {
        device
            .replay(7, &mut || {
                let one = device.upload(&[1.0; 16])?;
                device.add(&mut x, &one, 16)
            })
            .unwrap();
        let mut found = [0.0; 16];
        device.read(&x, 0, &mut found).unwrap();
        assert_eq!(found, [round as f32; 16]);
    }
    for _ in 0..3 {
        let error = device.replay(8, &mut || {
            let y = device.scratch(16)?;
            device.add(&mut x, &y, 17)
        });
        assert!(error.unwrap_err().to_string().contains("at least 17"));
    }
    assert_eq!((rig.fake.count("begin_capture"), rig.fake.count("launch_graph")), (0, 0));
    drop(x);
    rig.end();
}

/// More numbers than there is room for at first.
#[test]
fn the_room_for_numbers_grows() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    let device = &rig.device;
    let rows = 20_000_u32;
    let x = device.upload(&floats(3, 64)).unwrap();
    let mut out = device.alloc(rows as usize).unwrap();
    let mut graphs = Vec::new();
    for round in 0..5_u32 {
        let order: Vec<u32> = (0..rows).map(|row| (row + round) % 64).collect();
        device.replay(1, &mut || device.gather_rows(&x, 1, &order, &mut out)).unwrap();
        let mut found = vec![0.0; rows as usize];
        device.read(&out, 0, &mut found).unwrap();
        let expected = floats(3, 64);
        assert!(found.iter().zip(&order).all(|(found, at)| *found == expected[*at as usize]), "round {round}");
        graphs.push(rig.fake.count("launch_graph"));
    }
    assert_eq!(graphs, [0, 0, 1, 2, 3]);
    drop((x, out));
    rig.end();
}
