//! Models spread over tensor-parallel ranks: each rank stores its own pages under keys of its own, or one of them what all hold alike; a prefix
//! counts as far as every rank has it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::families::{Family, every_tier_gives_the_same_bits_over};
use super::rig::{Rig, Setup, Tier};

const PAGES: usize = 6;
const NEW: u32 = 3;

#[test]
fn every_tier_gives_the_same_bits_on_two_ranks() {
    for name in ["dense", "qwen3_moe", "gpt_oss", "glm_dsa", "dsv4", "qwen3_next"] {
        every_tier_gives_the_same_bits_over(name, (2, 1));
    }
}

#[test]
fn every_tier_gives_the_same_bits_on_four_ranks() {
    for name in ["dense", "mimo", "deepseek_v32"] {
        every_tier_gives_the_same_bits_over(name, (4, 1));
    }
}

/// The folders of the namespaces in a store, with the tensor-parallel rank and the number of ranks that each was written for.
pub fn namespaces(store: &Path) -> Vec<((u64, u64), PathBuf)> {
    let folders = fs::read_dir(store).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = folders
        .filter_map(|folder| {
            let text = fs::read(folder.join("namespace.json")).ok()?;
            let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
            let tp = json.pointer("/tp").or_else(|| json.pointer("/namespace/tp")).expect("the ranks are told");
            Some(((tp[0].as_u64().unwrap(), tp[1].as_u64().unwrap()), folder))
        })
        .collect();
    found.sort();
    found
}

fn ranks_of(store: &Path) -> Vec<(u64, u64)> {
    namespaces(store).into_iter().map(|(tp, _)| tp).collect()
}

/// The packs below a folder that hold something.
pub fn packs(folder: &Path) -> Vec<PathBuf> {
    let packs = fs::read_dir(folder.join("packs")).unwrap().map(|entry| entry.unwrap().path());
    packs.filter(|pack| pack.metadata().unwrap().len() > 4096).collect()
}

pub fn start(family: &Family, store: &Path) -> Rig {
    family.start(Setup { folder: Some(store), ..Setup::default() })
}

#[test]
fn keys_tell_ranks_apart_where_their_bytes_differ() {
    for (name, ranks, expected) in [
        ("dense", 2, vec![(0, 2), (1, 2)]),
        ("dense", 4, vec![(0, 4), (1, 4), (2, 4), (3, 4)]),
        // Latents and index keys are the same on all ranks: one of them writes, all read.
        ("glm_dsa", 2, vec![(0, 2)]),
    ] {
        let family = Family::over_ranks(name, (ranks, 1));
        let store = tempfile::tempdir().unwrap();
        let rig = start(&family, store.path());
        let prompt = family.ids("prompt", PAGES * family.page() + 2);
        rig.run("cold", &prompt, NEW, None).came_from(Tier::Nowhere, 0);
        rig.stop();
        let written: Vec<_> =
            namespaces(store.path()).into_iter().filter(|(_, folder)| !packs(folder).is_empty()).collect();
        let written: Vec<(u64, u64)> = written.into_iter().map(|(tp, _)| tp).collect();
        assert_eq!(written, expected, "{name} over {ranks}");
    }
}

#[test]
fn pages_of_one_number_of_ranks_are_never_read_by_another() {
    let store = tempfile::tempdir().unwrap();
    let mut tokens = BTreeSet::new();
    for ranks in [1, 2, 4] {
        let family = Family::over_ranks("dense", (ranks, 1));
        let prompt = family.ids("prompt", PAGES * family.page() + 2);
        let rig = start(&family, store.path());
        let cold = rig.run("cold", &prompt, NEW, None);
        cold.came_from(Tier::Nowhere, 0);
        tokens.insert(cold.tokens);
        rig.stop();
    }
    assert_eq!(tokens.len(), 1, "they answer alike all the same");
    assert_eq!(ranks_of(store.path()), [(0, 1), (0, 2), (0, 4), (1, 2), (1, 4), (2, 4), (3, 4)]);
}

/// Loses or damages pages of rank 1 alone, and asks again after a restart.
fn with_pages_of_one_rank(harm: impl Fn(&Path)) {
    let family = Family::over_ranks("dense", (2, 1));
    let store = tempfile::tempdir().unwrap();
    let prompt = family.ids("prompt", PAGES * family.page() + 2);
    let whole = u32::try_from(PAGES * family.page()).unwrap();
    let rig = start(&family, store.path());
    let cold = rig.run("cold", &prompt, NEW, None);
    rig.stop();
    let (tp, folder) = namespaces(store.path()).pop().unwrap();
    assert_eq!(tp, (1, 2));
    let packs = packs(&folder);
    assert!(!packs.is_empty());
    packs.iter().for_each(|pack| harm(pack));
    let rig = start(&family, store.path());
    let harmed = rig.run("harmed", &prompt, NEW, None);
    cold.rows.must_equal(&harmed.rows, "with pages of one rank gone");
    assert!(harmed.cached() < whole, "what one rank misses no rank takes: {} tokens", harmed.cached());
    rig.empty_all();
    // What was computed again has been stored again, on every rank.
    let healed = rig.run("healed", &prompt, NEW, None);
    healed.came_from(Tier::Storage, whole);
    cold.rows.must_equal(&healed.rows, "after its pages were stored again");
    rig.check_integrity();
    rig.stop();
}

#[test]
fn a_prefix_is_as_long_as_on_the_rank_that_has_least_of_it() {
    with_pages_of_one_rank(|pack| {
        let file = fs::OpenOptions::new().write(true).open(pack).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    });
}

#[test]
fn a_page_that_is_damaged_on_one_rank_is_computed_on_all() {
    with_pages_of_one_rank(|pack| {
        let mut bytes = fs::read(pack).unwrap();
        let half = bytes.len() / 2;
        bytes[half..].iter_mut().step_by(512).for_each(|byte| *byte ^= 0xa5);
        fs::write(pack, bytes).unwrap();
    });
}

#[test]
fn a_store_that_one_rank_has_lost_is_asked_for_nothing_more() {
    with_pages_of_one_rank(|pack| fs::remove_file(pack).unwrap());
}

/// In linker mode a layer is there when it is on every rank, and a page is right when it is right on each.
#[test]
fn l03_layers_come_to_several_ranks_with_the_same_bits() {
    let families =
        [("dense", 2), ("dense", 4), ("qwen3_moe", 2), ("glm_dsa", 2), ("gpt_oss", 2), ("dsv4", 2), ("qwen3_next", 2)];
    layers_come_with_the_same_bits(&families.map(|(name, ranks)| (name, (ranks, 1))));
}

/// For each family and its ranks.
pub fn layers_come_with_the_same_bits(families: &[(&'static str, (usize, usize))]) {
    for &(name, ranks) in families {
        let family = Family::over_ranks(name, ranks);
        let store = tempfile::tempdir().unwrap();
        let start = || family.start(Setup { folder: Some(store.path()), linked: true, ..Setup::default() });
        let prompt = family.ids("prompt", PAGES * family.page() + 2);
        let whole = u32::try_from(PAGES * family.page()).unwrap();
        let rig = start();
        let cold = rig.run("cold", &prompt, NEW, None);
        cold.came_from(Tier::Nowhere, 0);
        rig.wait_written();
        rig.empty_device();
        let loaded = rig.run("loaded", &prompt, NEW, None);
        loaded.came_from(Tier::Storage, whole);
        cold.rows.must_equal(&loaded.rows, &format!("{name} over {ranks:?} ranks, layer by layer"));
        rig.check_integrity();
        rig.stop();
        let rig = start();
        let restarted = rig.run("restarted", &prompt, NEW, None);
        restarted.came_from(Tier::Storage, whole);
        cold.rows.must_equal(&restarted.rows, &format!("{name} over {ranks:?} ranks, after a restart"));
        let company = rig.run_in_company("company", &prompt, NEW, None);
        cold.rows.must_equal(&company.rows, &format!("{name} over {ranks:?} ranks, beside 7 others"));
        rig.check_integrity();
        rig.stop();
    }
}

/// The same with pages of one rank damaged: the tail is computed again on all.
#[test]
fn l37_pages_that_are_bad_on_one_rank_are_computed_on_all_in_linker_mode() {
    let family = Family::over_ranks("dense", (2, 1));
    let store = tempfile::tempdir().unwrap();
    let start = || family.start(Setup { folder: Some(store.path()), linked: true, ..Setup::default() });
    let prompt = family.ids("prompt", PAGES * family.page() + 2);
    let rig = start();
    let cold = rig.run("cold", &prompt, NEW, None);
    rig.stop();
    let (tp, folder) = namespaces(store.path()).pop().unwrap();
    assert_eq!(tp, (1, 2));
    for pack in packs(&folder) {
        let mut bytes = fs::read(&pack).unwrap();
        let half = bytes.len() / 2;
        bytes[half..].iter_mut().step_by(512).for_each(|byte| *byte ^= 0xa5);
        fs::write(pack, bytes).unwrap();
    }
    let rig = start();
    let harmed = rig.run("harmed", &prompt, NEW, None);
    cold.rows.must_equal(&harmed.rows, "with pages of one rank damaged");
    assert!(harmed.cached() < u32::try_from(PAGES * family.page()).unwrap());
    rig.check_integrity();
    rig.stop();
}
