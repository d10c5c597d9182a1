//! The families beyond the dense one against values made in float64 (goldens/make_families.py), and the law of bits for
//! them: a row of logits depends on the tokens of its sequence alone, whatever the chunks, the batch, the pages.
#![allow(clippy::unwrap_used)]

mod common;

use common::pools::{Place, PoolSession};
use common::{Session, argmax, bits, device, log_sum_exp, pages, try_load};
use kvdock_kernels::KvDtype;
use kvdock_models::testing::{Fixture, TinyKind, TinyModel, token_ids};
use kvdock_models::{
    DraftPass, LoadOptions, LoadedModel, Logits, NO_PAGE, NoHooks, PageSource, PoolMemory, PoolSet, PooledBatch,
    PooledChunk, StateSave, Want, load,
};
use serde::Deserialize;

/// What f32 may be away from float64 on these models.
const TOLERANCE: f64 = 2e-4;

#[derive(Deserialize)]
struct Position {
    at: usize,
    /// The likeliest tokens, in order.
    top: Vec<(u32, f64)>,
    log_sum_exp: f64,
    /// Logits of the first tokens.
    #[serde(default)]
    first: Vec<f64>,
}

#[derive(Deserialize)]
struct Golden {
    /// The checkpoint, where it is not called as the golden is.
    fixture: Option<String>,
    prompt: String,
    length: usize,
    positions: Vec<Position>,
    greedy: Vec<u32>,
}

fn goldens() -> Vec<(String, Golden)> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/goldens/families.json");
    let all: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    all.into_iter().map(|(name, golden)| (name, serde_json::from_value(golden).unwrap())).collect()
}

fn model(name: &str) -> LoadedModel {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new(name).unwrap().write(dir.path()).unwrap();
    try_load(dir.path()).unwrap()
}

/// Every fixture, and those whose rows can be packed also with packed rows.
fn models() -> Vec<(String, LoadedModel)> {
    let plain = Fixture::NAMES.into_iter().map(|name| (name.to_owned(), model(name)));
    plain.chain(["dsv4", "dsv4q"].into_iter().map(|name| (format!("{name} packed"), packed(name)))).collect()
}

/// A model whose cache keeps packed rows.
fn packed(name: &str) -> LoadedModel {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new(name).unwrap().write(dir.path()).unwrap();
    load(dir.path(), &LoadOptions { packed_rows: true, ..LoadOptions::new(device()) }).unwrap()
}

/// Tokens of a page: small, but what the model's pools allow.
fn page(model: &LoadedModel) -> usize {
    16usize.next_multiple_of(model.spec().page_multiple)
}

fn session(model: &LoadedModel, dtype: KvDtype, tokens: usize) -> PoolSession {
    let page = page(model);
    PoolSession::new(model.clone(), dtype, page, tokens.div_ceil(page))
}

fn agrees(name: &str, golden: &Golden, rows: &[Vec<f32>]) {
    assert_eq!(rows.len(), golden.length);
    for position in &golden.positions {
        let row = &rows[position.at];
        let near = |what: &str, got: f64, expected: f64| {
            assert!((got - expected).abs() < TOLERANCE, "{name} t{} {what}: {got} is not {expected}", position.at);
        };
        assert_eq!(argmax(row), position.top[0].0, "{name} t{}", position.at);
        for (id, logit) in &position.top {
            near("top", row[*id as usize].into(), *logit);
        }
        near("log-sum-exp", log_sum_exp(row), position.log_sum_exp);
        for (id, logit) in position.first.iter().enumerate() {
            near("logit", row[id].into(), *logit);
        }
    }
}

#[test]
fn every_family_agrees_with_the_goldens() {
    for (name, golden) in goldens() {
        let model = model(golden.fixture.as_ref().unwrap_or(&name));
        let ids = token_ids(&golden.prompt, golden.length, 256);
        let room = golden.length + golden.greedy.len() + 1;
        let session = session(&model, KvDtype::F32, room);
        let place = Place::first(room.div_ceil(session.page));
        agrees(&name, &golden, &session.prompt(&ids, golden.length, &place));
        assert_eq!(session.greedy(&ids, golden.greedy.len(), &place), golden.greedy, "{name}");
        if let Ok(kv) = model.spec().one_pool() {
            assert!(kv.layers == model.spec().layers, "{name}");
            let alone = Session::new(model.clone(), KvDtype::F32, 8);
            agrees(&name, &golden, &alone.prompt(&ids, golden.length, &pages(8)));
        }
    }
}

/// Tokens of the prompts below: over several pages and windows, and past what indexers pick.
fn tokens(model: &LoadedModel) -> usize {
    if page(model) > 16 { 300 } else { 110 }
}

#[test]
fn chunks_of_any_size_give_the_same_bits() {
    for (name, model) in models() {
        let count = tokens(&model);
        let ids = token_ids("chunks.tokens", count, 256);
        for dtype in [KvDtype::F32, KvDtype::BF16] {
            let session = session(&model, dtype, count);
            let place = Place::first(count.div_ceil(session.page));
            let whole = bits(&session.prompt(&ids, count, &place));
            for size in [1, 7, 64] {
                assert!(bits(&session.prompt(&ids, size, &place)) == whole, "{name} {dtype:?}: chunks of {size}");
            }
        }
    }
}

#[test]
fn one_pool_with_a_window_mask_gives_the_bits_of_a_window_pool() {
    for name in ["qwen3_moe", "gpt_oss", "gpt_oss_mxfp4", "mimo"] {
        let model = model(name);
        let ids = token_ids("one.tokens", 110, 256);
        for dtype in [KvDtype::F32, KvDtype::F16] {
            let several = session(&model, dtype, 110).prompt(&ids, 19, &Place::first(7));
            let one = Session::new(model.clone(), dtype, 7).prompt(&ids, 32, &pages(7));
            assert!(bits(&several) == bits(&one), "{name} {dtype:?}");
        }
    }
}

#[test]
fn alone_and_in_a_batch_give_the_same_bits() {
    const SEQS: usize = 4;
    for (name, model) in models() {
        let count = tokens(&model);
        let prompts: Vec<Vec<u32>> =
            (0..SEQS).map(|seq| token_ids(&format!("batch.{seq}"), count - 17 * seq, 256)).collect();
        let each = count.div_ceil(page(&model)) as u32;
        let session = PoolSession::new(model.clone(), KvDtype::BF16, page(&model), SEQS * each as usize);
        let places: Vec<Place> = (0..SEQS as u32).map(|seq| Place::shuffled(seq * each, each, 2 * seq)).collect();
        let alone: Vec<_> =
            prompts.iter().zip(&places).map(|(ids, place)| bits(&session.prompt(ids, 40, place))).collect();
        let mut done = [0; SEQS];
        let mut together = vec![Vec::new(); SEQS];
        while done.iter().zip(&prompts).any(|(done, ids)| *done < ids.len()) {
            let owners: Vec<usize> = (0..SEQS).filter(|seq| done[*seq] < prompts[*seq].len()).collect();
            let ends: Vec<usize> = (0..SEQS).map(|seq| (done[seq] + 11 + 9 * seq).min(prompts[seq].len())).collect();
            let windows: Vec<Vec<u32>> = owners.iter().map(|seq| session.window(&places[*seq], done[*seq])).collect();
            let chunks: Vec<PooledChunk<'_>> = owners
                .iter()
                .zip(&windows)
                .map(|(&seq, window)| PooledChunk {
                    tokens: &prompts[seq][done[seq]..ends[seq]],
                    start: done[seq] as u32,
                    logits: Want::All,
                    pages: &places[seq].pages,
                    window,
                    slot: Some(places[seq].slot),
                    save: &[],
                })
                .collect();
            let mut rows = bits(&session.batch(&chunks)).into_iter();
            for &seq in &owners {
                together[seq].extend(rows.by_ref().take(ends[seq] - done[seq]));
                done[seq] = ends[seq];
            }
        }
        for seq in 0..SEQS {
            assert!(together[seq] == alone[seq], "{name}: sequence {seq}");
        }
    }
}

/// What the pools' hit policies ask for, and nothing else, is enough to go on from a page's end: everything else is
/// overwritten first.
#[test]
fn a_prefix_is_resumed_from_what_the_hit_policies_ask_for() {
    for (name, model) in models() {
        let page = page(&model);
        let count = tokens(&model);
        let hit = count / page * page;
        let ids = token_ids("resume.tokens", count, 256);
        let table = count.div_ceil(page);
        let session = PoolSession::new(model.clone(), KvDtype::BF16, page, table + 1);
        let place = Place::first(table);
        let cold = bits(&session.prompt(&ids, count, &place));

        let warm = PoolSession::new(model.clone(), KvDtype::BF16, page, table + 1);
        let save = [StateSave { tokens: hit as u32, slot: 5 }];
        // The state is saved in the middle of a chunk.
        warm.chunk(&ids[..hit - 3], 0, &place, Want::None, &[]);
        warm.chunk(&ids[hit - 3..], hit - 3, &place, Want::None, &save);
        for (index, decl) in warm.pools.decls().iter().enumerate() {
            let needed = decl.hit.pages(hit, page);
            let last = (hit / page) as u32;
            let kept = |number: u32| match decl.source {
                PageSource::Anchor | PageSource::Window => number < last && number + needed as u32 >= last,
                PageSource::Slot => number == 5 && needed > 0,
            };
            let pages = warm.pools.sizes().pages(decl.source) as u32;
            match warm.pools.memory(index).unwrap() {
                PoolMemory::Pages(pool) => {
                    let noise = vec![0x7B; pool.spec().page_bytes];
                    for layer in 0..pool.spec().layers {
                        (0..pages)
                            .filter(|page| !kept(*page))
                            .for_each(|page| pool.copy_layer_in(page, layer, &noise).unwrap());
                    }
                }
                PoolMemory::Heads(_) | PoolMemory::None => {}
            }
        }
        let slot = Place { slot: 9, ..place.clone() };
        warm.pools.copy_slot(5, 9).unwrap();
        let resumed = bits(&warm.chunk(&ids[hit..], hit, &slot, Want::All, &[]));
        assert!(resumed == cold[hit..], "{name}");
        // The saved state was not computed on: it serves again.
        warm.pools.copy_slot(5, 2).unwrap();
        let again = bits(&warm.chunk(&ids[hit..], hit, &Place { slot: 2, ..place }, Want::All, &[]));
        assert!(again == cold[hit..], "{name}");
    }
}

/// A slot that another request has used starts from nothing.
#[test]
fn a_used_slot_starts_from_nothing() {
    for name in ["qwen3_5", "qwen3_next"] {
        let model = model(name);
        let session = session(&model, KvDtype::F32, 32);
        let ids = token_ids("fresh.tokens", 20, 256);
        let first = bits(&session.prompt(&ids, 20, &Place::first(2)));
        session.prompt(&token_ids("other.tokens", 32, 256), 32, &Place::first(2));
        assert!(bits(&session.prompt(&ids, 20, &Place::first(2))) == first, "{name}");
    }
}

#[test]
fn batches_that_break_a_rule_are_refused() {
    let gpt = model("gpt_oss");
    let hybrid = model("qwen3_5");
    let all_refused = |model: &LoadedModel, seqs: &[PooledChunk<'_>]| {
        let session = session(model, KvDtype::F32, 64);
        let batch = PooledBatch { seqs };
        model.model.forward_pools(&batch, &session.pools, &NoHooks, &mut Logits::new()).unwrap_err().to_string()
    };
    let refused = |model: &LoadedModel, chunk: PooledChunk<'_>| all_refused(model, &[chunk]);
    let chunk = PooledChunk {
        tokens: &[1, 2, 3],
        start: 0,
        logits: Want::Last,
        pages: &[0],
        window: &[0],
        slot: Some(0),
        save: &[],
    };
    let cases = [
        (&gpt, PooledChunk { tokens: &[], ..chunk }, "no tokens"),
        (&gpt, PooledChunk { tokens: &[256], ..chunk }, "token 256 is not below the vocabulary's size, 256"),
        (&gpt, PooledChunk { start: 14, ..chunk }, "1 pages of 16 tokens do not hold 17 tokens"),
        (&gpt, PooledChunk { pages: &[4], ..chunk }, "page 4, but the pools have 4"),
        (&gpt, PooledChunk { window: &[], ..chunk }, "0 window pages of 16 tokens"),
        (&gpt, PooledChunk { window: &[NO_PAGE], ..chunk }, "of those it sees"),
        (&hybrid, PooledChunk { slot: None, ..chunk }, "no slot"),
        (&hybrid, PooledChunk { slot: Some(16), ..chunk }, "slot 16, but the pools have 16"),
        (&hybrid, PooledChunk { save: &[StateSave { tokens: 4, slot: 1 }], ..chunk }, "the chunk goes from 0 to 3"),
        (
            &hybrid,
            PooledChunk { save: &[StateSave { tokens: 2, slot: 0 }], ..chunk },
            "slot 0 is written more than once",
        ),
    ];
    for (model, chunk, expected) in cases {
        let error = refused(model, chunk);
        assert!(error.contains(expected), "{error} does not say {expected:?}");
    }
    let glm = self::model("glm_dsa");
    let other = PooledChunk { slot: Some(1), ..chunk };
    assert!(all_refused(&glm, &[chunk, other]).contains("page 0 is written more than once"));
    let other = PooledChunk { pages: &[1], ..other };
    assert!(all_refused(&gpt, &[chunk, other]).contains("window page 0 is written more than once"));
}

/// The layer that predicts the token after the next, against values of the published description.
#[test]
fn the_draft_layer_of_deepseek_v4_agrees_with_the_goldens() {
    let model = model("dsv4");
    let ids = token_ids("dsv4.tokens.36", 160, 256);
    let next: Vec<u32> = ids[1..].iter().copied().chain([0]).collect();
    let main = session(&model, KvDtype::F32, 160);
    let draft = PoolSet::allocate(device().as_ref(), &model.spec().draft_pools, *main.pools.sizes()).unwrap();
    let table = pages(2);
    let run = |from: usize, to: usize| {
        let chunk = PooledChunk {
            tokens: &ids[from..to],
            start: from as u32,
            logits: Want::All,
            pages: &table,
            window: &table,
            slot: Some(0),
            save: &[],
        };
        let (mut logits, mut drafted) = (Logits::new(), Logits::new());
        let pass = DraftPass { next: &next[from..to], pools: &draft, logits: &mut drafted };
        model.model.forward_draft(&PooledBatch { seqs: &[chunk] }, &main.pools, pass, &mut logits).unwrap();
        (0..drafted.rows()).map(|row| drafted.row(row).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let rows = run(0, 160);
    let expected =
        [(10, [(0, 6.77975), (79, 6.09445), (229, 4.08697)]), (159, [(14, 5.91494), (92, 5.17012), (77, 4.59672)])];
    for (at, top) in expected {
        assert_eq!(argmax(&rows[at]), top[0].0);
        for (id, logit) in top {
            let got = f64::from(rows[at][id as usize]);
            assert!((got - logit).abs() < TOLERANCE, "t{at} token {id}: {got} is not {logit}");
        }
    }
    let cut: Vec<Vec<f32>> = run(0, 31).into_iter().chain(run(31, 160)).collect();
    assert!(bits(&cut) == bits(&rows), "two chunks");
}

/// Sizes and bytes of the fixtures are those of the description they are built by.
#[test]
fn fixtures_of_deepseek_v4_are_as_described() {
    let plain = Fixture::new("dsv4").unwrap();
    assert_eq!((plain.elements(), plain.tensors(), plain.bytes()), (490_372, 263, 1_965_584));
    let quantized = Fixture::new("dsv4q").unwrap();
    assert_eq!((quantized.tensors(), quantized.bytes()), (127, 2_447_878));
}

/// A dense model runs over its one declared pool as over a plain one.
#[test]
fn a_dense_model_runs_over_its_declared_pool() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::new(TinyKind::Qwen3).write_hf(dir.path()).unwrap();
    let model = try_load(dir.path()).unwrap();
    let ids = token_ids("declared.tokens", 70, 256);
    let declared = session(&model, KvDtype::F16, 70).prompt(&ids, 9, &Place::first(5));
    let plain = Session::new(model, KvDtype::F16, 5).prompt(&ids, 70, &pages(5));
    assert!(bits(&declared) == bits(&plain));
}

/// Weights in fp8 blocks with f32 scales, and experts kept in one tensor, are the model of the same values written out.
#[test]
fn fp8_blocks_and_fused_experts_give_the_bits_of_their_plain_twins() {
    for name in ["deepseek_v32", "qwen3_moe", "mimo", "qwen3_next"] {
        let fixture = Fixture::new(name).unwrap();
        let (packed, plain) = fixture.in_fp8_blocks([16, 48]);
        let twins = [(packed, plain), (fixture.with_fused_experts(), fixture)];
        for (index, (one, other)) in twins.iter().enumerate() {
            assert!(one != other, "{name} {index}");
            let rows = |fixture: &Fixture| {
                let dir = tempfile::tempdir().unwrap();
                fixture.write(dir.path()).unwrap();
                let model = try_load(dir.path()).unwrap();
                let ids = token_ids("twins.tokens", 40, 256);
                bits(&session(&model, KvDtype::F32, 40).prompt(&ids, 40, &Place::first(3)))
            };
            assert!(rows(one) == rows(other), "{name} {index}");
        }
    }
}

#[test]
fn weights_in_a_format_that_a_family_does_not_have_are_refused() {
    let mut fixture = Fixture::new("qwen3_moe").unwrap();
    fixture.config["quantization_config"] = serde_json::json!({ "quant_method": "gptq" });
    let dir = tempfile::tempdir().unwrap();
    fixture.write(dir.path()).unwrap();
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("\"gptq\"") && error.contains("known: fp8"), "{error}");
}

#[test]
fn configurations_that_make_no_sense_are_named() {
    let cases = [
        ("qwen3_moe", "num_experts_per_tok", serde_json::json!(9), "found 8 and 9"),
        ("qwen3_moe", "num_key_value_heads", serde_json::json!(3), "multiple of the KV heads"),
        ("gpt_oss", "layer_types", serde_json::json!(["full_attention"]), "an entry for each of 4 layers"),
        ("gpt_oss", "sliding_window", serde_json::Value::Null, "sliding_window"),
        ("mimo", "partial_rotary_factor", serde_json::json!(1.5), "up to the head's 24, found 36"),
        ("mimo", "n_group", serde_json::json!(3), "groups that divide 8 experts"),
        ("mimo", "scoring_func", serde_json::json!("softmax"), "\"sigmoid\" is"),
        ("qwen3_5", "linear_num_value_heads", serde_json::json!(3), "multiple of the key heads"),
        (
            "glm_dsa",
            "indexer_types",
            serde_json::json!(["shared", "full", "full", "full"]),
            "an indexer in the first layer",
        ),
        ("dsv4", "compress_ratios", serde_json::json!([0, 4, 64, 4]), "a compress ratio of 64"),
        ("dsv4", "hc_mult", serde_json::json!(2), "hc_mult 2"),
        ("dsv4", "head_dim", serde_json::json!(64), "tensor"),
    ];
    for (name, key, value, expected) in cases {
        let mut fixture = Fixture::new(name).unwrap();
        fixture.config[key] = value;
        let dir = tempfile::tempdir().unwrap();
        fixture.write(dir.path()).unwrap();
        let error = try_load(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{name} {key}: {error}");
    }
}

/// Packed rows round: logits are others, near enough to be of the same model, and a family without them is refused.
#[test]
fn packed_rows_are_used_where_they_are_asked_for() {
    let ids = token_ids("dsv4q.tokens.11", 160, 256);
    let rows = |model: &LoadedModel| session(model, KvDtype::F32, 160).prompt(&ids, 160, &Place::first(2));
    let (plain, packed) = (model("dsv4q"), packed("dsv4q"));
    assert_eq!(packed.spec().pools[1].page_bytes(256, KvDtype::BF16), 149_760);
    let (plain, packed) = (rows(&plain), rows(&packed));
    assert!(bits(&plain) != bits(&packed));
    let same = plain.iter().zip(&packed).filter(|(a, b)| argmax(a) == argmax(b)).count();
    assert!(same > 110, "{same} of 160 tokens are the same");
    let squares: f64 = plain.iter().flatten().zip(packed.iter().flatten()).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let rms = (squares / (160.0 * 256.0)).sqrt();
    assert!((0.01..0.5).contains(&rms), "{rms}");

    let dir = tempfile::tempdir().unwrap();
    Fixture::new("glm_dsa").unwrap().write(dir.path()).unwrap();
    let error =
        load(dir.path(), &LoadOptions { packed_rows: true, ..LoadOptions::new(device()) }).unwrap_err().to_string();
    assert!(error.contains("packing the cache's rows for the family glm_moe_dsa"), "{error}");
}

#[test]
fn a_model_of_several_pools_says_which_it_needs() {
    let model = model("qwen3_5");
    let error = model.spec().one_pool().unwrap_err();
    assert!(error.contains("qwen3_5") && error.contains("2 pools (kv, mamba)"), "{error}");
}
