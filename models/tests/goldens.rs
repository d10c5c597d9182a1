//! The tiny models against values made in float64 (goldens/make_tiny.py).
#![allow(clippy::unwrap_used)]

mod common;

use common::{PAGE, Session, log_sum_exp, pages, try_load};
use kvdock_kernels::KvDtype;
use kvdock_models::testing::{TinyKind, TinyModel, token_ids};
use kvdock_models::{LoadedModel, WeightFormat};

/// What f32 may be away from float64 on these models.
const TOLERANCE: f64 = 2e-4;

/// What is known of the logits at one position.
struct Position {
    at: usize,
    /// The likeliest tokens, in order.
    top: &'static [(u32, f64)],
    log_sum_exp: f64,
    /// Logits of the tokens 0, 1, 2.
    first: [f64; 3],
}

struct Golden {
    positions: &'static [Position],
    greedy: &'static [u32],
}

const LLAMA: Golden = Golden {
    positions: &[
        Position {
            at: 0,
            top: &[(80, 13.30206), (47, 11.31767), (46, 11.17714)],
            log_sum_exp: 13.72208,
            first: [1.35374, -3.35746, 1.28804],
        },
        Position {
            at: 15,
            top: &[(23, 17.25106), (8, 13.36196), (152, 12.50781)],
            log_sum_exp: 17.30599,
            first: [10.90333, -2.45669, -8.3439],
        },
        Position {
            at: 63,
            top: &[(22, 11.58867), (84, 10.78538), (126, 10.55330)],
            log_sum_exp: 12.52327,
            first: [0.93542, -0.39788, -3.85065],
        },
        Position {
            at: 95,
            top: &[(191, 14.67092), (196, 13.77410), (76, 13.52972)],
            log_sum_exp: 15.27585,
            first: [3.52108, 1.44751, -7.83312],
        },
    ],
    greedy: &[191, 62, 62, 62, 62, 62, 62, 62],
};

const QWEN2: Golden = Golden {
    positions: &[
        Position {
            at: 0,
            top: &[(54, 5.18897), (4, 4.53954), (203, 4.20314)],
            log_sum_exp: 7.25952,
            first: [-1.41681, -4.40162, -0.31355],
        },
        Position {
            at: 15,
            top: &[(120, 5.78564), (4, 4.83509), (142, 4.55198)],
            log_sum_exp: 7.49864,
            first: [1.10438, -5.07649, -1.07657],
        },
        Position {
            at: 63,
            top: &[(4, 6.53889), (253, 6.31693), (18, 6.18939)],
            log_sum_exp: 8.14702,
            first: [-0.80146, 0.98928, -5.83716],
        },
        Position {
            at: 95,
            top: &[(81, 5.77663), (118, 4.59301), (133, 4.58983)],
            log_sum_exp: 7.39913,
            first: [-1.37839, -2.56592, -0.95527],
        },
    ],
    greedy: &[81, 49, 34, 222, 75, 12, 81, 160],
};

const QWEN3: Golden = Golden {
    positions: &[
        Position {
            at: 0,
            top: &[(245, 6.38646), (220, 4.90613), (203, 4.49908)],
            log_sum_exp: 7.57084,
            first: [-1.94079, 0.0556, 1.44521],
        },
        Position {
            at: 15,
            top: &[(191, 5.30373), (1, 4.65913), (180, 4.61652)],
            log_sum_exp: 7.31948,
            first: [0.41171, 4.65913, 0.2363],
        },
        Position {
            at: 63,
            top: &[(38, 5.12615), (81, 4.79086), (73, 4.76846)],
            log_sum_exp: 7.33585,
            first: [-1.19544, -0.9508, 2.33343],
        },
        Position {
            at: 95,
            top: &[(109, 5.52099), (1, 5.45139), (229, 5.29410)],
            log_sum_exp: 7.80902,
            first: [-1.0172, 5.45139, -1.3511],
        },
    ],
    greedy: &[109, 35, 16, 137, 55, 174, 78, 239],
};

/// The tiny Llama with stretched rotary embeddings.
const LLAMA3_ROPE: Golden = Golden {
    positions: &[
        Position {
            at: 15,
            top: &[(167, 13.53793), (57, 13.21415), (23, 12.91266)],
            log_sum_exp: 14.62434,
            first: [5.43279, -4.10365, -9.87095],
        },
        Position {
            at: 95,
            top: &[(191, 12.80173), (117, 10.37219), (147, 9.09981)],
            log_sum_exp: 12.99349,
            first: [4.58919, -0.20213, -8.72213],
        },
    ],
    greedy: &[191, 62, 62, 62, 62, 62, 62, 62],
};

const YARN_ROPE: Golden = Golden {
    positions: &[
        Position {
            at: 15,
            top: &[(167, 15.59949), (57, 14.97697), (23, 13.95713)],
            log_sum_exp: 16.25439,
            first: [7.01234, -2.54137, -10.80477],
        },
        Position {
            at: 95,
            top: &[(191, 15.46427), (117, 10.25013), (62, 9.46347)],
            log_sum_exp: 15.48328,
            first: [7.10731, -2.25638, -6.9844],
        },
    ],
    greedy: &[191, 165, 165, 59, 239, 239, 239, 239],
};

const LINEAR_ROPE: Golden = Golden {
    positions: &[
        Position {
            at: 15,
            top: &[(142, 14.62240), (167, 13.99168), (191, 13.93824)],
            log_sum_exp: 15.44114,
            first: [8.53897, -5.2444, -10.1428],
        },
        Position {
            at: 95,
            top: &[(147, 10.94251), (220, 9.60850), (8, 8.98132)],
            log_sum_exp: 11.67467,
            first: [2.86194, -2.07064, -6.20951],
        },
    ],
    greedy: &[147, 147, 147, 147, 147, 147, 147, 147],
};

fn golden(kind: TinyKind) -> &'static Golden {
    match kind {
        TinyKind::Llama => &LLAMA,
        TinyKind::Qwen2 => &QWEN2,
        TinyKind::Qwen3 => &QWEN3,
    }
}

fn agrees(loaded: LoadedModel, kind: TinyKind, golden: &Golden) {
    let ids = token_ids(kind.prompt(), 96, 256);
    let session = Session::new(loaded, KvDtype::F32, 8);
    let pages = pages(104usize.div_ceil(PAGE));
    let rows = session.prompt(&ids, 96, &pages);
    assert_eq!(rows.len(), 96);
    let near = |what: &str, at: usize, got: f64, expected: f64| {
        assert!((got - expected).abs() < TOLERANCE, "{} t{at} {what}: {got} is not {expected}", kind.name());
    };
    for position in golden.positions {
        let row = &rows[position.at];
        let mut order: Vec<u32> = (0..row.len() as u32).collect();
        order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
        let top: Vec<u32> = position.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(order[..top.len()], top, "{} t{}", kind.name(), position.at);
        for &(id, logit) in position.top {
            near("top", position.at, row[id as usize].into(), logit);
        }
        near("log-sum-exp", position.at, log_sum_exp(row), position.log_sum_exp);
        for (id, logit) in position.first.iter().enumerate() {
            near("logit", position.at, row[id].into(), *logit);
        }
    }
    assert_eq!(session.greedy(&ids, golden.greedy.len(), &pages), golden.greedy);
}

#[test]
fn hugging_face_folders_agree_with_the_goldens() {
    for kind in TinyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        TinyModel::new(kind).write_hf(dir.path()).unwrap();
        agrees(try_load(dir.path()).unwrap(), kind, golden(kind));
    }
}

#[test]
fn shards_make_the_same_model_as_one_file() {
    for kind in TinyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        TinyModel::new(kind).write_hf_as(dir.path(), WeightFormat::F32, 3).unwrap();
        assert!(dir.path().join("model.safetensors.index.json").is_file());
        agrees(try_load(dir.path()).unwrap(), kind, golden(kind));
    }
}

#[test]
fn gguf_files_agree_with_the_goldens() {
    for kind in TinyKind::ALL {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tiny.gguf");
        TinyModel::new(kind).write_gguf(&file, WeightFormat::F32).unwrap();
        agrees(try_load(&file).unwrap(), kind, golden(kind));
    }
}

#[test]
fn stretched_rotary_embeddings_agree_with_the_goldens() {
    for (rope, golden) in [("llama3", &LLAMA3_ROPE), ("yarn", &YARN_ROPE), ("linear", &LINEAR_ROPE)] {
        let dir = tempfile::tempdir().unwrap();
        TinyModel::stretched(rope).write_hf(dir.path()).unwrap();
        agrees(try_load(dir.path()).unwrap(), TinyKind::Llama, golden);
    }
}

/// Each weight format gives the logits of the same values stored as F32: loading, unpacking and the
/// order of q and k rows are right for it.
#[test]
fn every_weight_format_runs_as_its_dequantized_twin() {
    let formats = [
        WeightFormat::F16,
        WeightFormat::BF16,
        WeightFormat::Q8_0,
        WeightFormat::Q4_0,
        WeightFormat::Q4_1,
        WeightFormat::Q4_K,
        WeightFormat::Q5_K,
        WeightFormat::Q6_K,
    ];
    let ids = token_ids("twin.tokens", 24, 256);
    for kind in TinyKind::ALL {
        for format in formats {
            let dir = tempfile::tempdir().unwrap();
            let (packed, twin) = (dir.path().join("packed.gguf"), dir.path().join("twin.gguf"));
            let model = TinyModel::wide(kind);
            model.write_gguf(&packed, format).unwrap();
            model.write_gguf_dequantized(&twin, format).unwrap();
            let rows = |path| Session::new(try_load(path).unwrap(), KvDtype::F32, 2).prompt(&ids, 24, &pages(2));
            for (got, expected) in rows(&packed).iter().flatten().zip(rows(&twin).iter().flatten()) {
                let bound = 1e-4 * expected.abs().max(1.0);
                assert!((got - expected).abs() <= bound, "{} {}: {got} is not {expected}", kind.name(), format.name());
            }
        }
    }
}
