//! Models whose passes are dealt out among context-parallel ranks: bit for bit what one rank computes, in logits and in pools.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::pools::{Place, PoolSession};
use common::{bits, devices, try_load, try_load_context, try_load_ranks};
use kvdock_kernels::KvDtype;
use kvdock_models::testing::{Fixture, TinyKind, TinyModel, token_ids};
use kvdock_models::{
    DraftPass, LayerHooks, LoadOptions, LoadedModel, Logits, ModelError, NoHooks, PoolSet, PooledBatch, PooledChunk,
    StateSave, Want, WeightFormat, load,
};

/// All kinds of layers: full attention, windows, latents with an indexer, compressors with their rings, recurrences, experts, packed rows.
const FIXTURES: [&str; 10] = [
    "qwen3_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "mimo",
    "qwen3_5",
    "qwen3_next",
    "glm_dsa",
    "deepseek_v32",
    "dsv4",
    "dsv4q",
];

fn each_kind(mut with: impl FnMut(&str, &Path)) {
    for name in FIXTURES {
        let dir = tempfile::tempdir().unwrap();
        Fixture::new(name).unwrap().write(dir.path()).unwrap();
        with(name, dir.path());
    }
    for kind in TinyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tiny.gguf");
        TinyModel::new(kind).write_gguf(&file, WeightFormat::F16).unwrap();
        with(kind.name(), &file);
    }
}

fn session(model: &LoadedModel, dtype: KvDtype, tokens: usize) -> PoolSession {
    let page = 16usize.next_multiple_of(model.spec().page_multiple);
    PoolSession::new(model.clone(), dtype, page, tokens.div_ceil(page))
}

/// All rows of a prompt in chunks of `chunk` tokens, then a few tokens one by one.
fn rows(model: &LoadedModel, chunk: usize) -> Vec<Vec<u32>> {
    // Over several pages and windows, and past what indexers pick.
    let count = if model.spec().page_multiple > 16 { 300 } else { 90 };
    let session = session(model, KvDtype::BF16, count);
    let place = Place::first(count.div_ceil(session.page));
    let ids = token_ids("context.tokens", count, 256);
    let (prompt, next) = ids.split_at(count - 4);
    let mut rows = session.prompt(prompt, chunk, &place);
    for (index, token) in next.iter().enumerate() {
        rows.extend(session.chunk(&[*token], prompt.len() + index, &place, Want::Last, &[]));
    }
    bits(&rows)
}

#[test]
fn context_parallel_ranks_compute_the_bits_of_one_rank() {
    each_kind(|name, path| {
        let alone = rows(&try_load(path).unwrap(), 64);
        for (size, chunk) in [(2, 64), (2, 3), (4, 37), (4, 4096)] {
            let model = try_load_context(path, 1, size).unwrap();
            assert_eq!((model.spec().ranks, model.spec().context_ranks), (size, size));
            assert!(rows(&model, chunk) == alone, "{name} over {size} ranks, chunks of {chunk}");
        }
    });
}

#[test]
fn each_share_of_a_model_may_have_several_context_parallel_ranks() {
    for name in ["qwen3_moe", "gpt_oss", "mimo", "qwen3_next", "glm_dsa", "dsv4"] {
        let dir = tempfile::tempdir().unwrap();
        Fixture::new(name).unwrap().write(dir.path()).unwrap();
        let two = rows(&try_load_ranks(dir.path(), 2).unwrap(), 64);
        let model = try_load_context(dir.path(), 2, 2).unwrap();
        assert_eq!((model.spec().ranks, model.spec().context_ranks), (4, 2));
        for chunk in [64, 5] {
            assert!(rows(&model, chunk) == two, "{name} over 2 times 2 ranks, chunks of {chunk}");
        }
    }
}

/// From where to where a sequence's tokens are in a batch, by its number.
type Cut = dyn Fn(usize, &[u32]) -> (usize, usize);

/// Chunks of several sequences, some of which want no logits or the last ones, cut anywhere among the ranks, beside single tokens.
#[test]
fn a_batch_is_dealt_out_across_its_sequences() {
    each_kind(|name, path| {
        let run = |model: LoadedModel| {
            let page = 16usize.next_multiple_of(model.spec().page_multiple);
            let session = PoolSession::new(model, KvDtype::F16, page, 5 * 6);
            let places: Vec<Place> = (0..5).map(|seq| Place::shuffled(seq * 6, 6, seq)).collect();
            let ids: Vec<Vec<u32>> = (0..5).map(|seq| token_ids(&format!("dealt.{seq}"), 23 + 7 * seq, 256)).collect();
            let wants = [Want::Last, Want::None, Want::All, Want::Last, Want::Last];
            let batch = |cut: &Cut, wants: [Want; 5]| {
                let seqs: Vec<PooledChunk<'_>> = (0..5)
                    .map(|seq| {
                        let (start, end) = cut(seq, &ids[seq]);
                        PooledChunk {
                            tokens: &ids[seq][start..end],
                            start: start as u32,
                            logits: wants[seq],
                            pages: &places[seq].pages,
                            window: &places[seq].window,
                            slot: Some(places[seq].slot),
                            save: &[],
                        }
                    })
                    .collect();
                session.batch(&seqs)
            };
            let first = batch(&|_, ids| (0, ids.len() - 5), wants);
            // A decode step beside chunks.
            let second = batch(
                &|seq, ids| (ids.len() - 5, if seq % 2 == 0 { ids.len() - 4 } else { ids.len() }),
                [Want::Last; 5],
            );
            bits(&[first, second].concat())
        };
        let alone = run(try_load(path).unwrap());
        for size in [2, 4] {
            assert!(run(try_load_context(path, 1, size).unwrap()) == alone, "{name} over {size} ranks");
        }
    });
}

/// What each rank left in its pools is what one rank alone leaves: any of them may go on, and any may be stored.
#[test]
fn pages_of_all_ranks_are_the_same() {
    for name in ["qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v32", "dsv4"] {
        let dir = tempfile::tempdir().unwrap();
        Fixture::new(name).unwrap().write(dir.path()).unwrap();
        let alone = try_load(dir.path()).unwrap();
        let count = if alone.spec().page_multiple > 16 { 300 } else { 90 };
        let ids = token_ids("pages.tokens", count + 1, 256);
        let first = session(&alone, KvDtype::BF16, count + 16);
        let place = Place::first((count + 16).div_ceil(first.page));
        first.prompt(&ids[..count], 4096, &place);
        let dealt = session(&try_load_context(dir.path(), 1, 4).unwrap(), KvDtype::BF16, count + 16);
        dealt.prompt(&ids[..count], 50, &place);
        let next = |pools: &PoolSet| {
            let chunk = PooledChunk {
                tokens: &ids[count..],
                start: count as u32,
                logits: Want::Last,
                pages: &place.pages,
                window: &place.window,
                slot: Some(place.slot),
                save: &[],
            };
            let mut logits = Logits::new();
            alone.model.forward_pools(&PooledBatch { seqs: &[chunk] }, pools, &NoHooks, &mut logits).unwrap();
            logits.row(0).unwrap().iter().map(|value| value.to_bits()).collect::<Vec<u32>>()
        };
        let expected = next(&first.pools);
        for rank in 0..4 {
            // The model of one rank goes on from the pools of each.
            assert!(next(dealt.pools.rank(rank).unwrap()) == expected, "{name}, rank {rank}");
        }
    }
}

#[test]
fn a_saved_state_of_every_rank_is_gone_on_from() {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new("qwen3_next").unwrap().write(dir.path()).unwrap();
    let session = session(&try_load_context(dir.path(), 1, 4).unwrap(), KvDtype::F32, 96);
    let ids = token_ids("saved.tokens", 96, 256);
    let place = Place::first(6);
    let rows = session.chunk(&ids, 0, &place, Want::All, &[StateSave { tokens: 48, slot: 9 }]);
    session.pools.copy_slot(9, 3).unwrap();
    let other = Place { slot: 3, ..place };
    assert!(bits(&session.chunk(&ids[48..], 48, &other, Want::All, &[])) == bits(&rows[48..]));
}

#[test]
fn a_layer_that_predicts_further_tokens_is_dealt_out() {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new("dsv4").unwrap().write(dir.path()).unwrap();
    let ids = token_ids("draft.tokens", 21, 256);
    let drafted = |ranks: usize| {
        let model = try_load_context(dir.path(), 1, ranks).unwrap();
        let session = session(&model, KvDtype::F32, 128);
        let sizes = *session.pools.sizes();
        let draft = PoolSet::allocate_ranks(&devices(ranks), &model.spec().draft_pools, sizes).unwrap();
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
        let rows = |logits: &Logits| (0..20).map(|row| logits.row(row).unwrap().to_vec()).collect::<Vec<_>>();
        (bits(&rows(&logits)), bits(&rows(&further)))
    };
    let alone = drafted(1);
    assert!(drafted(2) == alone && drafted(4) == alone);
}

/// Stops one rank before a layer.
struct StopOne;

impl LayerHooks for StopOne {
    fn before_layer_of(&self, rank: usize, layer: usize) -> Result<(), ModelError> {
        assert!(!(rank == 0 && layer == 2), "rank 0 goes on without rank 3");
        if (rank, layer) == (3, 1) {
            return Err(ModelError::Hook { layer, reason: "its pages did not come".to_owned() });
        }
        Ok(())
    }
}

#[test]
fn a_rank_that_fails_ends_the_pass_on_all_and_the_next_one_works() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::new(TinyKind::Qwen3).write_hf(dir.path()).unwrap();
    for (shares, context) in [(1, 4), (2, 2)] {
        let model = try_load_context(dir.path(), shares, context).unwrap();
        let session = session(&model, KvDtype::F32, 32);
        let ids = token_ids("stopped.tokens", 20, 256);
        let chunk = PooledChunk {
            tokens: &ids,
            start: 0,
            logits: Want::Last,
            pages: &[0, 1],
            window: &[],
            slot: None,
            save: &[],
        };
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
}

#[test]
fn ranks_that_the_parts_do_not_divide_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::new(TinyKind::Llama).write_hf(dir.path()).unwrap();
    let devices = devices(3);
    let options =
        LoadOptions { further_ranks: devices[1..].to_vec(), context_ranks: 2, ..LoadOptions::new(devices[0].clone()) };
    let error = load(dir.path(), &options).unwrap_err().to_string();
    assert!(error.ends_with("can't be spread over 3 ranks: 2 parts of the rows do not divide them"), "{error}");
}
