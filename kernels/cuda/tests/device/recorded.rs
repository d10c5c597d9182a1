//! What recorded decode steps compute.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::{Device, SeqSpan};

use super::repeats::{SPEC, rope, step};
use super::rig::{Rig, floats};

#[test]
fn recorded_steps_compute_what_steps_kernel_by_kernel_compute() {
    for arithmetic in [Arithmetic::Reproducible, Arithmetic::Fast] {
        let rig = Rig::computing(arithmetic);
        let run = |recorded: bool| {
            let device = &rig.device;
            let pool = device.alloc_kv_pool(SPEC).unwrap();
            let rope = rope(device, 64);
            let (mut x, mut out) = (device.alloc(32).unwrap(), device.alloc(32).unwrap());
            let tables: [Vec<u32>; 2] = [(0..16).collect(), (16..32).rev().collect()];
            let mut all = Vec::new();
            for position in 0..24 {
                device.write(&mut x, 0, &floats(position, 32)).unwrap();
                // The second sequence is four tokens behind.
                let at = [position as u32, position as u32 + 4];
                let seqs: Vec<SeqSpan<'_>> =
                    at.iter().zip(&tables).map(|(start, pages)| SeqSpan { start: *start, len: 1, pages }).collect();
                let plan = device.plan(&*pool, &seqs).unwrap();
                if recorded {
                    device.repeat(1, &plan, &mut |plan| step(device, &*pool, plan, &rope, &mut x, &mut out)).unwrap();
                } else {
                    step(device, &*pool, &plan, &rope, &mut x, &mut out).unwrap();
                }
                let mut values = [0.0; 32];
                device.read(&x, 0, &mut values).unwrap();
                all.extend(values.map(f32::to_bits));
            }
            all
        };
        let expected = run(false);
        let launched = rig.fake.launched().len();
        assert_eq!(run(true), expected, "{arithmetic:?}");
        assert_eq!(rig.fake.launched().len(), 2 * launched, "the same kernels run");
        assert!(rig.fake.count("launch_graph") >= 20, "{}", rig.fake.count("launch_graph"));
        assert_eq!(rig.fake.count("launch_graph"), 24 - 2);
        rig.end();
    }
}
