//! Reuse is exact: a prompt gives the same logits, bit for bit, whether its prefix is computed, found on the device,
//! brought back from the host or from storage, in whatever chunks, and whatever else runs beside it.

// A test that cannot go on panics: that is how it fails.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../../kernels/cuda/tests/device/clocks.rs"]
#[allow(dead_code)]
mod clocks;
mod context;
mod direct;
#[path = "../../../kernels/cuda/tests/device/emulated.rs"]
#[allow(dead_code)]
mod emulated;
#[path = "../../../kernels/cuda/tests/device/fake.rs"]
#[allow(dead_code)]
mod fake;
mod families;
mod faults;
mod gpu;
mod linked;
mod ranks;
mod rig;
#[path = "../../../kernels/cuda/tests/device/state.rs"]
#[allow(dead_code)]
mod state;

use kvdock_tests::prompt;

use rig::{Rig, Rows, Tier};

/// Tokens of the prompt: 93 whole pages of 16, and 12 more.
const TOKENS: usize = 1500;
/// Tokens of its whole pages.
const WHOLE: u32 = 1488;
/// Tokens generated, so that decode over reused pages is compared too.
const NEW: u32 = 4;

#[test]
fn logits_are_the_same_from_every_tier_in_every_chunking_alone_and_in_company() {
    let mut reference: Option<Rows> = None;
    for chunk in [512, 16, 64, 4096] {
        let storage = tempfile::tempdir().unwrap();
        let mut check = |what: &str, rows: Rows| match &reference {
            None => reference = Some(rows),
            Some(reference) => reference.must_equal(&rows, &format!("{what}, chunks of {chunk}")),
        };

        let rig = Rig::start(chunk, storage.path());
        let alone = rig.run("cold", &prompt::ids(90, TOKENS), NEW, None);
        alone.came_from(Tier::Nowhere, 0);
        check("cold", alone.rows);
        let device = rig.run("device", &prompt::ids(90, TOKENS), NEW, None);
        device.came_from(Tier::Device, WHOLE);
        check("from the device", device.rows);
        rig.empty_device();
        let host = rig.run("host", &prompt::ids(90, TOKENS), NEW, None);
        host.came_from(Tier::Host, WHOLE);
        check("from the host", host.rows);
        // Another salt finds nothing, so this one is computed again.
        let busy = rig.run_in_company("busy-cold", &prompt::ids(90, TOKENS), NEW, Some("busy"));
        busy.came_from(Tier::Nowhere, 0);
        check("cold beside 7 others", busy.rows);
        let busy = rig.run_in_company("busy-device", &prompt::ids(90, TOKENS), NEW, Some("busy"));
        busy.came_from(Tier::Device, WHOLE);
        check("from the device beside 7 others", busy.rows);
        rig.check_integrity();
        rig.stop();

        let rig = Rig::start(chunk, storage.path());
        let stored = rig.run("storage", &prompt::ids(90, TOKENS), NEW, None);
        stored.came_from(Tier::Storage, WHOLE);
        check("from storage", stored.rows);
        let busy = rig.run_in_company("busy-storage", &prompt::ids(90, TOKENS), NEW, Some("busy"));
        busy.came_from(Tier::Storage, WHOLE);
        check("from storage beside 7 others", busy.rows);
        rig.empty_device();
        let busy = rig.run_in_company("busy-host", &prompt::ids(90, TOKENS), NEW, None);
        busy.came_from(Tier::Host, WHOLE);
        check("from the host beside 7 others", busy.rows);
        rig.check_integrity();
        rig.stop();
    }
}

#[test]
fn a_prompt_that_shares_half_its_pages_is_exact_too() {
    let storage = tempfile::tempdir().unwrap();
    let rig = Rig::start(64, storage.path());
    let first = prompt::ids(91, 300);
    let mut second = first.clone();
    second.splice(160.., prompt::ids(92, 140));
    let cold = rig.run("cold", &second, NEW, Some("alone"));
    cold.came_from(Tier::Nowhere, 0);
    rig.run("first", &first, NEW, None);
    let shared = rig.run("second", &second, NEW, None);
    shared.came_from(Tier::Device, 160);
    cold.rows.must_equal(&shared.rows, "after a shared half");
    rig.check_integrity();
    rig.stop();
}

/// Layers come while the forward runs. Whatever that is beside, the bits are those of computing.
#[test]
fn logits_are_the_same_when_layers_come_from_storage_while_they_are_needed() {
    let mut reference: Option<Rows> = None;
    for chunk in [512, 64, 4096] {
        let storage = tempfile::tempdir().unwrap();
        let mut check = |what: &str, rows: Rows| match &reference {
            None => reference = Some(rows),
            Some(reference) => reference.must_equal(&rows, &format!("{what}, chunks of {chunk}")),
        };
        let prompt = prompt::ids(90, TOKENS);
        let rig = Rig::start_linked(chunk, storage.path());
        let cold = rig.run("cold", &prompt, NEW, None);
        cold.came_from(Tier::Nowhere, 0);
        check("cold", cold.rows);
        rig.wait_stored(u64::from(WHOLE) / 16);
        rig.empty_device();
        let alone = rig.run("storage", &prompt, NEW, None);
        alone.came_from(Tier::Storage, WHOLE);
        check("from storage", alone.rows);
        let device = rig.run("device", &prompt, NEW, None);
        device.came_from(Tier::Device, WHOLE);
        check("from the device", device.rows);
        rig.empty_device();
        let busy = rig.run_in_company("busy", &prompt, NEW, None);
        busy.came_from(Tier::Storage, WHOLE);
        check("from storage beside 7 others", busy.rows);
        rig.check_integrity();
        rig.stop();

        let rig = Rig::start_linked(chunk, storage.path());
        let again = rig.run("restart", &prompt, NEW, None);
        again.came_from(Tier::Storage, WHOLE);
        check("from storage after a restart", again.rows);
        rig.check_integrity();
        rig.stop();
    }
}

#[test]
fn different_prompts_have_different_logits() {
    let storage = tempfile::tempdir().unwrap();
    let rig = Rig::start(64, storage.path());
    let one = rig.run("one", &prompt::ids(93, 100), 1, None);
    let two = rig.run("two", &prompt::ids(94, 100), 1, None);
    assert!(one.rows.difference(&two.rows).is_some(), "the comparison can tell logits apart");
    rig.stop();
}
