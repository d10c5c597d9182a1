//! The shapes that files compiled by macros are checked in.

/// A file with macros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    pub file: String,
    pub macros: Vec<String>,
}

/// Names of the macros of a file, and their values for real models: Llama and Qwen (128), SmolLM and gpt-oss (64), Qwen3.5 (256), MiMo (192, 128), with
/// pools of bf16 (2), f16 (1) and f32 (0).
fn shapes(file: &str) -> (&'static [&'static str], &'static [&'static [u32]]) {
    match file {
        "decode.cu" => (
            &["KV_TYPE", "DIM_K", "DIM_V", "GROUP"],
            &[
                &[2, 128, 128, 8],
                &[1, 128, 128, 4],
                &[1, 64, 64, 3],
                &[2, 64, 64, 8],
                &[2, 256, 256, 4],
                &[2, 192, 128, 4],
                &[0, 128, 128, 4],
            ],
        ),
        // Groups of Llama (4, 8), SmolLM (3), gpt-oss (8), Qwen3.5 (8), MiMo and GLM-4.5 (12, 16).
        "decode_tiles.cu" => (
            &["KV_TYPE", "DIM_K", "DIM_V", "GROUP"],
            &[
                &[2, 128, 128, 8],
                &[1, 128, 128, 4],
                &[1, 64, 64, 3],
                &[2, 64, 64, 8],
                &[2, 256, 256, 8],
                &[2, 192, 128, 16],
                &[2, 128, 128, 16],
            ],
        ),
        "prefill.cu" | "prefill_hopper.cu" => (
            &["KV_TYPE", "DIM_K", "DIM_V"],
            &[&[2, 128, 128], &[1, 128, 128], &[1, 64, 64], &[2, 256, 256], &[2, 192, 128]],
        ),
        "matmul.cu" => (
            &["FORMAT", "PARTS"],
            &[&[2, 1], &[2, 2], &[0, 2], &[1, 2], &[3, 1], &[4, 2], &[5, 2], &[6, 2], &[7, 1], &[8, 2]],
        ),
        // GLM and DeepSeek-V3.2 (576, 512), DeepSeek-V4 (512, packed).
        "latent.cu" => (
            &["ROW_TYPE", "WIDTH", "VALUE", "ROPE"],
            &[&[2, 576, 512, 64], &[1, 576, 512, 64], &[0, 576, 512, 64], &[3, 512, 512, 64]],
        ),
        // The same but for f32, by heads of a block; one part in fast arithmetic, two else.
        "latent_tiles.cu" => (
            &["ROW_TYPE", "WIDTH", "VALUE", "ROPE", "HEADS", "PARTS"],
            &[
                &[2, 576, 512, 64, 64, 1],
                &[2, 576, 512, 64, 32, 2],
                &[2, 576, 512, 64, 16, 2],
                &[1, 576, 512, 64, 64, 1],
                &[3, 512, 512, 64, 32, 2],
                &[3, 512, 512, 64, 16, 2],
            ],
        ),
        "index_tiles.cu" => (&["PARTS"], &[&[1], &[2]]),
        _ => (&[], &[&[]]),
    }
}

/// Whether a file is for an architecture: one whose name ends with a GPU's has that GPU's own instructions.
pub fn is_for(file: &str, architecture: &str) -> bool {
    !file.ends_with("_hopper.cu") || architecture == "sm_90a"
}

/// The variants of a file.
pub fn of(file: &str) -> Vec<Variant> {
    let (names, values) = shapes(file);
    let macros = |values: &&[u32]| names.iter().zip(*values).map(|(name, value)| format!("-D{name}={value}")).collect();
    values.iter().map(|values| Variant { file: file.to_owned(), macros: macros(values) }).collect()
}

/// The value of a macro of a variant.
pub fn value(variant: &Variant, name: &str) -> Option<u32> {
    variant.macros.iter().find_map(|set| set.strip_prefix("-D")?.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}
