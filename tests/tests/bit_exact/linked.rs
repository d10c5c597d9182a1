//! Linker mode for every family: what comes layer by layer, windows and recurrent states too, gives the bits of computing; and so does what
//! does not come.

use std::path::Path;
use std::sync::atomic::Ordering;

use kvdock::plugin::backend::PoolGroup;

use super::families::Family;
use super::faults::{Fault, Ordered, case, faults_in};
use super::rig::{Rig, Rows, Setup, Tier};

/// Whole pages of a prompt.
const PAGES: usize = 5;
const NEW: u32 = 5;

fn linked(folder: Option<&Path>) -> Setup<'_> {
    Setup { folder, linked: true, ..Setup::default() }
}

fn layer_by_layer_gives_the_same_bits(name: &'static str) {
    let family = Family::new(name);
    let page = family.page();
    let whole = family.tokens(PAGES);
    let prompt = family.ids("prompt", PAGES * page + 3);
    let mut branch = prompt.clone();
    branch.splice(2 * page + page / 2.., family.ids("branch", 2 * page));
    let mut other_branch = prompt.clone();
    other_branch.splice(2 * page + 1.., family.ids("other branch", page));
    let mut reference: Option<(Rows, Rows)> = None;
    for chunk in [4096, page + 5] {
        let storage = tempfile::tempdir().unwrap();
        let start = || family.start(Setup { chunk, ..linked(Some(storage.path())) });
        let rig = start();
        let cold = rig.run("cold", &prompt, NEW, None);
        cold.came_from(Tier::Nowhere, 0);
        let apart = rig.run("apart", &branch, NEW, Some("apart"));
        apart.came_from(Tier::Nowhere, 0);
        let (first, second) = reference.get_or_insert((cold.rows.clone(), apart.rows.clone()));
        let told = |what: &str| format!("{name}, {what}, chunks of {chunk}");
        first.must_equal(&cold.rows, &told("cold"));
        second.must_equal(&apart.rows, &told("a branch, cold"));
        rig.empty_written();
        let stored = rig.run("storage", &prompt, NEW, None);
        stored.came_from(Tier::Storage, whole);
        first.must_equal(&stored.rows, &told("from storage"));
        let shared = rig.run("shared", &branch, NEW, None);
        match family.recurrent {
            // Nobody knew that somebody would branch off there.
            true => shared.came_from(Tier::Nowhere, 0),
            false => shared.came_from(Tier::Device, family.tokens(2)),
        }
        second.must_equal(&shared.rows, &told("a branch after shared pages"));
        rig.run("other", &other_branch, 1, None).came_from(Tier::Device, family.tokens(2));
        let device = rig.run("device", &prompt, NEW, None);
        device.came_from(Tier::Device, whole);
        first.must_equal(&device.rows, &told("from the device"));
        rig.empty_written();
        // What branches off there finds in storage what was left there meanwhile.
        let other = rig.run("other again", &other_branch, 1, None);
        other.came_from(Tier::Storage, family.tokens(other_branch.len() / page));
        rig.empty_written();
        let company = rig.run_in_company("company", &branch, NEW, Some("apart"));
        company.came_from(Tier::Storage, family.tokens(branch.len() / page));
        second.must_equal(&company.rows, &told("a branch from storage beside 7 others"));
        rig.check_integrity();
        rig.stop();

        let rig = start();
        let restarted = rig.run("restarted", &prompt, NEW, None);
        restarted.came_from(Tier::Storage, whole);
        first.must_equal(&restarted.rows, &told("from storage after a restart"));
        rig.assert_quiet();
        rig.stop();
    }
}

/// A device that holds one request's pages and no more, emptied between the turns: each turn comes from storage, up to the last whole page of the
/// history, also where the prompt is whole pages.
fn turns_come_from_storage_to_a_device_that_holds_one_request(name: &'static str) {
    let family = Family::new(name);
    let page = family.page();
    for rest in [0, page / 2 + 1] {
        let new = page as u32 + 3;
        let prompt = family.ids(&format!("turn {rest}"), PAGES * page + rest);
        let storage = tempfile::tempdir().unwrap();
        let pages = 2 * PAGES + 4;
        let small = Setup {
            chunk: 2 * page,
            device_pages: pages,
            window_pages: pages.min(16),
            host_pages: pages as u32,
            states: 4,
            running: 1,
            ..linked(Some(storage.path()))
        };
        let rig = family.start(small);
        let first = rig.run("first", &prompt, new, None);
        first.came_from(Tier::Nowhere, 0);
        let history = [&prompt[..], &first.tokens[..]].concat();
        // It ends at a page's end.
        let turn = [&history[..], &family.ids("next", 2 * page - history.len() % page)[..]].concat();
        let reference = {
            let rig = family.start(Setup::default());
            let cold = rig.run("cold", &turn, NEW, None);
            rig.stop();
            cold.rows
        };
        rig.empty_written();
        let second = rig.run("second", &turn, NEW, None);
        second.came_from(Tier::Storage, family.tokens((history.len() - 1) / page));
        reference.must_equal(&second.rows, &format!("{name}, a second turn"));
        // The first prompt again: its last token is computed for its logits.
        rig.empty_written();
        let again = rig.run("again", &prompt, new, None);
        again.came_from(Tier::Storage, family.tokens((prompt.len() - 1) / page));
        first.rows.must_equal(&again.rows, &format!("{name}, the first turn again"));
        for other in 0..3 {
            rig.run(&format!("other {other}"), &family.ids(&format!("other {other}"), PAGES * page + 1), 1, None);
        }
        rig.empty_written();
        let third = rig.run("third", &turn, NEW, None);
        third.came_from(Tier::Storage, family.tokens((turn.len() - 1) / page));
        reference.must_equal(&third.rows, &format!("{name}, a second turn after others"));
        rig.assert_quiet();
        rig.stop();
    }
}

/// A request goes before its load begins and while it runs; the device is emptied while another's runs. Who comes later gets the same bits, and
/// nothing is lost.
fn aborts_and_a_flush_in_the_middle_of_a_load(name: &'static str) {
    let family = Family::new(name);
    let page = family.page();
    let prompt = family.ids("abort", PAGES * page + 2);
    let other = family.ids("another", 3 * page + 1);
    let storage = tempfile::tempdir().unwrap();
    let (cold, beside) = {
        let rig = family.start(linked(Some(storage.path())));
        let cold = rig.run("cold", &prompt, NEW, None);
        let beside = rig.run("beside", &other, NEW, None);
        rig.stop();
        (cold.rows, beside.rows)
    };
    let ordered = Ordered::new(PoolGroup::Full, 0, Fault::Waits);
    ordered.hold.store(true, Ordering::SeqCst);
    let over = ordered.clone();
    // One runs at a time, so that the second waits with its load not begun.
    let setup = Setup { running: 1, ..linked(Some(storage.path())) };
    let rig = family.start_over(setup, move |inner, pools| over.over(inner, pools));
    let begun = rig.submit("begun", &prompt, NEW, None);
    let waiting = rig.submit("waiting", &other, NEW, None);
    ordered.wait_met();
    assert!(rig.abort("waiting") && rig.abort("begun"));
    assert!(rig.collect(begun).token_ids.is_empty() && rig.collect(waiting).token_ids.is_empty());
    let flushed = rig.submit("flushed", &prompt, NEW, None);
    rig.flush();
    rig.check_integrity();
    ordered.hold.store(false, Ordering::SeqCst);
    let flushed = rig.finish("flushed", flushed, prompt.len(), NEW);
    cold.must_equal(&flushed.rows, &format!("{name}, flushed while it was loaded"));
    let again = rig.run("again", &other, NEW, None);
    beside.must_equal(&again.rows, &format!("{name}, after an abort"));
    rig.assert_quiet();
    rig.stop();
}

macro_rules! families {
    ($($family:ident: $($name:literal),+;)+) => {
        $(mod $family {
            #[test]
            fn layer_by_layer_gives_the_same_bits() {
                $(super::layer_by_layer_gives_the_same_bits($name);)+
            }

            #[test]
            fn turns_come_from_storage_to_a_device_that_holds_one_request() {
                $(super::turns_come_from_storage_to_a_device_that_holds_one_request($name);)+
            }

            #[test]
            fn aborts_and_a_flush_in_the_middle_of_a_load() {
                $(super::aborts_and_a_flush_in_the_middle_of_a_load($name);)+
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

#[test]
fn faults_of_pages_of_all_tokens_are_computed_around() {
    use PoolGroup::Full;
    let last = PAGES - 1;
    faults_in(
        linked(None),
        &[
            case("glm_dsa", Full, 3, Fault::Changed("indexer"), 3),
            case("glm_dsa", Full, 2, Fault::Missing, 2),
            case("glm_dsa", Full, 2, Fault::Unknown, 2),
            case("glm_dsa", Full, 0, Fault::FailsAt(1), 0),
            case("deepseek_v32", Full, last, Fault::Changed("indexer"), last),
            case("deepseek_v32", Full, 1, Fault::Short, 1),
            case("deepseek_v32", Full, 0, Fault::Hangs, 0),
            case("qwen3_moe", Full, 0, Fault::FailsAt(0), 0),
        ],
    );
}

#[test]
fn l22_faults_of_windows_and_rings_are_computed_around() {
    use PoolGroup::{Full, Window};
    let last = PAGES - 1;
    faults_in(
        linked(None),
        &[
            case("dsv4", Full, 2, Fault::Changed("deepseek_v4_c4"), 2),
            case("dsv4", Window, last, Fault::Changed("swa"), last),
            case("dsv4", Window, last, Fault::Changed("deepseek_v4_c4_state"), last),
            case("dsv4", Window, last, Fault::Unknown, last),
            case("dsv4q", Window, last, Fault::Missing, last),
            case("dsv4", Full, 0, Fault::FailsAt(1), 0),
            case("dsv4", Full, 0, Fault::Hangs, 0),
            case("gpt_oss", Window, PAGES - 2, Fault::Changed("swa"), PAGES - 2),
            case("gpt_oss", Window, last, Fault::Missing, last),
            case("gpt_oss", Window, last, Fault::Unknown, last),
            case("gpt_oss", Window, PAGES - 2, Fault::Short, PAGES - 2),
            case("mimo", Full, 1, Fault::Missing, 1),
            case("mimo", Full, 0, Fault::FailsAt(0), 0),
        ],
    );
}

#[test]
fn l35_faults_of_recurrent_states_are_computed_around() {
    use PoolGroup::{Full, State};
    let last = PAGES - 1;
    faults_in(
        linked(None),
        &[
            case("qwen3_next", State, last, Fault::Changed("mamba"), 0),
            case("qwen3_next", State, last, Fault::Missing, 0),
            case("qwen3_next", State, last, Fault::Unknown, 0),
            case("qwen3_next", State, last, Fault::Short, 0),
            case("qwen3_next", Full, 1, Fault::Changed("kv"), 0),
            case("qwen3_next", Full, 0, Fault::FailsAt(1), 0),
            case("qwen3_5", Full, 0, Fault::FailsAt(0), 0),
            case("qwen3_5", Full, 0, Fault::Hangs, 0),
        ],
    );
}

impl Rig {
    /// Empties the device once storage has all that is to be stored.
    fn empty_written(&self) {
        self.wait_written();
        self.empty_device();
    }
}
