//! T24: page keys.

use super::*;
use crate::cache::hash::key_hex;

fn hex(rig: &Rig, node: NodeId) -> Vec<String> {
    rig.tree.key_path(node).unwrap().keys().iter().map(key_hex).collect()
}

#[test]
fn t24_keys_equal_the_vectors_wherever_nodes_are_cut() {
    const FIRST: &str = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";
    const SECOND: &str = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6";
    let sequence: Vec<u32> = (1..=8).collect();
    for known_before in [false, true] {
        let mut rig = Rig::new(|_| {});
        let node = rig.insert(&sequence);
        if known_before {
            assert_eq!(hex(&rig, node), [FIRST, SECOND]);
        }
        let head = rig.node_at(&sequence, 1);
        assert_eq!(hex(&rig, head), [FIRST]);
        assert_eq!(hex(&rig, node), [FIRST, SECOND], "the chain goes on from the part before");
    }
}

#[test]
fn t24_keys_of_a_namespace_start_from_its_seed() {
    let mut rig = Rig::new(|_| {});
    let name = CacheNamespace::new(Some("lora".to_owned()), Some("salt".to_owned()));
    let root = rig.tree.root(&name);
    let node = rig.insert_from(root, &[1, 2, 3, 4], 0, None).node;
    assert_eq!(hex(&rig, node), ["d3b4dae71b3d4f13bb7ffa8a2381edd370df15ee3af98cc7c97c248f307c7336"]);
}

#[test]
fn t24_keys_of_bigrams_take_both_tokens_of_each_pair() {
    let mut rig = Rig::new(|config| config.units = Units::Bigrams);
    let sequence: Vec<u32> = (1..=9).collect();
    let node = rig.insert(&sequence);
    let whole = hex(&rig, node);
    assert_eq!(whole[0], "f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f");
    let mut rig = Rig::new(|config| config.units = Units::Bigrams);
    let node = rig.insert(&sequence);
    let head = rig.node_at(&sequence, 1);
    assert_eq!((hex(&rig, head), hex(&rig, node)), (whole[..1].to_vec(), whole));
    rig.tree.merge_up(node).unwrap();
    assert_eq!(rig.tree.node_count(), 1);
}

#[test]
fn settings_that_cannot_be_used_are_refused() {
    let refusal = |change: fn(&mut TreeConfig)| {
        let mut config = TreeConfig::default();
        change(&mut config);
        Tree::new(config).unwrap_err().to_string()
    };
    assert_eq!(refusal(|config| config.page_size = 0), "cache tree: a page of 0 units: 1 to 2^32 - 1 are right");
    assert_eq!(refusal(|config| config.window = Some(0)), "cache tree: a window of 0 tokens: at least 1 is right");
    let grid = refusal(|config| config.states = Some(StateConfig { grid: 24, per_path: None }));
    assert_eq!(grid, "cache tree: states every 24 tokens: a multiple of the page (16) is right");
    assert_eq!(refusal(|config| config.write_back = true), "cache tree: write-back needs a host tier below the device");
}
