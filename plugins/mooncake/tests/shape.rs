//! Which ranges of an object a layer is.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "common/described.rs"]
mod described;

use described::described;
use kvdock_plugin_api::Dtype;
use kvdock_plugin_api::mock::{KvShape, PoolSpec};
use kvdock_plugin_mooncake::names::Names;
use kvdock_plugin_mooncake::store::shape::{PoolShape, SpanPlan, Want};

const LAYERS: u32 = 3;

fn shape(spec: &PoolSpec) -> PoolShape {
    let pool = described(spec, false);
    PoolShape::new(&pool, Names::new("", &[1; 32]).objects(&pool).unwrap(), false)
}

fn kv(layout: &str, head_dim: u32) -> PoolSpec {
    let shape = KvShape { pages: 4, page_tokens: 4, layers: LAYERS, heads: 4, head_dim, dtype: Dtype::F16 };
    PoolSpec::kv(0, "kv", layout, shape).with_seal(64)
}

/// Offsets and lengths of the spans of each step of a page's one object.
fn steps(shape: &PoolShape, want: &Want) -> Vec<Vec<(u64, u64)>> {
    let plans = shape.plans(want);
    let [plan] = plans.as_slice() else { panic!("a page is one object") };
    let of = |spans: &Vec<SpanPlan>| {
        spans
            .iter()
            .map(|span| {
                assert_eq!(span.pieces.iter().map(|piece| piece.len).sum::<u64>(), span.len);
                (span.offset, span.len)
            })
            .collect()
    };
    plan.iter().map(of).collect()
}

#[test]
fn the_steps_of_a_load_tile_the_object_in_every_layout() {
    let all = Want::Steps { steps: LAYERS as usize, layers: None };
    for layout in ["layer_first", "page_first", "page_first_direct", "page_head"] {
        for head_dim in [8, 512] {
            let shape = shape(&kv(layout, head_dim));
            let plan = steps(&shape, &all);
            assert_eq!(plan.len(), LAYERS as usize);
            let mut spans: Vec<(u64, u64)> = plan.into_iter().flatten().collect();
            spans.sort_unstable();
            let mut end = 0;
            for (offset, len) in spans {
                assert_eq!(offset, end, "{layout} {head_dim}: no gap, nothing twice");
                end = offset + len;
            }
            assert_eq!(end, shape.objects[0].len, "{layout} {head_dim}");
        }
    }
}

#[test]
fn a_layer_in_one_run_is_one_range_a_plane_and_the_seal_comes_first() {
    let shape = shape(&kv("page_first_direct", 8));
    // A layer of a plane has 4 tokens of 64 bytes, a plane 768, then comes the seal.
    let plan = steps(&shape, &Want::Steps { steps: 3, layers: None });
    assert_eq!(plan[0], [(0, 256), (768, 256), (1536, 64)]);
    assert_eq!(plan[1], [(256, 256), (1024, 256)]);
    assert_eq!(plan[2], [(512, 256), (1280, 256)]);
    let one = steps(&shape, &Want::Steps { steps: 3, layers: Some(1..2) });
    assert_eq!(one, [vec![(1536, 64)], vec![(256, 256), (1024, 256)], vec![]]);
}

#[test]
fn a_layer_in_many_short_runs_is_read_with_the_others() {
    let short = shape(&kv("page_first", 8));
    let whole = short.objects[0].len;
    assert_eq!(steps(&short, &Want::Steps { steps: 3, layers: None }), [vec![(0, whole)], vec![], vec![]]);
    // Who asks for one layer gets its runs alone.
    let one = steps(&short, &Want::Layers(1..2));
    assert_eq!(one[0].len(), 2 * 4 + 1);
    assert_eq!(one[0][0], (64, 64));
    // Long runs are worth a request each.
    let long = shape(&kv("page_first", 2048));
    assert!(steps(&long, &Want::Steps { steps: 3, layers: None }).iter().all(|spans| spans.len() >= 8));
}

#[test]
fn what_belongs_to_no_layer_comes_with_the_first_step() {
    let shape = shape(&PoolSpec::bytes(1, "state", 4, &[100, 28]));
    assert_eq!(steps(&shape, &Want::Steps { steps: 3, layers: None }), [vec![(0, 128)], vec![], vec![]]);
    assert_eq!(steps(&shape, &Want::Layers(0..3)), [vec![]]);
    assert_eq!(steps(&shape, &Want::Whole), [[(0, 128)]]);
}
