//! Models whose passes are dealt out among context-parallel ranks: each tier gives the bits of one rank, and of what all ranks hold alike one copy is
//! stored, which all read.

use std::fs;

use super::families::{Family, every_tier_gives_the_same_bits_over};
use super::ranks::{layers_come_with_the_same_bits, namespaces, packs, start};
use super::rig::{Setup, Tier};

const PAGES: usize = 6;
const NEW: u32 = 3;

#[test]
fn every_tier_gives_the_bits_of_one_rank_on_two_context_parallel_ranks() {
    for name in ["dense", "qwen3_moe", "gpt_oss", "glm_dsa", "dsv4", "qwen3_next"] {
        every_tier_gives_the_same_bits_over(name, (1, 2));
    }
}

#[test]
fn every_tier_gives_the_bits_of_one_rank_on_four_context_parallel_ranks() {
    for name in ["dense", "mimo", "deepseek_v32"] {
        every_tier_gives_the_same_bits_over(name, (1, 4));
    }
}

/// Two shares of the model, each on two ranks.
#[test]
fn every_tier_gives_the_bits_of_two_ranks_on_two_times_two() {
    for name in ["dense", "gpt_oss", "dsv4"] {
        every_tier_gives_the_same_bits_over(name, (2, 2));
    }
}

#[test]
fn layers_come_to_context_parallel_ranks_with_the_same_bits() {
    let (two, four, both) = ((1, 2), (1, 4), (2, 2));
    layers_come_with_the_same_bits(&[
        ("dense", two),
        ("dense", four),
        ("dense", both),
        ("qwen3_moe", two),
        ("glm_dsa", two),
        ("gpt_oss", two),
        ("dsv4", two),
        ("qwen3_next", two),
    ]);
}

#[test]
fn of_ranks_that_hold_the_same_one_stores_under_keys_that_name_their_number() {
    for (name, ranks, expected) in [
        ("dense", (1, 2), vec![(0, 1)]),
        ("dense", (1, 4), vec![(0, 1)]),
        ("dense", (2, 2), vec![(0, 2), (1, 2)]),
        // Latents and index keys are the same on all four.
        ("glm_dsa", (2, 2), vec![(0, 2)]),
    ] {
        let family = Family::over_ranks(name, ranks);
        let store = tempfile::tempdir().unwrap();
        let rig = start(&family, store.path());
        let prompt = family.ids("prompt", PAGES * family.page() + 2);
        rig.run("cold", &prompt, NEW, None).came_from(Tier::Nowhere, 0);
        rig.stop();
        let written = namespaces(store.path());
        let found: Vec<(u64, u64)> = written.iter().map(|(tp, _)| *tp).collect();
        assert_eq!(found, expected, "{name} over {ranks:?}");
        for (_, folder) in written {
            assert!(!packs(&folder).is_empty(), "{name} over {ranks:?}");
            let json: serde_json::Value =
                serde_json::from_slice(&fs::read(folder.join("namespace.json")).unwrap()).unwrap();
            let cp = json.pointer("/cp").or_else(|| json.pointer("/namespace/cp")).expect("the ranks are told");
            assert_eq!(*cp, serde_json::json!([0, ranks.1]), "{name} over {ranks:?}");
        }
    }
}

/// Bytes that one namespace has in its packs.
fn stored(folder: &std::path::Path) -> u64 {
    packs(folder).iter().map(|pack| pack.metadata().unwrap().len()).sum()
}

#[test]
fn no_page_is_stored_twice() {
    let bytes = |ranks: (usize, usize)| {
        let family = Family::over_ranks("dense", ranks);
        let store = tempfile::tempdir().unwrap();
        let rig = start(&family, store.path());
        let prompt = family.ids("prompt", 40 * family.page());
        rig.run("cold", &prompt, NEW, None);
        rig.wait_written();
        rig.stop();
        namespaces(store.path()).iter().map(|(_, folder)| stored(folder)).sum::<u64>()
    };
    let (four, one) = (bytes((1, 4)), bytes((1, 1)));
    assert!(four < one * 3 / 2, "four ranks store {four} bytes, one {one}");
}

/// Pages that are cut off or damaged on the way are so for every rank that reads them.
#[test]
fn pages_that_are_damaged_are_computed_on_all_ranks() {
    let harm = |pack: &std::path::Path, cut: bool| {
        let mut bytes = fs::read(pack).unwrap();
        let half = bytes.len() / 2;
        match cut {
            true => bytes.truncate(half),
            false => bytes[half..].iter_mut().step_by(512).for_each(|byte| *byte ^= 0xa5),
        }
        fs::write(pack, bytes).unwrap();
    };
    for (linked, cut) in [(false, true), (false, false), (true, false)] {
        let family = Family::over_ranks("dense", (1, 2));
        let store = tempfile::tempdir().unwrap();
        let start = || family.start(Setup { folder: Some(store.path()), linked, ..Setup::default() });
        let prompt = family.ids("prompt", PAGES * family.page() + 2);
        let rig = start();
        let cold = rig.run("cold", &prompt, NEW, None);
        rig.stop();
        for (_, folder) in namespaces(store.path()) {
            packs(&folder).iter().for_each(|pack| harm(pack, cut));
        }
        let rig = start();
        let harmed = rig.run("harmed", &prompt, NEW, None);
        cold.rows.must_equal(&harmed.rows, &format!("damaged, linked: {linked}"));
        assert!(harmed.cached() < u32::try_from(PAGES * family.page()).unwrap());
        rig.check_integrity();
        rig.stop();
    }
}
