//! Batches that break a rule are refused with the reason, and the model goes on.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Session, pages, try_load};
use kvdock_kernels::KvDtype;
use kvdock_models::testing::{TinyKind, TinyModel};
use kvdock_models::{Batch, LayerHooks, Logits, ModelError, NoHooks, SeqChunk, Want};

fn session() -> Session {
    let dir = tempfile::tempdir().unwrap();
    let model = TinyModel { context: 40, ..TinyModel::new(TinyKind::Qwen3) };
    model.write_hf(dir.path()).unwrap();
    Session::new(try_load(dir.path()).unwrap(), KvDtype::F16, 4)
}

fn refusal(session: &Session, tokens: &[u32], start: u32, pages: &[u32]) -> String {
    let seqs = [SeqChunk { tokens, start, pages, logits: Want::Last }];
    session
        .loaded
        .model
        .forward(&Batch { seqs: &seqs }, session.pool.as_ref(), &NoHooks, &mut Logits::new())
        .unwrap_err()
        .to_string()
}

#[test]
fn each_rule_has_its_own_words() {
    let session = session();
    let table = pages(3);
    let cases: [(&[u32], u32, &[u32], &str); 5] = [
        (&[], 0, &table, "no tokens"),
        (&[256], 0, &table, "token 256 is not below the vocabulary's size, 256"),
        (&[1], 40, &table, "it would be 41 tokens long, the model's context holds 40"),
        (&[1], 32, &table[..2], "2 pages of 16 tokens do not hold 33 tokens"),
        (&[1], 0, &[99], "99"),
    ];
    for (tokens, start, pages, expected) in cases {
        let message = refusal(&session, tokens, start, pages);
        assert!(message.contains(expected), "{message}");
    }
    assert_eq!(session.chunk(&[1, 2, 3], 0, &table, Want::Last).len(), 1);
}

#[test]
fn a_pool_of_another_shape_is_refused() {
    let mut session = session();
    let mut spec = *session.pool.spec();
    spec.layers += 1;
    session.pool = common::device().alloc_kv_pool(spec).unwrap();
    let message = refusal(&session, &[1], 0, &[0]);
    assert!(message.contains("the pool holds 4 layers"), "{message}");
}

#[test]
fn an_empty_batch_gives_no_rows() {
    assert!(session().chunks(&[]).is_empty());
}

struct StopAt(usize);

impl LayerHooks for StopAt {
    fn before_layer(&self, layer: usize) -> Result<(), ModelError> {
        if layer < self.0 {
            return Ok(());
        }
        Err(ModelError::Hook { layer, reason: "its pages did not come".to_owned() })
    }
}

#[test]
fn a_hook_stops_the_pass_before_its_layer() {
    let session = session();
    let seqs = [SeqChunk { tokens: &[1, 2], start: 0, pages: &[0], logits: Want::All }];
    let run = |layer| {
        session.loaded.model.forward(&Batch { seqs: &seqs }, session.pool.as_ref(), &StopAt(layer), &mut Logits::new())
    };
    assert_eq!(run(1).unwrap_err().to_string(), "stopped before layer 1: its pages did not come");
    run(3).unwrap();
}
