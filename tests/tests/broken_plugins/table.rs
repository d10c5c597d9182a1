//! Every rule of the conformance suite has a plugin that is broken by it, and by no other.
//!
//! Each plugin is checked against its own rule here, and some against the whole suite; `soak_` checks every plugin against every rule.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use kvdock_plugin_api::conformance::rules;
use kvdock_tests::broken::Broken;
use kvdock_tests::{paths, soak};
use serde_json::json;

/// A plugin that is broken on purpose.
struct Case {
    /// What it is called here.
    name: &'static str,
    /// The rule that it breaks.
    rule: &'static str,
    /// Makes it.
    make: fn(Broken) -> Broken,
}

macro_rules! planted {
    ($fault:literal => $rule:literal $(, $make:expr)?) => {
        Case { name: $fault, rule: $rule, make: |plugin| {
            let plugin = plugin.fault($fault);
            $(let plugin = $make(plugin);)?
            plugin
        } }
    };
}

macro_rules! patched {
    ($name:literal => $rule:literal, $make:expr) => {
        Case { name: $name, rule: $rule, make: $make }
    };
}

const CASES: &[Case] = &[
    patched!("other_machine" => "load.file", |plugin| plugin.bytes(|bytes| {
        let other: u16 = if cfg!(target_arch = "aarch64") { 62 } else { 183 };
        bytes[18..20].copy_from_slice(&other.to_le_bytes());
    })),
    patched!("text_file" => "load.file", |plugin| plugin.bytes(|bytes| *bytes = b"dear reader".to_vec())),
    patched!("other_abi" => "load.file", |plugin| plugin.note(|note| note["abi"] = json!(["7.3"]))),
    patched!("changed_struct" => "load.file", |plugin| plugin.replace(b"page_tokens:", b"page_tokenz:")),
    patched!("aborts_on_panic" => "load.file", |plugin| plugin.note(|note| note["panic"] = "abort".into())),
    patched!("no_entry" => "load.file", |plugin| plugin.replace(b"kvdock_plugin_entry\0", b"kvdock_plugin_entrv\0")),
    // A function that no library has.
    patched!("unknown_symbol" => "load.maps", |plugin| plugin.replace(b"\0pthread_", b"\0pthreax_")),
    planted!("entry_any_version" => "load.entry"),
    planted!("table_size" => "load.table"),
    planted!("linker_undeclared" => "load.linker_table", |plugin: Broken| {
        plugin.note(|note| note["capabilities"]["linker"] = false.into())
    }),
    patched!("no_schema" => "load.schema", |plugin| plugin.note(|note| note["config_schema"]["type"] = "objekt".into())),
    patched!("check_config" => "load.check_config", |plugin| plugin.note(|note| {
        note["config_schema"]["required"] = json!(["folder"]);
    })),
    patched!("host_keys" => "load.host_keys", |plugin| plugin.note(|note| {
        note["config_schema"]["properties"]["timeout"] = json!({"type": "integer"});
    })),
    patched!("more_than_declared" => "open.capabilities", |plugin| plugin.note(|note| {
        note["capabilities"]["remove"] = false.into();
    })),
    planted!("ignores_unknown_keys" => "open.unknown_key", |plugin: Broken| plugin.note(|note| {
        note["config_schema"]["additionalProperties"] = true.into();
    })),
    planted!("ignores_wrong_values" => "open.wrong_value", |plugin: Broken| plugin.note(|note| {
        note["config_schema"]["properties"]["max_bytes"] = json!({});
    })),
    planted!("panic_in_stats" => "calls.panic"),
    planted!("panic_in_remove" => "calls.panic"),
    planted!("hang_when_late" => "calls.hang"),
    planted!("late_report" => "calls.late"),
    planted!("error_without_message" => "calls.error_form"),
    planted!("loses_page_head" => "pools.layouts"),
    planted!("loses_conv_states" => "pools.parts"),
    planted!("loses_far_seal" => "pools.strides"),
    planted!("refuses_one_byte" => "pools.page_sizes"),
    planted!("misses_pool_seven" => "pools.side"),
    planted!("no_later_pools" => "pools.later_side"),
    planted!("registers_some" => "pools.all_or_none"),
    planted!("loses_in_shared_region" => "pools.one_region"),
    planted!("refuses_same_bytes" => "pools.same_bytes"),
    planted!("loses_shared_indices" => "pools.shared_indices"),
    planted!("keeps_pools" => "pools.unregister"),
    planted!("skips_unknown_pool" => "pools.unregistered"),
    planted!("accepts_unknown_memory" => "pools.unknown_refused"),
    planted!("misses_markers" => "pools.logical"),
    planted!("logical_undeclared" => "pools.logical_refused"),
    planted!("accepts_device_memory" => "pools.device_refused"),
    planted!("empty_batch_fails" => "data.empty_batch"),
    planted!("loses_in_small_pool" => "data.one_page"),
    planted!("unset_statuses" => "data.statuses"),
    planted!("cuts_odd_pieces" => "data.short_read"),
    planted!("drops_beyond_8192" => "data.many_pages"),
    planted!("second_pool_missing" => "data.partial"),
    planted!("misses_duplicates" => "data.duplicate_keys"),
    planted!("overwrites" => "data.set_twice"),
    planted!("any_length" => "data.other_length"),
    planted!("misses_other_sessions" => "data.chain"),
    planted!("ranges_ignored" => "data.ranges"),
    planted!("ranges_undeclared" => "data.ranges_refused"),
    planted!("one_setter_a_key" => "threads.one_key"),
    planted!("torn_pages" => "threads.mixed"),
    planted!("ignores_held" => "exists.restorable"),
    planted!("missing_after_gap" => "exists.agrees_with_get"),
    planted!("empty_question_fails" => "exists.empty"),
    planted!("needs_present" => "exists.without_statuses"),
    planted!("accepts_unknown_policy" => "exists.unknown_policy"),
    planted!("keeps_removed" => "remove.removes"),
    planted!("remove_twice_fails" => "remove.missing"),
    planted!("remove_undeclared" => "remove.refused"),
    planted!("clear_keeps_side" => "clear.namespace"),
    planted!("clear_everything_own" => "clear.everything"),
    planted!("accepts_unknown_scope" => "clear.refused"),
    planted!("finds_foreign" => "isolation.namespaces"),
    planted!("mixes_pools" => "isolation.pools"),
    planted!("global_pool_names" => "isolation.instances"),
    planted!("removes_foreign" => "isolation.remove"),
    planted!("clears_foreign" => "isolation.clear"),
    planted!("late_set_lies" => "time.deadline"),
    planted!("cancelled_set_lies" => "time.cancel"),
    planted!("sticks_after_late" => "time.goes_on"),
    planted!("writes_beside" => "memory.neighbours"),
    planted!("writes_sources" => "memory.sources"),
    planted!("writes_after_return" => "memory.after_return"),
    planted!("reads_arguments_late" => "memory.arguments_after_return"),
    planted!("touches_after_close" => "memory.after_close"),
    planted!("no_early_close" => "life.close"),
    planted!("refusal_is_for_ever" => "life.failed_start"),
    planted!("leaks_thread" => "life.threads"),
    planted!("leaks_file" => "life.files"),
    planted!("changes_folder" => "life.process_state"),
    planted!("forgets_on_reopen" => "life.reopen"),
    planted!("other_process_forgets" => "life.other_process"),
    planted!("half_on_disk" => "life.killed"),
    planted!("dies_at_exit" => "life.exit"),
    planted!("too_many_bytes" => "status.stats"),
    planted!("degraded_without_reason" => "status.health"),
    planted!("empty_flush_fails" => "status.flush"),
    planted!("aborts_on_empty_flush" => "status.flush"),
    planted!("empty_report_fails" => "status.held_pages"),
    planted!("lookup_longest_only" => "linker.lookup"),
    planted!("offload_forgets_status" => "linker.offload"),
    planted!("offload_reads_early" => "linker.offload_ready"),
    planted!("offload_page_by_page" => "linker.offload_atomic"),
    planted!("offload_late_stores" => "linker.offload_deadline"),
    planted!("offload_last_first" => "linker.offload_order"),
    planted!("offload_unknown_ready" => "linker.offload_refused"),
    planted!("pop_empty_fails" => "linker.pop_empty"),
    planted!("load_wrong_bytes" => "linker.load"),
    planted!("load_unset_missing" => "linker.statuses"),
    planted!("layers_not_told" => "linker.layers"),
    planted!("layers_settled_early" => "linker.layer_bytes"),
    planted!("load_all_layers" => "linker.ranges"),
    planted!("empty_start_unsettled" => "linker.empty_start"),
    planted!("load_writes_early" => "linker.start_ready"),
    planted!("start_unknown_ready" => "linker.start_refused"),
    planted!("double_load_taken" => "linker.double_load"),
    planted!("load_skips_unknown_pool" => "linker.load_refused"),
    planted!("cancel_keeps_load" => "linker.cancel"),
    planted!("cancel_always_ok" => "linker.cancel_refused"),
    planted!("finish_unknown_ok" => "linker.finish_unknown"),
    planted!("finish_leaves_writer" => "linker.deadline"),
    planted!("finish_keeps_lock" => "linker.beside"),
    planted!("reset_leaves_writer" => "linker.reset"),
    planted!("reset_keeps_completions" => "linker.reset_usable"),
    planted!("tires_after_many" => "linker.model"),
];

/// The plugins that the ordinary run checks against the whole suite: one of each way to be broken.
const WHOLE: &[&str] = &["other_abi", "more_than_declared", "panic_in_remove", "aborts_on_empty_flush"];

/// What `kvdock plugin check` says of a plugin: the rules that are broken, those that were run or skipped, and its words.
struct Checked {
    broken: BTreeSet<String>,
    rules: BTreeSet<String>,
    words: String,
}

/// Checks a plugin against the rules whose names begin with `rule`, all of them when it is empty.
fn check(plugin: &Path, rule: &str) -> Checked {
    let folder = tempfile::tempdir().unwrap();
    let junit = folder.path().join("junit.xml");
    let mut command = Command::new(paths::kvdock());
    command.args(["plugin", "check"]).arg(plugin).arg("--junit").arg(&junit);
    if !rule.is_empty() {
        command.args(["--rule", rule]);
    }
    // A setting of the shell that runs the tests is none of the plugin's.
    command.env_remove("RUST_BACKTRACE");
    let output = command.output().unwrap();
    let words = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    let text = std::fs::read_to_string(&junit).unwrap_or_else(|error| panic!("{error}: {words}"));
    let (mut broken, mut rules, mut current) = (BTreeSet::new(), BTreeSet::new(), String::new());
    for tag in text.split('<') {
        if let Some(case) = tag.strip_prefix("testcase ") {
            current = attribute(case, "name").to_owned();
            rules.insert(current.clone());
        } else if tag.starts_with("failure ") {
            broken.insert(current.clone());
        }
    }
    assert_eq!(output.status.code(), Some(i32::from(!broken.is_empty())), "{words}");
    Checked { broken, rules, words }
}

fn attribute<'a>(tag: &'a str, name: &str) -> &'a str {
    let begin = format!("{name}=\"");
    // `classname` ends like `name`, so a space goes before it.
    let at = tag.find(&format!(" {begin}")).map_or(0, |at| at + 1);
    let rest = &tag[at..];
    let value = rest.strip_prefix(begin.as_str()).unwrap_or_else(|| panic!("no {name} in {tag:?}"));
    value.split('"').next().unwrap_or_default()
}

/// Checks cases, two at a time, and says all that is wrong with them.
fn check_all(cases: &[&Case], whole: impl Fn(&Case) -> bool + Sync) {
    let folder = tempfile::tempdir().unwrap();
    let (next, wrong) = (Mutex::new(cases.iter()), Mutex::new(Vec::new()));
    let one = |case: &Case| {
        let plugin = (case.make)(Broken::new()).write_as(folder.path(), case.name);
        let asked = if whole(case) { "" } else { case.rule };
        let checked = check(&plugin, asked);
        let expected = BTreeSet::from([case.rule.to_owned()]);
        if checked.broken != expected {
            let all = format!("{}: expected {} to be broken, found {:?}", case.name, case.rule, checked.broken);
            wrong.lock().unwrap().push(format!("{all}\n{}", checked.words));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(case) = next.lock().unwrap().next() else { return };
                    one(case);
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} plugins:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn every_rule_has_a_plugin_that_is_broken_by_it() {
    let broken: BTreeSet<&str> = CASES.iter().map(|case| case.rule).collect();
    let rules: BTreeSet<&str> = rules().map(|rule| rule.id).collect();
    let without: Vec<_> = rules.difference(&broken).collect();
    assert!(without.is_empty(), "rules without a broken plugin: {without:?}");
    let unknown: Vec<_> = broken.difference(&rules).collect();
    assert!(unknown.is_empty(), "the table names rules that there are not: {unknown:?}");
    let names: BTreeSet<&str> = CASES.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), CASES.len(), "each case has a name of its own");
    assert!(WHOLE.iter().all(|name| names.contains(name)));
}

#[test]
fn without_a_fault_every_rule_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let checked = check(&Broken::new().write(folder.path()), "");
    assert!(checked.broken.is_empty(), "{}", checked.words);
    assert_eq!(checked.rules.len(), rules().count());
}

#[test]
fn each_broken_plugin_is_caught_by_its_rule() {
    let chosen: Vec<&Case> = CASES.iter().filter(|case| !WHOLE.contains(&case.name)).collect();
    check_all(&chosen, |_| false);
}

/// All of them take minutes, so the ordinary run takes some; `cargo xtask soak` takes all.
#[test]
fn soak_broken_plugins_break_no_other_rule() {
    let all = soak::factor() > 1;
    let chosen: Vec<&Case> = CASES.iter().filter(|case| all || WHOLE.contains(&case.name)).collect();
    check_all(&chosen, |_| true);
}
