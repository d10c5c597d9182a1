//! The law of bits: a row of logits depends on the tokens of its sequence alone.
#![allow(clippy::unwrap_used)]

mod common;

use common::{PAGE, Session, bits, pages, try_load};
use kvdock_kernels::{HostPage, KvDtype};
use kvdock_models::testing::{TinyKind, TinyModel, token_ids};
use kvdock_models::{LoadedModel, SeqChunk, Want, WeightFormat};

const DTYPES: [KvDtype; 3] = [KvDtype::F16, KvDtype::BF16, KvDtype::F32];
const TOKENS: usize = 150;

/// Every family, with plain and with quantised weights.
fn models() -> Vec<(String, LoadedModel)> {
    let mut models = Vec::new();
    for kind in TinyKind::ALL {
        for format in [WeightFormat::F32, WeightFormat::Q4_1, WeightFormat::Q8_0] {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("tiny.gguf");
            TinyModel::new(kind).write_gguf(&file, format).unwrap();
            let name = format!("{} {}", kind.name(), format.name());
            models.push((name, try_load(&file).unwrap()));
        }
    }
    models
}

#[test]
fn chunks_of_any_size_give_the_same_bits() {
    let ids = token_ids("chunks.tokens", TOKENS, 256);
    for (name, model) in models() {
        for dtype in DTYPES {
            let session = Session::new(model.clone(), dtype, 32);
            let table = pages(TOKENS.div_ceil(PAGE));
            let whole = bits(&session.prompt(&ids, TOKENS, &table));
            for size in [1, 7, 16, 64] {
                let cut = bits(&session.prompt(&ids, size, &table));
                assert!(cut == whole, "{name} {dtype:?}: chunks of {size}");
            }
        }
    }
}

#[test]
fn pages_in_any_order_and_old_contents_do_not_matter() {
    let ids = token_ids("pages.tokens", TOKENS, 256);
    for (name, model) in models() {
        for dtype in DTYPES {
            let session = Session::new(model.clone(), dtype, 32);
            let count = TOKENS.div_ceil(PAGE) as u32;
            let ordered = bits(&session.prompt(&ids, 32, &pages(count as usize)));
            // Other pages of a pool that other tokens have been written to.
            let other = token_ids("other.tokens", 32 * PAGE, 256);
            session.prompt(&other, 64, &pages(32));
            let shuffled: Vec<u32> = (0..count).map(|page| (page * 7 + 3) % 32).collect();
            let moved = bits(&session.prompt(&ids, 32, &shuffled));
            assert!(moved == ordered, "{name} {dtype:?}");
        }
    }
}

/// Writes not-a-number into every element of every page.
fn poison(session: &Session) {
    let spec = *session.pool.spec();
    let token = spec.head_dim_k * spec.dtype.bytes();
    let head = token * spec.page_tokens;
    let layer = head * spec.kv_heads;
    let mut k = vec![0xFFu8; spec.page_k_bytes()];
    let mut v = vec![0xFFu8; spec.page_v_bytes()];
    let page = HostPage {
        k: k.as_mut_ptr(),
        v: v.as_mut_ptr(),
        k_layer_stride: layer,
        k_head_stride: head,
        k_token_stride: token,
        v_layer_stride: layer,
        v_head_stride: head,
        v_token_stride: token,
    };
    for number in 0..spec.pages as u32 {
        // SAFETY: keys and values of these models are alike, so the strides stay inside both vectors, which
        // live through the call; no pass is running.
        unsafe { session.pool.copy_page_in(number, &page) }.unwrap();
    }
}

#[test]
fn what_pages_held_before_is_never_read() {
    let ids = token_ids("poison.tokens", TOKENS, 256);
    for (name, model) in models() {
        for dtype in DTYPES {
            let session = Session::new(model.clone(), dtype, 12);
            let table = pages(TOKENS.div_ceil(PAGE));
            let clean = bits(&session.prompt(&ids, 64, &table));
            poison(&session);
            assert!(bits(&session.prompt(&ids, 64, &table)) == clean, "{name} {dtype:?}");
        }
    }
}

#[test]
fn passes_at_the_same_time_give_the_same_bits() {
    let prompts: Vec<Vec<u32>> = (0..3).map(|seq| token_ids(&format!("parallel.{seq}"), 60 + seq, 256)).collect();
    for (name, model) in models() {
        let session = Session::new(model, KvDtype::F16, 12);
        let run = |seq: usize| {
            let table: Vec<u32> = (seq as u32 * 4..seq as u32 * 4 + 4).collect();
            bits(&session.prompt(&prompts[seq], 9, &table))
        };
        let alone: Vec<_> = (0..3).map(run).collect();
        std::thread::scope(|scope| {
            let run = &run;
            let runs: Vec<_> =
                (0..3).map(|seq| scope.spawn(move || (0..5).map(|_| run(seq)).collect::<Vec<_>>())).collect();
            for (seq, handle) in runs.into_iter().enumerate() {
                let results = handle.join().unwrap();
                assert!(results.iter().all(|rows| *rows == alone[seq]), "{name}: sequence {seq}");
            }
        });
    }
}

#[test]
fn alone_and_among_seven_others_give_the_same_bits() {
    const SEQS: usize = 8;
    const STEP: usize = 19;
    let prompts: Vec<Vec<u32>> = (0..SEQS).map(|seq| token_ids(&format!("batch.{seq}"), 40 + 13 * seq, 256)).collect();
    for (name, model) in models() {
        let session = Session::new(model.clone(), KvDtype::F16, 100);
        let tables: Vec<Vec<u32>> = (0..SEQS as u32).map(|seq| (0..12).map(|page| seq * 12 + page).collect()).collect();
        let alone: Vec<_> =
            prompts.iter().zip(&tables).map(|(ids, table)| bits(&session.prompt(ids, ids.len(), table))).collect();
        // All together in steps, each sequence with a chunk of its own length, some in prefill, some token by token.
        let mut done = [0; SEQS];
        let mut together = vec![Vec::new(); SEQS];
        while done.iter().zip(&prompts).any(|(done, ids)| *done < ids.len()) {
            let mut chunks = Vec::new();
            let mut owners = Vec::new();
            for (seq, ids) in prompts.iter().enumerate() {
                let length = if seq % 3 == 0 { 1 } else { STEP - seq };
                let end = (done[seq] + length).min(ids.len());
                if done[seq] < end {
                    chunks.push(SeqChunk {
                        tokens: &ids[done[seq]..end],
                        start: done[seq] as u32,
                        pages: &tables[seq],
                        logits: Want::All,
                    });
                    owners.push((seq, end - done[seq]));
                    done[seq] = end;
                }
            }
            let mut rows = bits(&session.chunks(&chunks)).into_iter();
            for (seq, count) in owners {
                together[seq].extend(rows.by_ref().take(count));
            }
        }
        for seq in 0..SEQS {
            assert!(together[seq] == alone[seq], "{name}: sequence {seq}");
        }
    }
}

#[test]
fn asking_for_all_rows_or_the_last_gives_the_same_bits() {
    let ids = token_ids("want.tokens", TOKENS, 256);
    for (name, model) in models() {
        let session = Session::new(model, KvDtype::BF16, 16);
        let table = pages(TOKENS.div_ceil(PAGE));
        let all = session.chunk(&ids, 0, &table, Want::All);
        let last = session.chunk(&ids, 0, &table, Want::Last);
        assert_eq!((all.len(), last.len()), (TOKENS, 1), "{name}");
        assert!(bits(&all)[TOKENS - 1..] == bits(&last), "{name}");
        // Without any logits the cache must be the same: the next token says so.
        let next = bits(&session.chunk(&[5], TOKENS, &table, Want::Last));
        assert!(session.chunk(&ids, 0, &table, Want::None).is_empty());
        assert!(bits(&session.chunk(&[5], TOKENS, &table, Want::Last)) == next, "{name}");
    }
}

#[test]
fn sequences_that_want_different_rows_may_share_a_batch() {
    let prompts: Vec<Vec<u32>> = (0..5).map(|seq| token_ids(&format!("mixed.{seq}"), 20 + 9 * seq, 256)).collect();
    let wants = [Want::Last, Want::None, Want::All, Want::Last, Want::None];
    for (name, model) in models() {
        let session = Session::new(model, KvDtype::F16, 30);
        let tables: Vec<Vec<u32>> = (0..5).map(|seq| (seq * 6..seq * 6 + 6).collect()).collect();
        let alone: Vec<_> = prompts
            .iter()
            .zip(&tables)
            .zip(wants)
            .flat_map(|((ids, table), want)| bits(&session.chunk(ids, 0, table, want)))
            .collect();
        let chunks: Vec<SeqChunk<'_>> = prompts
            .iter()
            .zip(&tables)
            .zip(wants)
            .map(|((ids, table), logits)| SeqChunk { tokens: ids, start: 0, pages: table, logits })
            .collect();
        let together = bits(&session.chunks(&chunks));
        assert_eq!(together.len(), 1 + 38 + 1);
        assert!(together == alone, "{name}");
    }
}

#[test]
fn a_prefix_that_another_sequence_wrote_serves_as_well_as_its_own() {
    let shared = token_ids("shared.tokens", 4 * PAGE, 256);
    for (name, model) in models() {
        let session = Session::new(model, KvDtype::F16, 32);
        let tail = token_ids("tail.tokens", 30, 256);
        let whole: Vec<u32> = [shared.as_slice(), &tail].concat();
        let cold = bits(&session.prompt(&whole, whole.len(), &[20, 21, 22, 23, 24, 25]));
        session.prompt(&shared, 17, &[0, 1, 2, 3]);
        let hit = session.chunk(&tail, shared.len(), &[0, 1, 2, 3, 10, 11], Want::All);
        assert!(bits(&hit) == cold[shared.len()..], "{name}");
    }
}

/// Without rounding before use, a chunk's own keys would be sharper than the same keys read back.
#[test]
fn narrow_pools_differ_from_wide_ones() {
    let ids = token_ids("round.tokens", 40, 256);
    for (name, model) in models() {
        let rows = |dtype| Session::new(model.clone(), dtype, 4).chunk(&ids, 0, &pages(3), Want::Last);
        assert!(bits(&rows(KvDtype::BF16)) != bits(&rows(KvDtype::F32)), "{name}");
    }
}
