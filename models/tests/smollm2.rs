//! The real model against values made in float64 on its dequantised weights (goldens/make_smollm2.py).
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;

use common::{PAGE, Session, argmax, log_sum_exp, pages, try_load};
use kvdock_kernels::KvDtype;
use kvdock_models::testing::{TEST_MODEL_SHA256, test_model_path};
use kvdock_models::{SeqChunk, Want};

fn model() -> PathBuf {
    test_model_path().unwrap_or_else(|why| panic!("{why}"))
}

/// Below this margin of the best token over the second, f32 may choose the other one.
const MARGIN: f64 = 0.1;

struct Case {
    text: &'static str,
    ids: &'static [u32],
    /// The likeliest first tokens and their log-probabilities.
    top: [(u32, f64); 5],
    greedy: [u32; 16],
    margins: [f64; 16],
}

const CASES: [Case; 5] = [
    Case {
        text: "The capital of France is",
        ids: &[504, 3575, 282, 4649, 314],
        top: [(7042, -0.258082), (260, -2.740752), (4528, -4.384367), (2250, -4.619875), (1315, -4.677828)],
        greedy: [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33],
        margins: [
            2.4827, 1.2784, 1.4263, 1.3376, 0.8387, 0.2198, 1.6337, 1.96, 2.1848, 0.3978, 0.2916, 0.3738, 0.1618,
            2.3417, 1.0429, 0.1453,
        ],
    },
    Case {
        text: "Once upon a time, in a village by the sea, there lived",
        ids: &[6403, 1980, 253, 655, 28, 281, 253, 6560, 411, 260, 3426, 28, 665, 4161],
        top: [(253, -0.102613), (354, -3.194321), (827, -3.610158), (1296, -5.19789), (800, -5.69585)],
        greedy: [253, 9357, 1573, 555, 3365, 525, 13907, 30, 909, 436, 253, 10632, 42265, 284, 253, 10632],
        margins: [
            3.0917, 0.0671, 0.2651, 0.2039, 3.4776, 0.4016, 0.2373, 0.328, 1.0483, 0.668, 0.873, 0.3252, 1.2266,
            0.2207, 0.0097, 0.2629,
        ],
    },
    Case {
        text: "def fibonacci(n):\n",
        ids: &[1604, 3987, 46477, 24, 94, 727, 198],
        top: [(198, -1.419509), (1604, -1.488739), (3725, -2.597979), (19, -2.686426), (3272, -3.484461)],
        greedy: [198, 1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 10204, 216, 33, 42, 448, 1003],
        margins: [
            0.0692, 2.1896, 4.4061, 3.2306, 2.9412, 2.8675, 2.9831, 2.9468, 2.6633, 3.9072, 0.4859, 6.9827, 0.3999,
            4.9247, 5.2317, 6.8164,
        ],
    },
    Case {
        text: "1, 2, 3, 4, 5,",
        ids: &[33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
        top: [(216, -0.114015), (284, -3.277122), (198, -4.633051), (256, -4.684128), (4563, -5.2642)],
        greedy: [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28],
        margins: [
            3.1631, 3.9907, 3.6457, 3.6842, 3.5803, 4.7381, 4.0347, 5.8294, 4.6999, 3.6823, 5.2957, 3.6372, 3.125,
            6.0502, 6.0272, 1.9015,
        ],
    },
    Case {
        text: CHAT,
        ids: &[
            1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
            2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
        ],
        top: [(504, -1.882714), (60, -1.964813), (15319, -2.265675), (2219, -2.806421), (7026, -2.893463)],
        greedy: [504, 3575, 282, 4649, 314, 7042, 30, 2, 198, 2, 1, 9690, 198, 2, 198, 1],
        margins: [
            0.0821, 4.6617, 4.7483, 5.0446, 3.3734, 4.653, 0.2976, 2.9281, 7.5479, 2.6186, 7.4042, 13.0459, 7.8228,
            1.5778, 7.7505, 6.1721,
        ],
    },
];

const CHAT: &str = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
    <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";

#[test]
fn logits_agree_with_float64() {
    let session = Session::new(try_load(&model()).unwrap(), KvDtype::F32, 8);
    let tokenizer = &session.loaded.tokenizer;
    let pages = pages(64usize.div_ceil(PAGE));
    for case in &CASES {
        let ids = tokenizer.encode(case.text, true).unwrap();
        assert_eq!(ids, case.ids, "{:?}", case.text);
        let mut row = session.chunk(&ids, 0, &pages, Want::Last).remove(0);
        let total = log_sum_exp(&row);
        for (id, expected) in case.top {
            let got = f64::from(row[id as usize]) - total;
            assert!((got - expected).abs() < 1e-3, "{:?}: token {id}: {got} is not {expected}", case.text);
        }
        let mut certain = true;
        for (step, (&id, &margin)) in case.greedy.iter().zip(&case.margins).enumerate() {
            certain &= margin >= MARGIN;
            // Past an uncertain step the reference's token is fed, so that later steps count as well.
            if margin >= MARGIN {
                assert_eq!(argmax(&row), id, "{:?}: step {step}", case.text);
            }
            row = session.chunk(&[id], ids.len() + step, &pages, Want::Last).remove(0);
        }
        if certain {
            assert_eq!(session.greedy(&ids, 16, &pages), case.greedy, "{:?}", case.text);
        }
    }
}

/// The real widths (heads of 64, rows of 576 and 1536) take other paths through the kernels than the tiny models'.
#[test]
fn chunks_and_company_change_no_bit() {
    let session = Session::new(try_load(&model()).unwrap(), KvDtype::F16, 40);
    let ids: Vec<u32> = (0..200).map(|index| (index * 7919 + 13) % 49152).collect();
    let table = pages(ids.len().div_ceil(PAGE));
    let last = |rows: Vec<Vec<f32>>| common::bits(&rows[rows.len() - 1..]);
    let whole = last(session.chunk(&ids, 0, &table, Want::Last));
    for size in [16, 33, 64] {
        let mut row = Vec::new();
        for (index, chunk) in ids.chunks(size).enumerate() {
            row = session.chunk(chunk, index * size, &table, Want::Last);
        }
        assert!(last(row) == whole, "chunks of {size}");
    }
    // The last tokens one by one, beside a second sequence.
    session.chunk(&ids[..195], 0, &table, Want::None);
    let other: Vec<u32> = (20..40).collect();
    let mut row = Vec::new();
    for at in 195..200 {
        let chunk = |tokens, start, pages, logits| SeqChunk { tokens, start, pages, logits };
        row = session.chunks(&[
            chunk(&ids[at - 195..at - 100], 0, other.as_slice(), Want::None),
            chunk(&ids[at..at + 1], at as u32, table.as_slice(), Want::Last),
        ]);
    }
    assert!(last(row) == whole, "token by token");
}

#[test]
fn the_chat_template_of_the_file_makes_the_reference_prompt() {
    let loaded = try_load(&model()).unwrap();
    let messages = serde_json::json!([{"role": "user", "content": "What is the capital of France?"}]);
    let text = loaded.template.as_ref().unwrap().render(&messages, true, &serde_json::Map::new()).unwrap();
    assert_eq!(text, CHAT);
    let messages = serde_json::json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]);
    let text = loaded.template.unwrap().render(&messages, false, &serde_json::Map::new()).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    );
}

#[test]
fn the_spec_says_what_the_file_says() {
    let loaded = try_load(&model()).unwrap();
    let spec = loaded.spec();
    assert_eq!(spec.architecture, "llama");
    assert_eq!(spec.family, "llama");
    assert_eq!(spec.vocab_size, 49152);
    assert_eq!(spec.context_length, 8192);
    assert_eq!((spec.hidden, spec.layers), (576, 30));
    let kv = spec.one_pool().unwrap();
    assert_eq!((kv.layers, kv.kv_heads, kv.head_dim_k, kv.head_dim_v), (30, 3, 64, 64));
    assert_eq!(spec.bos, Some(1));
    assert_eq!(spec.eos, [2]);
    assert_eq!(spec.weights_digest_hex(), TEST_MODEL_SHA256);
    assert_eq!(spec.numerics_id, common::device().numerics_id());
}

#[test]
fn progress_rises_to_the_whole() {
    let seen = std::cell::RefCell::new(Vec::new());
    let report = |done, total| seen.borrow_mut().push((done, total));
    let options = kvdock_models::LoadOptions { progress: &report, ..kvdock_models::LoadOptions::new(common::device()) };
    kvdock_models::load(&model(), &options).unwrap();
    let seen = seen.into_inner();
    assert!(seen.len() > 100, "{} reports", seen.len());
    assert!(seen.windows(2).all(|pair| pair[0].0 <= pair[1].0));
    assert!(seen.iter().all(|(done, total)| done <= total && *total == 98_362_432));
    assert_eq!(seen.last(), Some(&(98_362_432, 98_362_432)));
}
