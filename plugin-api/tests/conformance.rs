//! The suite, run against the backend of the contract tests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use common::{KVDOCK_NOTE_SOURCE, kvdock_plugin_entry};
use kvdock_plugin_api::conformance::{Suite, rules};

#[test]
fn a_right_plugin_keeps_every_rule() {
    let report = Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).run();
    println!("{report}");
    report.assert_passed();
}

/// Which rules a fault of the backend breaks.
fn broken_by(config: serde_json::Value, rules: &str) -> Vec<&'static str> {
    let report = Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).config(config).only(rules).run();
    report.failed()
}

#[test]
fn a_fault_is_found_by_its_rule_whichever_rule_ran() {
    let panics = serde_json::json!({"panic_in_exists": "planted"});
    assert_eq!(broken_by(panics, "exists."), ["calls.panic"]);
    assert_eq!(broken_by(serde_json::json!({"fail_stats": "planted"}), "status."), ["status.stats"]);
    // What everything else stands on is all that is shown.
    assert_eq!(broken_by(serde_json::json!({"refuse_pools": true}), "data."), ["data.one_page"]);
}

#[test]
#[should_panic(expected = "status.stats")]
fn a_broken_rule_ends_the_test_of_an_author() {
    let config = serde_json::json!({"fail_stats": "planted"});
    Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE).config(config).only("status.stats").run().assert_passed();
}

#[test]
fn the_contract_lists_every_rule() {
    let page = include_str!("../ABI.md");
    let (_, table) = page.split_once("| rule | what a plugin promises | section |\n| --- | --- | --- |\n").unwrap();
    let listed: Vec<&str> = table.lines().take_while(|line| line.starts_with('|')).collect();
    let right: Vec<String> =
        rules().map(|rule| format!("| `{}` | {} | {} |", rule.id, rule.promise, rule.section)).collect();
    let missing: Vec<&String> = right.iter().filter(|line| !listed.contains(&line.as_str())).collect();
    let extra: Vec<&&str> = listed.iter().filter(|line| !right.iter().any(|right| right == *line)).collect();
    assert!(missing.is_empty() && extra.is_empty(), "ABI.md lacks {missing:#?} and should not have {extra:#?}");
    assert!(listed == right, "the rules of ABI.md stand in another order than they are run in");
}

#[test]
fn a_rule_has_one_name_and_a_section_that_exists() {
    let page = include_str!("../ABI.md");
    let mut ids: Vec<&str> = rules().map(|rule| rule.id).collect();
    for rule in rules() {
        let (group, word) = rule.id.split_once('.').unwrap();
        let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
        assert!(plain(group) && plain(word), "{}", rule.id);
        let chapter = rule.section.split('.').next().unwrap();
        assert!(page.contains(&format!("\n## {chapter}. ")), "{}: {}", rule.id, rule.section);
        assert!(rule.steps() > 0 && !rule.promise.is_empty(), "{}", rule.id);
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), rules().count());
}
