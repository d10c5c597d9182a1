//! Several ranks of one server, each with an instance of its own.

use kvdock_plugin_api::Identity;
use kvdock_plugin_api::mock::identity;
use serde_json::json;

use super::super::common::*;

fn ranks(config: &str, replicated: bool) -> [Bench; 2] {
    let rank = |number| Identity { tp: (number, 2), replicated, writer: number == 0, ..identity("model") };
    [0, 1].map(|number| Bench::of(config, &rank(number), pool(16, 8192)))
}

/// What all ranks hold alike one of them stores. The others' instances had stores of their own, and never found it.
#[test]
fn what_one_rank_stores_for_all_was_found_by_none_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let memory = json!({"ssd_enabled": false, "dram_capacity_bytes": 1 << 20, "dram_page_size": 4096}).to_string();
    for config in [memory, settings(dir.path(), json!({}))] {
        let [first, second] = ranks(&config, true);
        first.store(&numbers(0..16));
        assert_eq!((second.prefix(&numbers(0..16)), second.count(&numbers(0..16))), (16, 16), "{config}");
        second.remove(&[3]).result.unwrap();
        assert_eq!(first.count(&numbers(0..16)), 15);
        // It ends with the last of them.
        first.store.close().unwrap();
        assert_eq!(second.count(&numbers(0..16)), 15);
        second.store.close().unwrap();
    }
    let again = ranks(&settings(dir.path(), json!({})), true);
    assert_eq!(again[1].count(&numbers(0..16)), 15, "what was on the disk is there");
}

#[test]
fn memory_that_ranks_share_is_gone_when_all_have_left_and_no_other_instance_has_it() {
    let memory = json!({"ssd_enabled": false, "dram_capacity_bytes": 1 << 20, "dram_page_size": 4096});
    let pair = ranks(&memory.to_string(), true);
    pair[0].store(&[1]);
    // Other settings, and ranks that hold different bytes.
    let mut larger = memory.clone();
    larger["dram_capacity_bytes"] = json!(2 << 20);
    assert_eq!(ranks(&larger.to_string(), true)[0].count(&[1]), 0);
    assert_eq!(ranks(&memory.to_string(), false)[0].count(&[1]), 0);
    pair.into_iter().for_each(|rank| rank.store.close().unwrap());
    assert_eq!(ranks(&memory.to_string(), true)[0].count(&[1]), 0);
}
