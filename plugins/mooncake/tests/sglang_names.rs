//! `key_scheme = "sglang"`: the names that SGLang 0.5.23 builds, and objects under them that either side stored.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;
#[path = "common/described.rs"]
mod described;

use common::services::{Calls, Master, Mode, Official};
use described::described;
use kvdock_plugin_api::mock::{
    Instance, KvShape, MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key, table_of,
};
use kvdock_plugin_api::v0_1::{Component, PageKey};
use kvdock_plugin_api::{CacheMode, ClearScope, ComponentKind, Dtype, ErrorKind, Identity, PageStatus};
use kvdock_plugin_mooncake::kvdock_plugin_entry;
use kvdock_plugin_mooncake::names::Names;

fn foreign(model: &str) -> Identity {
    let namespace_json = serde_json::json!({ "model": model, "key_scheme": "sglang" }).to_string();
    Identity { namespace_json, ..identity(model) }
}

fn hex(key: &PageKey) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn shape() -> KvShape {
    KvShape { pages: 16, page_tokens: 4, layers: 3, heads: 4, head_dim: 8, dtype: Dtype::Bf16 }
}

fn kv(layout: &str) -> PoolSpec {
    PoolSpec::kv(0, "kv", layout, shape())
}

fn side(name: &str, kinds: &[ComponentKind]) -> PoolSpec {
    let components = kinds.iter().zip(0..).map(|(kind, segment)| Component {
        layer: 0,
        kind: kind.raw(),
        segment,
        reserved: 0,
        offset: 0,
        run_len: 32,
        run_stride: 32,
        run_count: 1,
    });
    let components = components.collect();
    PoolSpec { components, layers: 1, ..PoolSpec::bytes(1, name, 16, &vec![32; kinds.len()]) }
}

/// What stands around the key `H` in the names of a page's objects.
fn names_of(tag: &str, identity: &Identity, spec: &PoolSpec, replicated: bool) -> Vec<String> {
    let names = Names::of(tag, identity, CacheMode::Hierarchical).unwrap();
    let objects = names.objects(&described(spec, replicated)).unwrap();
    let named = objects.iter().map(|object| names.object(&object.label, &[0xab; 32]));
    named.map(|name| name.replace(&"ab".repeat(32), "H")).collect()
}

/// The names that section 2.2 and 4.5 of what is known of 0.5.23 say, letter by letter.
#[test]
fn names_are_those_of_sglang_byte_for_byte() {
    use ComponentKind::{ConvState, K, Other, TemporalState, V};
    let base = || foreign("org/model");
    let pp = || Identity { tp: (1, 2), pp: (1, 2), ..base() };
    let shared = || Identity { replicated: true, tp: (1, 2), ..base() };
    let split = || Identity { tp: (1, 2), tp_lcm_size: 4, ..base() };
    let cases: Vec<(&str, Identity, PoolSpec, bool, Vec<&str>)> = vec![
        ("", base(), kv("page_first"), false, vec!["org-model_H_0_k", "org-model_H_0_v"]),
        ("tag", base(), kv("page_first_direct"), false, vec!["tag_org-model_H_0_k", "tag_org-model_H_0_v"]),
        ("", foreign(""), kv("page_head"), false, vec!["H_0_k", "H_0_v"]),
        ("", pp(), kv("page_first"), false, vec!["org-model_H_1_1_k", "org-model_H_1_1_v"]),
        ("", shared(), kv("page_first"), false, vec!["org-model_H__k"]),
        ("", shared(), kv("layer_first"), false, vec!["org-model_H__k"]),
        ("", Identity { pp: (1, 2), ..shared() }, kv("page_first"), false, vec!["org-model_H_1_k"]),
        (
            "",
            Identity { dcp: (1, 2), cp: (0, 1), page_tokens: 64, ..shared() },
            kv("page_first"),
            false,
            vec!["org-model_tp2_dcp2_page64_pp1_cp1_H_dcp1_cp0_k"],
        ),
        (
            "",
            split(),
            kv("page_head"),
            false,
            vec!["org-model_H_2_k", "org-model_H_2_v", "org-model_H_3_k", "org-model_H_3_v"],
        ),
        ("", split(), side("mamba", &[TemporalState]), false, vec!["org-model_H_['2', '3']_temporal"]),
        (
            "",
            pp(),
            side("mamba", &[TemporalState, ConvState, ConvState]),
            false,
            vec!["org-model_H_1_1_temporal", "org-model_H_1_1_conv_0", "org-model_H_1_1_conv_1"],
        ),
        ("", base(), side("mamba", &[ConvState]), false, vec!["org-model_H_0_conv_0"]),
        ("", base(), side("swa", &[K, V]), false, vec!["org-model_H_0_swa_k", "org-model_H_0_swa_v"]),
        ("", shared(), side("swa", &[Other]), false, vec!["org-model_H__swa"]),
        ("", base(), side("indexer", &[Other]), true, vec!["org-model_H__indexer"]),
        ("", pp(), side("draft_indexer", &[Other]), true, vec!["org-model_H_1_draft_indexer"]),
        ("", base(), side("deepseek_v4_c4", &[Other]), true, vec!["org-model_H__deepseek_v4_c4"]),
        ("", base(), side("draft", &[K, V]), false, vec!["org-model_H_0_draft_k", "org-model_H_0_draft_v"]),
        ("", shared(), side("draft", &[Other]), true, vec!["org-model_H__draft_k"]),
        ("", base(), side("draft_swa", &[K, V]), false, vec!["org-model_H_0_draft_swa_k", "org-model_H_0_draft_swa_v"]),
        ("", shared(), side("draft_swa", &[Other]), true, vec!["org-model_H__draft_swa"]),
        ("", base(), PoolSpec::logical(16), false, vec![]),
    ];
    for (tag, identity, spec, replicated, expected) in cases {
        assert_eq!(names_of(tag, &identity, &spec, replicated), expected, "{} {identity:?}", spec.name);
    }
}

#[test]
fn groups_have_the_name_that_sglang_gives_them() {
    let names = Names::of("tag", &foreign("m"), CacheMode::Hierarchical).unwrap();
    assert_eq!(names.group(&[0xab; 32]), format!("sglang-hicache:tag_m_{}", "ab".repeat(32)));
}

#[test]
fn what_sglang_does_not_store_is_refused_in_words() {
    let refused = |identity: &Identity, spec: &PoolSpec| {
        let names = Names::of("", identity, CacheMode::Hierarchical).unwrap();
        let error = names.objects(&described(spec, false)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        error.message
    };
    let base = foreign("m");
    assert!(refused(&base, &kv("page_first").with_seal(64)).contains("seal"));
    assert!(refused(&base, &kv("layer_first")).contains("layer_first"));
    assert!(refused(&base, &side("auxiliary_swa", &[ComponentKind::Other])).contains("auxiliary_swa"));
    assert!(refused(&base, &side("swa", &[ComponentKind::Other])).contains("keys and values"));
    let uneven = Identity { tp: (0, 2), tp_lcm_size: 3, ..foreign("m") };
    assert!(Names::of("", &uneven, CacheMode::Hierarchical).unwrap_err().message.contains("tp_lcm_size"));
    let unknown = Identity { namespace_json: r#"{"key_scheme":"other"}"#.to_owned(), ..identity("m") };
    assert!(Names::of("", &unknown, CacheMode::Hierarchical).unwrap_err().message.contains("other"));
}

fn open(config: &str, model: &str, pools: &[&MockPool]) -> (MockHost, Instance) {
    let host = MockHost::new();
    let store = host.attach(table_of(kvdock_plugin_entry).unwrap(), config, &foreign(model), pools);
    (host, store.unwrap())
}

fn numbered(numbers: &[u64]) -> Vec<PageKey> {
    numbers.iter().map(|number| key(*number)).collect()
}

/// What an SGLang server puts by its client we read, and it reads what we put: page by page, keys and values apart.
#[test]
fn objects_under_these_names_go_both_ways() {
    let master = Master::start(&[]);
    let mut official = Official::start(&master, Mode::Peer, 64 << 20);
    for layout in ["page_first", "page_first_direct", "page_head"] {
        let model = format!("org/{layout}");
        let name = |number: u64, last: &str| format!("org-{layout}_{}_0_{last}", hex(&key(number)));
        let pool = MockPool::new(kv(layout));
        let (host, store) = open(&master.config(Mode::Peer, 0), &model, &[&pool]);
        assert!(host.logs().iter().any(|line| line.message.contains("sglang")), "a warning at the start");
        let half = pool.page_bytes() / 2;
        let numbers = [1, 2, 3];
        numbers.iter().zip(0..).for_each(|(number, page)| pool.fill(page, *number));
        let ours = Part::new(&pool, &numbered(&numbers), &[0, 1, 2]);
        let set = store.set(&Options::default(), &[ours]);
        assert!(set.all_ok(), "{set:?}");
        for number in numbers {
            let pattern = pool.pattern(number);
            assert!(official.get(&name(number, "k")) == pattern[..half], "{layout}: keys of {number}");
            assert!(official.get(&name(number, "v")) == pattern[half..], "{layout}: values of {number}");
        }
        for number in [11, 12] {
            let pattern = pool.pattern(number);
            assert_eq!(official.put(&name(number, "k"), &pattern[..half]), 0);
            if number == 11 {
                assert_eq!(official.put(&name(number, "v"), &pattern[half..]), 0);
            }
        }
        let found = store.exists(&Options::default(), &numbered(&[11, 12]), &[Query::of(&pool)]).unwrap();
        assert_eq!(found.longest(), 1, "a page without its values is none");
        let theirs = Part::new(&pool, &numbered(&[11, 12]), &[8, 9]);
        let got = store.get(&Options::default(), &[theirs]);
        assert_eq!(got.statuses, [[PageStatus::Ok, PageStatus::Missing]], "{got:?}");
        assert!(pool.holds(8, 11));
    }
}

/// SGLang 0.5.23 writes nothing for an anchor without bytes: its pages count as there, and the side pools decide.
#[test]
fn a_missing_marker_ends_no_prefix() {
    let master = Master::start(&[]);
    let anchor = MockPool::new(PoolSpec::logical(16));
    let indexer = MockPool::new(side("indexer", &[ComponentKind::Other]));
    let (_host, store) = open(&master.config(Mode::Peer, 64 << 20), "m", &[&anchor, &indexer]);
    [1, 2].iter().zip(0..).for_each(|(number, page)| indexer.fill(page, *number));
    let numbers = numbered(&[1, 2, 3]);
    let parts = [Part::new(&indexer, &numbers[..2], &[0, 1]), Part::new(&anchor, &numbers[..2], &[0, 1])];
    assert!(store.set(&Options::default(), &parts).all_ok());
    assert_eq!(master.keys().len(), 2, "no marker is written");
    let found = store.exists(&Options::default(), &numbers, &[Query::of(&anchor)]).unwrap();
    assert_eq!(found.longest(), 3);
    let queries = [Query::of(&anchor), Query::of(&indexer)];
    assert_eq!(store.exists(&Options::default(), &numbers, &queries).unwrap().longest(), 2);
    assert!(store.get(&Options::default(), &[Part::new(&anchor, &numbers, &[4, 5, 6])]).all_ok());
}

/// Names do not say whose an object is, so nothing is cleared by them.
#[test]
fn clear_leaves_alone_what_may_be_another_servers() {
    let master = Master::start(&[]);
    let pool = MockPool::new(kv("page_first"));
    let (_host, store) = open(&master.config(Mode::Peer, 64 << 20), "m", &[&pool]);
    assert!(!store.capabilities().unwrap().clear_namespace);
    pool.fill(0, 1);
    assert!(store.set(&Options::default(), &[Part::new(&pool, &numbered(&[1]), &[0])]).all_ok());
    let error = store.clear(&Options::default(), ClearScope::Namespace).unwrap_err();
    assert!(error.kind == ErrorKind::Unsupported && error.message.contains("sglang"), "{error}");
    assert_eq!(master.keys().len(), 2);
}
