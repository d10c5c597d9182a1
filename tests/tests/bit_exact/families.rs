//! The same for models beyond the dense ones, small ones of random weights: of pages of several pools, windows, and recurrent states.

use std::path::Path;

use kvdock_models::testing::{Fixture, TinyKind, TinyModel, token_ids};

use super::rig::{Loaded, Rig, Rows, Setup, Tier, Wrap};

/// Whole pages of a prompt.
const PAGES: usize = 5;
const NEW: u32 = 5;

/// A tiny model of a family.
pub struct Family {
    name: &'static str,
    model: Loaded,
    /// Going on from a page needs a state that was left exactly there.
    pub recurrent: bool,
}

impl Family {
    pub fn new(name: &'static str) -> Self {
        Self::over_ranks(name, (1, 1))
    }

    /// The same over so many tensor-parallel times so many context-parallel ranks. `dense` is a dense one.
    pub fn over_ranks(name: &'static str, ranks: (usize, usize)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        match name {
            "dense" => TinyModel::new(TinyKind::Qwen3).write_hf(folder.path()).unwrap(),
            name => Fixture::new(name).expect("a fixture").write(folder.path()).unwrap(),
        }
        // Windows of 16 tokens are to be more than one page.
        let page = if matches!(name, "gpt_oss" | "mimo") { 4 } else { 16 };
        let model = Loaded::over_ranks(folder.path(), page, ranks);
        Family { name, model, recurrent: name.starts_with("qwen3_next") || name == "qwen3_5" }
    }

    pub fn page(&self) -> usize {
        self.model.page
    }

    pub fn ids(&self, what: &str, count: usize) -> Vec<u32> {
        token_ids(&format!("{} {what}", self.name), count, self.model.vocab())
    }

    /// An engine with these settings, which asks storage for every page.
    pub fn start(&self, setup: Setup<'_>) -> Rig {
        Rig::of(&self.model, Setup { threshold: self.page(), ..setup })
    }

    /// As `start`, with something between the cache and its store.
    pub fn start_over(&self, setup: Setup<'_>, wrap: impl Wrap) -> Rig {
        Rig::over(&self.model, Setup { threshold: self.page(), ..setup }, wrap)
    }

    pub fn tokens(&self, pages: usize) -> u32 {
        u32::try_from(pages * self.page()).unwrap()
    }
}

fn every_tier_gives_the_same_bits(name: &'static str) {
    every_tier_gives_the_same_bits_over(name, (1, 1));
}

/// Over tensor-parallel times context-parallel ranks; the bits are those without the latter.
pub fn every_tier_gives_the_same_bits_over(name: &'static str, ranks: (usize, usize)) {
    let family = Family::over_ranks(name, ranks);
    let page = family.page();
    let whole = family.tokens(PAGES);
    let prompt = family.ids("prompt", PAGES * page + 3);
    // Two whole pages are shared, and a part of the next.
    let mut branch = prompt.clone();
    branch.splice(2 * page + page / 2.., family.ids("branch", 2 * page));
    let mut other_branch = prompt.clone();
    other_branch.splice(2 * page + 1.., family.ids("other branch", page));
    let mut reference: Option<(Rows, Rows)> = (ranks.1 > 1).then(|| {
        let rig = Family::over_ranks(name, (ranks.0, 1)).start(Setup { chunk: 4096, ..Setup::default() });
        let alone = (rig.run("cold", &prompt, NEW, None).rows, rig.run("apart", &branch, NEW, Some("apart")).rows);
        rig.stop();
        alone
    });
    for chunk in [page + 5, 4096] {
        let storage = tempfile::tempdir().unwrap();
        let start = |storage: &Path| family.start(Setup { chunk, folder: Some(storage), ..Setup::default() });
        let rig = start(storage.path());
        let cold = rig.run("cold", &prompt, NEW, None);
        cold.came_from(Tier::Nowhere, 0);
        let apart = rig.run("apart", &branch, NEW, Some("apart"));
        apart.came_from(Tier::Nowhere, 0);
        let (first, second) = reference.get_or_insert((cold.rows.clone(), apart.rows.clone()));
        let told = |what: &str| format!("{name}, {ranks:?} ranks, {what}, chunks of {chunk}");
        first.must_equal(&cold.rows, &told("cold"));
        second.must_equal(&apart.rows, &told("a branch, cold"));
        let shared = rig.run("shared", &branch, NEW, None);
        match family.recurrent {
            // Nobody knew that somebody would branch off there.
            true => shared.came_from(Tier::Nowhere, 0),
            false => shared.came_from(Tier::Device, family.tokens(2)),
        }
        second.must_equal(&shared.rows, &told("a branch after shared pages"));
        // By now something was left there in any case.
        rig.run("other", &other_branch, 1, None).came_from(Tier::Device, family.tokens(2));
        let device = rig.run("device", &prompt, NEW, None);
        device.came_from(Tier::Device, whole);
        first.must_equal(&device.rows, &told("from the device"));
        rig.empty_device();
        let host = rig.run("host", &prompt, NEW, None);
        host.came_from(Tier::Host, whole);
        first.must_equal(&host.rows, &told("from the host"));
        rig.check_integrity();
        rig.stop();

        let rig = start(storage.path());
        let stored = rig.run("storage", &prompt, NEW, None);
        stored.came_from(Tier::Storage, whole);
        first.must_equal(&stored.rows, &told("from storage"));
        let company = rig.run_in_company("company", &branch, NEW, Some("apart"));
        company.came_from(Tier::Storage, family.tokens(branch.len() / page));
        second.must_equal(&company.rows, &told("a branch from storage beside 7 others"));
        rig.empty_device();
        let company = rig.run_in_company("again", &branch, NEW, Some("apart"));
        company.came_from(Tier::Host, family.tokens(branch.len() / page));
        second.must_equal(&company.rows, &told("a branch from the host beside 7 others"));
        rig.check_integrity();
        rig.stop();
    }
}

/// A second turn goes on from all that the first one computed, also what it decoded, with a device that holds one request's pages and no more, and
/// a prompt of whole pages.
fn a_second_turn_comes_from_storage(name: &'static str) {
    let family = Family::new(name);
    let page = family.page();
    let new = page as u32 + 3;
    let prompt = family.ids("turn", PAGES * page);
    let storage = tempfile::tempdir().unwrap();
    let pages = 2 * PAGES + 4;
    let small = Setup {
        chunk: 2 * page,
        folder: Some(storage.path()),
        device_pages: pages,
        window_pages: pages.min(16),
        host_pages: pages as u32,
        states: 4,
        running: 1,
        ..Setup::default()
    };
    let rig = family.start(small);
    let first = rig.run("first", &prompt, new, None);
    first.came_from(Tier::Nowhere, 0);
    let history = [&prompt[..], &first.tokens[..]].concat();
    let turn = [&history[..], &family.ids("next", page)[..]].concat();
    let reference = {
        let rig = family.start(Setup::default());
        let cold = rig.run("cold", &turn, NEW, None);
        rig.stop();
        cold.rows
    };
    rig.empty_all();
    let second = rig.run("second", &turn, NEW, None);
    second.came_from(Tier::Storage, family.tokens((history.len() - 1) / page));
    reference.must_equal(&second.rows, &format!("{name}, a second turn"));
    // The first prompt again: its last token is computed for its logits, so its last page is not taken.
    rig.empty_all();
    let again = rig.run("again", &prompt, new, None);
    again.came_from(Tier::Storage, family.tokens((prompt.len() - 1) / page));
    first.rows.must_equal(&again.rows, &format!("{name}, the first turn again"));
    // Others drive it out of the device, so that it comes from storage or the host and never stays in part.
    for other in 0..3 {
        rig.run(&format!("other {other}"), &family.ids(&format!("other {other}"), PAGES * page + 1), 1, None);
    }
    rig.wait_written();
    let third = rig.run("third", &turn, NEW, None);
    assert!(third.cached() >= family.tokens((history.len() - 1) / page), "{name}: {}", third.cached());
    reference.must_equal(&third.rows, &format!("{name}, a second turn after others"));
    rig.check_integrity();
    rig.stop();
    // After a restart.
    let rig = family.start(small);
    let restarted = rig.run("restarted", &turn, NEW, None);
    assert!(restarted.cached() >= family.tokens((history.len() - 1) / page));
    reference.must_equal(&restarted.rows, &format!("{name}, a second turn after a restart"));
    rig.check_integrity();
    rig.stop();
}

/// A sequence several times as long as the window pool: pages that slide out of the window make room for the next.
#[test]
fn windows_slide_over_a_sequence_longer_than_their_pool() {
    for name in ["gpt_oss", "mimo"] {
        let family = Family::new(name);
        let page = family.page();
        let (prompt, new) = (family.ids("long", 40 * page + 1), 6 * page as u32);
        let reference = {
            let rig = family.start(Setup::default());
            let cold = rig.run("cold", &prompt, new, None);
            rig.stop();
            cold
        };
        let rig = family.start(Setup { chunk: 3 * page, window_pages: 14, running: 1, ..Setup::default() });
        let run = rig.run("sliding", &prompt, new, None);
        run.came_from(Tier::Nowhere, 0);
        reference.rows.must_equal(&run.rows, &format!("{name}, with 14 window pages for 46"));
        rig.check_integrity();
        // The window before the end is still there.
        let history = [&prompt[..], &run.tokens[..]].concat();
        let next = rig.run("next", &history, 1, None);
        next.came_from(Tier::Device, family.tokens((history.len() - 1) / page));
        rig.check_integrity();
        rig.stop();
    }
}

macro_rules! families {
    ($($family:ident: $($name:literal),+;)+) => {
        $(mod $family {
            #[test]
            fn every_tier_gives_the_same_bits() {
                $(super::every_tier_gives_the_same_bits($name);)+
            }

            #[test]
            fn a_second_turn_comes_from_storage() {
                $(super::a_second_turn_comes_from_storage($name);)+
            }
        })+
    };
}

families! {
    mixture_of_experts: "qwen3_moe";
    windows_with_full_attention: "gpt_oss", "mimo";
    latents_with_a_sparse_indexer: "glm_dsa", "deepseek_v32";
    compressed_rows_windows_and_rings: "dsv4", "dsv4q";
    recurrent_states: "qwen3_next", "qwen3_5";
}
