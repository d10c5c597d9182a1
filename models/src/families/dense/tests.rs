//! The residual stream of the tiny models against values made in float64 (goldens/make_tiny.py).

use std::path::Path;
use std::sync::Arc;

use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype};

use super::config::{Config, Variant};
use super::run::DenseModel;
use super::weights::{Held, Weights};
use super::{LLAMA, QWEN2, QWEN3};
use crate::checkpoint::Checkpoint;
use crate::digest::Progress;
use crate::families::Build;
use crate::families::blocks::share::Share;
use crate::hf::HfFolder;
use crate::testing::{TinyKind, TinyModel, token_ids};
use crate::{Batch, GenerationDefaults, KvGeometry, Logits, ModelSpec, NoHooks, SeqChunk, Want};

fn model(dir: &Path, kind: TinyKind, variant: &'static Variant, device: &Arc<dyn Device>) -> DenseModel {
    let tiny = TinyModel::new(kind);
    tiny.write_hf(dir).unwrap();
    let folder = HfFolder::open(dir).unwrap();
    let checkpoint = Checkpoint::Hf(&folder);
    let config = Config::read(&checkpoint, variant, 256).unwrap();
    let progress = Progress::new(&|_, _| {}, 1);
    let share = Share::default();
    let build =
        Build { checkpoint: &checkpoint, device, tokens: 256, packed_rows: false, share: &share, progress: &progress };
    let held = Held::of(&build, &share, &config).unwrap();
    let weights = Weights::upload(&build, &config, &held, variant).unwrap();
    let kv = KvGeometry {
        layers: tiny.layers,
        kv_heads: tiny.kv_heads,
        head_dim_k: tiny.head_dim,
        head_dim_v: tiny.head_dim,
    };
    let spec = ModelSpec {
        architecture: kind.architecture().to_owned(),
        family: kind.name(),
        name: None,
        vocab_size: tiny.vocab,
        context_length: tiny.context,
        hidden: tiny.hidden,
        layers: tiny.layers,
        kv: Some(kv),
        pools: vec![kv.declared()],
        draft_pools: Vec::new(),
        page_multiple: 1,
        ranks: 1,
        context_ranks: 1,
        bos: None,
        eos: Vec::new(),
        generation: GenerationDefaults::default(),
        weights_digest: [0; 32],
        numerics_id: device.numerics_id().to_owned(),
    };
    DenseModel::new(spec, config, weights, Arc::clone(device), share)
}

#[test]
fn residuals_agree_with_the_goldens_layer_by_layer() {
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
    let goldens: [(TinyKind, &'static Variant, [[f32; 3]; 3]); 3] = [
        (
            TinyKind::Llama,
            &LLAMA,
            [[-5.11709, -0.82334, -1.14105], [-6.01201, -0.39469, -1.85073], [-6.50156, -1.82924, -3.7968]],
        ),
        (
            TinyKind::Qwen2,
            &QWEN2,
            [[2.25837, 0.31952, -0.5967], [3.84254, -1.14477, -0.55239], [1.25594, 0.1633, -3.43743]],
        ),
        (
            TinyKind::Qwen3,
            &QWEN3,
            [[-2.28157, -3.35589, 0.76691], [-2.28377, -5.28516, 0.16621], [-2.1291, -3.76885, 4.11534]],
        ),
    ];
    for (kind, variant, expected) in goldens {
        let dir = tempfile::tempdir().unwrap();
        let model = model(dir.path(), kind, variant, &device);
        let pool = device.alloc_kv_pool(crate::Model::spec(&model).kv.unwrap().pool(KvDtype::F32, 16, 6)).unwrap();
        let tokens = token_ids(kind.prompt(), 96, 256);
        let seqs = [SeqChunk { tokens: &tokens, start: 0, pages: &[0, 1, 2, 3, 4, 5], logits: Want::None }];
        let mut seen = Vec::new();
        let mut trace = |layer: usize, rows: &[f32]| seen.push((layer, rows[95 * 64..][..3].to_vec()));
        model.run(&Batch { seqs: &seqs }, pool.as_ref(), &NoHooks, &mut Logits::new(), Some(&mut trace)).unwrap();
        assert_eq!(seen.len(), 3);
        for (layer, got) in seen {
            for (got, expected) in got.iter().zip(expected[layer]) {
                assert!((got - expected).abs() < 5e-5, "{} layer {layer}: {got} is not {expected}", kind.name());
            }
        }
    }
}
