//! Models spread over tensor-parallel ranks: near the model of one rank, bit for bit the same in any chunks and batches, and refused where
//! something does not divide.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::pools::{Place, PoolSession};
use common::{bits, try_load, try_load_ranks};
use kvdock_kernels::KvDtype;
use kvdock_models::testing::{Fixture, TinyKind, TinyModel, token_ids};
use kvdock_models::{
    DraftPass, LayerHooks, LoadedModel, Logits, ModelError, NoHooks, PooledBatch, PooledChunk, StateSave, Want,
    WeightFormat,
};

/// What another order of summing may change in the logits of these models.
const TOLERANCE: f32 = 2e-4;

/// Fixtures, and over how many ranks they can be spread beside two.
const FIXTURES: [(&str, bool); 9] = [
    ("qwen3_moe", true),
    ("gpt_oss", true),
    ("gpt_oss_mxfp4", true),
    ("mimo", true),
    // Two key heads of linear attention.
    ("qwen3_5", false),
    ("qwen3_next", false),
    ("glm_dsa", true),
    ("deepseek_v32", true),
    ("dsv4", true),
];

/// Every kind of model, as written by `write`: name, and whether it can be spread over four ranks.
fn each_kind(mut with: impl FnMut(&str, &Path, bool)) {
    for (name, four) in FIXTURES {
        let dir = tempfile::tempdir().unwrap();
        Fixture::new(name).unwrap().write(dir.path()).unwrap();
        with(name, dir.path(), four);
    }
    for kind in TinyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        TinyModel::new(kind).write_hf(dir.path()).unwrap();
        with(kind.name(), dir.path(), true);
        let file = dir.path().join("tiny.gguf");
        TinyModel::new(kind).write_gguf(&file, WeightFormat::F16).unwrap();
        with(&format!("{} gguf", kind.name()), &file, true);
    }
}

fn sizes(four: bool) -> &'static [usize] {
    if four { &[2, 4] } else { &[2] }
}

fn session(model: &LoadedModel, dtype: KvDtype, tokens: usize) -> PoolSession {
    let page = 16usize.next_multiple_of(model.spec().page_multiple);
    PoolSession::new(model.clone(), dtype, page, tokens.div_ceil(page))
}

/// Tokens of a prompt over several pages and windows, and past what indexers pick.
fn tokens(model: &LoadedModel) -> usize {
    if model.spec().page_multiple > 16 { 300 } else { 90 }
}

fn prompt(model: &LoadedModel, dtype: KvDtype, chunk: usize) -> Vec<Vec<f32>> {
    let count = tokens(model);
    let session = session(model, dtype, count);
    let place = Place::first(count.div_ceil(session.page));
    session.prompt(&token_ids("ranks.tokens", count, 256), chunk, &place)
}

#[test]
fn ranks_compute_what_one_rank_computes() {
    each_kind(|name, path, four| {
        let alone = prompt(&try_load(path).unwrap(), KvDtype::F32, 64);
        for &size in sizes(four) {
            let model = try_load_ranks(path, size).unwrap();
            assert_eq!(model.spec().ranks, size);
            let together = prompt(&model, KvDtype::F32, 64);
            assert_eq!(alone.len(), together.len());
            for (at, (alone, together)) in alone.iter().zip(&together).enumerate() {
                let most = alone.iter().zip(together).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(most < TOLERANCE, "{name} over {size} ranks, t{at}: {most}");
            }
        }
    });
}

#[test]
fn chunks_of_any_size_give_the_same_bits_on_ranks() {
    each_kind(|name, path, four| {
        for &size in sizes(four) {
            let model = try_load_ranks(path, size).unwrap();
            let whole = bits(&prompt(&model, KvDtype::BF16, 4096));
            let chunk = if size == 2 { 13 } else { 29 };
            let cut = bits(&prompt(&model, KvDtype::BF16, chunk));
            assert!(cut == whole, "{name}, {size} ranks, chunks of {chunk}");
        }
    });
}

#[test]
fn a_batch_gives_the_bits_of_its_sequences_alone_on_ranks() {
    each_kind(|name, path, _| {
        let model = try_load_ranks(path, 2).unwrap();
        let page = 16usize.next_multiple_of(model.spec().page_multiple);
        let session = PoolSession::new(model, KvDtype::F16, page, 3 * 6);
        let ids: Vec<Vec<u32>> = (0..3).map(|seq| token_ids(&format!("batch.{seq}"), 40 + 7 * seq, 256)).collect();
        let places: Vec<Place> = (0..3).map(|seq| Place::shuffled(seq * 6, 6, seq)).collect();
        let alone: Vec<_> = ids.iter().zip(&places).map(|(ids, place)| session.prompt(ids, 64, place)).collect();
        let seqs: Vec<PooledChunk<'_>> = ids
            .iter()
            .zip(&places)
            .map(|(tokens, place)| PooledChunk {
                tokens,
                start: 0,
                logits: Want::All,
                pages: &place.pages,
                window: &place.window,
                slot: Some(place.slot),
                save: &[],
            })
            .collect();
        assert!(bits(&session.batch(&seqs)) == bits(&alone.concat()), "{name}");
    });
}

#[test]
fn a_saved_state_of_every_rank_is_gone_on_from() {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new("qwen3_next").unwrap().write(dir.path()).unwrap();
    let session = session(&try_load_ranks(dir.path(), 2).unwrap(), KvDtype::F32, 96);
    let ids = token_ids("saved.tokens", 96, 256);
    let place = Place::first(6);
    let rows = session.chunk(&ids, 0, &place, Want::All, &[StateSave { tokens: 48, slot: 9 }]);
    session.pools.copy_slot(9, 3).unwrap();
    let other = Place { slot: 3, ..place };
    assert!(bits(&session.chunk(&ids[48..], 48, &other, Want::All, &[])) == bits(&rows[48..]));
}

#[test]
fn a_layer_that_predicts_further_tokens_runs_on_ranks() {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new("dsv4").unwrap().write(dir.path()).unwrap();
    let ids = token_ids("draft.tokens", 21, 256);
    let drafted = |ranks: usize| {
        let model = try_load_ranks(dir.path(), ranks).unwrap();
        let session = session(&model, KvDtype::F32, 128);
        let draft = kvdock_models::PoolSet::allocate_ranks(
            &common::devices(ranks),
            &model.spec().draft_pools,
            *session.pools.sizes(),
        )
        .unwrap();
        let chunk = PooledChunk {
            tokens: &ids[..20],
            start: 0,
            logits: Want::All,
            pages: &[0],
            window: &[0],
            slot: Some(0),
            save: &[],
        };
        let (mut logits, mut further) = (Logits::new(), Logits::new());
        let pass = DraftPass { next: &ids[1..], pools: &draft, logits: &mut further };
        model.model.forward_draft(&PooledBatch { seqs: &[chunk] }, &session.pools, pass, &mut logits).unwrap();
        (0..20).map(|row| further.row(row).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let alone = drafted(1);
    for (alone, together) in alone.iter().zip(drafted(2)) {
        assert!(alone.iter().zip(&together).all(|(a, b)| (a - b).abs() < TOLERANCE));
    }
}

#[test]
fn blocks_of_quantised_weights_are_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tiny.gguf");
    let tiny = TinyModel { head_dim: 128, ..TinyModel::wide(TinyKind::Llama) };
    tiny.write_gguf(&file, WeightFormat::Q6_K).unwrap();
    let (alone, two) = (try_load(&file).unwrap(), try_load_ranks(&file, 2).unwrap());
    let (alone, two) = (prompt(&alone, KvDtype::F32, 64), prompt(&two, KvDtype::F32, 64));
    let most = alone.iter().flatten().zip(two.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(most < TOLERANCE, "{most}");
    let error = try_load_ranks(&file, 4).unwrap_err().to_string();
    assert!(error.contains("blk.0.attn_output.weight") && error.contains("blocks of 256"), "{error}");
}

#[test]
fn what_does_not_divide_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |tiny: TinyModel, ranks: usize| {
        tiny.write_hf(dir.path()).unwrap();
        try_load_ranks(dir.path(), ranks).unwrap_err().to_string()
    };
    let tiny = || TinyModel::new(TinyKind::Llama);
    let error = refusal(tiny(), 3);
    let told = "can't be spread over 3 ranks: it has 4 query heads, which 3 does not divide (1, 2, 4 would)";
    assert!(error.ends_with(told), "{error}");
    let error = refusal(TinyModel { heads: 6, kv_heads: 3, ..tiny() }, 2);
    assert!(error.contains("it has 3 KV heads, which 2 does not divide"), "{error}");
    let error = refusal(TinyModel { intermediate: 126, ..tiny() }, 4);
    assert!(error.contains("126 columns of the MLP"), "{error}");
    Fixture::new("dsv4q").unwrap().write(dir.path()).unwrap();
    let error = try_load_ranks(dir.path(), 2).unwrap_err().to_string();
    assert!(error.contains("it has 1 query heads, which 2 does not divide"), "{error}");
    Fixture::new("qwen3_next").unwrap().write(dir.path()).unwrap();
    let error = try_load_ranks(dir.path(), 4).unwrap_err().to_string();
    assert!(error.contains("2 key heads of linear attention"), "{error}");
}

/// Stops one rank before a layer.
struct StopOne;

impl LayerHooks for StopOne {
    fn before_layer_of(&self, rank: usize, layer: usize) -> Result<(), ModelError> {
        assert!(!(rank == 0 && layer == 2), "rank 0 goes on without rank 1");
        if (rank, layer) == (1, 1) {
            return Err(ModelError::Hook { layer, reason: "its pages did not come".to_owned() });
        }
        Ok(())
    }
}

#[test]
fn a_rank_that_fails_ends_the_pass_on_all_and_the_next_one_works() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::new(TinyKind::Qwen3).write_hf(dir.path()).unwrap();
    let model = try_load_ranks(dir.path(), 2).unwrap();
    let session = session(&model, KvDtype::F32, 32);
    let ids = token_ids("stopped.tokens", 20, 256);
    let chunk =
        PooledChunk { tokens: &ids, start: 0, logits: Want::Last, pages: &[0, 1], window: &[], slot: None, save: &[] };
    let batch = PooledBatch { seqs: &[chunk] };
    let mut logits = Logits::new();
    model.model.forward_pools(&batch, &session.pools, &NoHooks, &mut logits).unwrap();
    let row = logits.row(0).unwrap().to_vec();
    for _ in 0..3 {
        let error = model.model.forward_pools(&batch, &session.pools, &StopOne, &mut logits).unwrap_err();
        assert_eq!(error.to_string(), "stopped before layer 1: its pages did not come");
        model.model.forward_pools(&batch, &session.pools, &NoHooks, &mut logits).unwrap();
        assert_eq!(logits.row(0).unwrap(), row);
    }
}

#[test]
fn pools_are_those_of_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::new(TinyKind::Llama).write_hf(dir.path()).unwrap();
    let (one, two) = (try_load(dir.path()).unwrap(), try_load_ranks(dir.path(), 2).unwrap());
    let pools = session(&one, KvDtype::F32, 16).pools;
    let mut logits = Logits::new();
    let chunk =
        PooledChunk { tokens: &[1], start: 0, logits: Want::Last, pages: &[0], window: &[], slot: None, save: &[] };
    let batch = PooledBatch { seqs: &[chunk] };
    let error = two.model.forward_pools(&batch, &pools, &NoHooks, &mut logits).unwrap_err().to_string();
    assert_eq!(error, "batch: pools of 1 ranks for a model of 2");
}
