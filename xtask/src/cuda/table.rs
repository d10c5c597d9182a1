//! The table of kernels: what each must move and compute at least, what it takes of a multiprocessor, and what bounds it.

use std::fmt::Write as _;

use super::variants::value;
use super::{ARCHITECTURES, Compiled};

/// What is known of a kernel beside what the compiler says.
struct Floor {
    /// The kernel's name, or how it begins where it has a type in it.
    name: &'static str,
    threads: u32,
    bytes: &'static str,
    operations: &'static str,
    bound: &'static str,
}

const fn floor(
    name: &'static str,
    threads: u32,
    bytes: &'static str,
    operations: &'static str,
    bound: &'static str,
) -> Floor {
    Floor { name, threads, bytes, operations, bound }
}

/// Letters: T rows, D width, N elements, H heads, L positions seen, V vocabulary, K columns, O output rows, d head dimensions, e bytes of an element.
const FLOORS: &[Floor] = &[
    floor("rms_norm", 256, "8 T D", "4 T D", "memory"),
    floor("add_rms_norm", 256, "16 T D", "5 T D", "memory"),
    floor("head_rms_norm", 128, "8 T H d", "4 T H d", "memory"),
    floor("gated_rms_norm", 128, "12 T H d", "10 T H d", "memory"),
    floor("layer_norm", 256, "8 T D", "8 T D", "memory"),
    floor("silu_mul_clamped", 256, "12 N", "10 N", "memory"),
    floor("silu_mul", 256, "12 N", "8 N", "memory"),
    floor("gpt_oss_mul", 256, "12 N", "12 N", "memory"),
    floor("sigmoid_mul", 256, "12 N", "8 N", "memory"),
    floor("add", 256, "12 N", "N", "memory"),
    floor("fill", 256, "4 N", "0", "memory"),
    floor("scale", 256, "8 N", "N", "memory"),
    floor("copy_columns", 256, "8 T D", "0", "memory"),
    floor("gather_rows", 256, "8 T D", "0", "memory"),
    floor("rope_table", 256, "8 positions d/2", "2 sincos a pair", "arithmetic (f64), once"),
    floor("rope", 128, "8 T H d + 4 T d", "3 T H d", "memory"),
    floor("heads_enter", 128, "8 T H dk + (4 + e) T Hkv (dk + dv)", "7 T (H + Hkv) dk", "memory; latency for few rows"),
    floor("kv_write", 128, "(4 + e) T Hkv (dk + dv)", "T Hkv (dk + dv)", "memory"),
    floor("paged_decode", 128, "e L Hkv (dk + dv) a row", "2 L H (dk + dv) a row", "memory up to GROUP 8"),
    floor("paged_decode_tiles", 128, "e L Hkv (dk + dv) a row", "2 L Hkv 16 (dk + dv) a row", "memory"),
    floor("paged_merge", 256, "4 splits H dv a row", "2 splits H dv a row", "memory"),
    floor("paged_prefill", 128, "4 T H (dk + dv) + e L Hkv (dk + dv) a 64 rows", "2 T L H (dk + dv)", "arithmetic"),
    floor(
        "paged_prefill_hopper",
        384,
        "4 T H (dk + dv) + e L Hkv (dk + dv) a 128 rows",
        "2 T L H (dk + dv)",
        "arithmetic",
    ),
    floor("dequant", 256, "(w + 4) N", "2 N", "memory"),
    floor("embed", 128, "(w + 4) T D", "2 T D", "memory"),
    floor("matvec", 256, "w O K a 4 rows", "2 T O K", "memory"),
    floor("matmul", 256, "w O K (T / 128) + 4 T K (O / 128)", "2 T O K, times 3 with PARTS 2", "arithmetic"),
    floor("kv_pages", 256, "e Hkv (dk + dv) tokens layers a page", "0", "host link"),
    floor("bytes_copy", 256, "2 N", "0", "memory or host link"),
    floor("bytes_zero", 256, "N", "0", "memory or host link"),
    floor("seal_checksums", 256, "e Hkv (dk + dv) tokens a page and layer", "about 3 a byte", "arithmetic (look-ups)"),
    floor("argmax", 256, "4 T V", "3 T V", "memory"),
    floor("penalise", 256, "20 entries", "4 entries", "latency"),
    floor("bias_logits", 256, "20 entries", "entries", "latency"),
    floor("log_softmax", 256, "8 T V", "10 T V", "memory"),
    floor("sample", 256, "4 T V, up to 11 times from the cache", "80 T V", "arithmetic"),
    floor("matvec_groups", 256, "w O K groups a 4 rows", "2 T O K groups", "memory"),
    floor("moe_matvec", 256, "w O K a 4 pairs of an expert", "2 pairs O K", "memory"),
    floor("matmul_grouped", 256, "w O K (pairs / 128) an expert", "2 pairs O K, times 3 with PARTS 2", "arithmetic"),
    floor("dequant_fp8", 256, "(1 + out) N", "2 N", "memory"),
    floor("dequant_mxfp4", 256, "(0.53 + out) N", "2 N", "memory"),
    floor("matvec_fp8", 256, "O K a 4 rows", "2 T O K", "memory"),
    floor("matvec_mxfp4", 256, "0.53 O K a 4 rows", "2 T O K", "memory"),
    floor("rows_write", 128, "(4 + e) T D", "T D", "memory"),
    floor("rows_write_packed", 128, "5 T D", "6 T D", "memory"),
    floor("keys_write_packed", 128, "5 T D", "6 T D", "memory"),
    floor("latent_decode", 128, "e L D a row", "2 L H (D + value) a row", "arithmetic (no tensor cores)"),
    floor(
        "latent_tiles",
        256,
        "e L D a row",
        "2 L H (D + value) a row, times PARTS",
        "memory up to some 40 heads (20 with PARTS 2), else arithmetic",
    ),
    floor("latent_merge", 256, "4 splits H value a row", "2 splits H value a row", "memory"),
    floor("index_scores", 128, "e L d a row", "2 L H d a row", "arithmetic (no tensor cores)"),
    floor("index_tiles", 128, "e L d a row", "2 L H d a row, times PARTS", "arithmetic"),
    floor("top_k", 256, "4 L a row, up to 6 times from the cache", "12 L a row", "latency"),
    floor("compress_states", 256, "24 T D", "T D", "memory"),
    floor("compress_rows", 256, "8 tokens D a row", "12 tokens D a row", "memory"),
    floor("delta_conv", 128, "8 T D + 8 kernel D a sequence", "2 kernel T D", "memory"),
    floor("delta_unit", 128, "16 T H dk", "4 T H dk", "memory"),
    floor(
        "delta_rule",
        128,
        "8 H dk dv a sequence and 4 T H (2 dk + 2 dv)",
        "7 T H dk dv",
        "memory for one token, latency for many",
    ),
    floor("route", 32, "4 T experts", "20 T experts", "latency"),
    floor("moe_sort", 256, "8 pairs experts, from the cache", "4 pairs experts", "latency"),
    floor("moe_combine", 256, "4 pairs D + 4 T D", "2 pairs D", "memory"),
    floor("add_gated_rows", 256, "12 T D", "2 T D", "memory"),
    floor("hyper_enter", 256, "20 T D", "16 T D", "memory"),
    floor("hyper_leave", 256, "36 T D", "40 T D", "memory"),
    floor("hyper_head", 256, "20 T D", "16 T D", "memory"),
];

/// By what the threads of a launch are fewer than usual: wide heads have half the warps.
fn halves(one: &Compiled) -> u32 {
    let wide = ["DIM_K", "DIM_V"].iter().any(|name| value(&one.variant, name).unwrap_or(0) > 128);
    if one.kernel == "paged_decode_tiles" && wide { 2 } else { 1 }
}

/// Bytes of dynamic shared memory of a launch.
fn dynamic(one: &Compiled) -> u32 {
    let dim = |name| value(&one.variant, name).unwrap_or(0);
    if one.kernel == "latent_decode" {
        return 4 * (8 * dim("WIDTH") + 16 * (dim("WIDTH") | 1));
    }
    if one.kernel.starts_with("index_scores") {
        // 64 heads of 128.
        return 4 * (64 * 128 + 32 * 129);
    }
    if one.kernel == "latent_tiles" {
        let row = 2 * (dim("WIDTH").next_multiple_of(16) + 8);
        let raw = 2 * (dim("WIDTH") + dim("ROPE")).next_multiple_of(16);
        let rows = if dim("ROW_TYPE") == 3 { row + raw } else { 2 * row };
        return 32 * rows + 4 * 8 * 16 * 36 + 2 * dim("PARTS") * dim("HEADS") * 40;
    }
    if one.kernel.starts_with("index_tiles") {
        // 64 heads of 128.
        let key = if one.kernel.ends_with("packed") { 144 } else { 272 };
        return 64 * (4 + 2 * dim("PARTS") * 136) + 4 * 32 * key;
    }
    let (dk, dv) = (dim("DIM_K"), dim("DIM_V"));
    if one.kernel == "paged_decode_tiles" {
        let queries = if dk > 128 { 16 * (dk + 8) } else { 0 };
        return 2 * (4 / halves(one) * 2 * 16 * (dk + 8 + dv + 8) + queries);
    }
    if one.kernel == "paged_prefill_hopper" {
        let keys = if dk.max(dv) > 128 { 64 } else { 128 };
        return 1024 + 2 * (2 * keys * (dk + dv) + 128 * dk) + 48;
    }
    if one.kernel != "paged_prefill" {
        return 0;
    }
    let keys = if dk.max(dv) > 128 { 32 } else { 64 };
    let queries = if dk > 128 { 64 * (dk + 8) } else { 0 };
    2 * (2 * keys * (dk + 8 + dv + 8) + queries)
}

/// Warps that a multiprocessor holds at a time, of 64.
fn warps(one: &Compiled, threads: u32) -> u32 {
    let warps = threads.div_ceil(32);
    // Registers are given to a warp in units of 256, shared memory has 1 KiB a block of its own.
    let a_warp = (one.usage.registers * 32).next_multiple_of(256);
    let by_registers = 65_536 / a_warp / warps;
    let size = if one.architecture == "sm_80" { 164 } else { 228 } * 1024;
    let by_shared = size / (one.usage.shared + dynamic(one) + 1024);
    (64 / warps).min(32).min(by_registers).min(by_shared) * warps
}

/// The floor of a kernel.
fn of(kernel: &str) -> Option<&'static Floor> {
    let fits =
        |floor: &&Floor| kernel.strip_prefix(floor.name).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'));
    FLOORS.iter().filter(fits).max_by_key(|floor| floor.name.len())
}

/// The table as Markdown.
pub fn markdown(compiled: &[Compiled]) -> String {
    let mut out = String::from(
        "# Table of kernels\n\nMade by `cargo xtask cuda-compile --table`. Registers and static shared memory are the compiler's, for each of the \
         architectures; warps of 64 are by calculation from them.\nNothing here was measured on a GPU.\n\nT rows, D width, N elements, H heads, Hkv KV heads, \
         L positions seen, V vocabulary, K columns, O output rows, d, dk, dv head dimensions, e bytes of a pool's element,\nw bytes of a weight's element. \
         Bytes and operations are the least that the work needs; bound by what follows from their ratio on an H200 (206 operations a byte with bf16 tensor cores,\n14 without).\n\n",
    );
    let _ = writeln!(
        out,
        "| kernel | macros | bytes | operations | bound by | threads | shared B | registers {} | spilled B | warps |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ARCHITECTURES.join(" / ")
    );
    for (index, one) in compiled.iter().enumerate() {
        let same = |other: &&Compiled| other.kernel == one.kernel && other.variant == one.variant;
        if compiled[..index].iter().any(|other| same(&other)) {
            continue;
        }
        let of_architecture =
            |architecture: &&str| compiled.iter().filter(same).find(|other| other.architecture == *architecture);
        let floor = of(&one.kernel);
        let threads = floor.map_or(0, |floor| floor.threads) / halves(one);
        let (bytes, operations, bound) =
            floor.map_or(("?", "?", "?"), |floor| (floor.bytes, floor.operations, floor.bound));
        let list = |of: &dyn Fn(&Compiled) -> u32| {
            let each = ARCHITECTURES.iter().map(&of_architecture);
            let text = each.map(|other| other.map_or("-".to_owned(), |other| of(other).to_string()));
            text.collect::<Vec<String>>().join(" / ")
        };
        let _ = writeln!(
            out,
            "| `{}` | {} | {bytes} | {operations} | {bound} | {threads} | {} | {} | {} | {} |",
            one.kernel,
            one.variant.macros.iter().map(|set| set.trim_start_matches("-D")).collect::<Vec<&str>>().join(" "),
            one.usage.shared + dynamic(one),
            list(&|other| other.usage.registers),
            list(&|other| other.usage.spills),
            list(&|other| warps(other, threads.max(32))),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Usage;
    use crate::cuda::variants;

    #[test]
    fn occupancy_is_bound_by_the_scarcest() {
        let one = |registers, shared| Compiled {
            variant: variants::of("norm.cu").remove(0),
            architecture: "sm_90a",
            kernel: "rms_norm".to_owned(),
            usage: Usage { registers, shared, ..Usage::default() },
        };
        assert_eq!(warps(&one(32, 0), 256), 64);
        assert_eq!(warps(&one(128, 0), 256), 16);
        assert_eq!(warps(&one(32, 100 * 1024), 256), 16);
        // Blocks of one warp are 32 at most.
        assert_eq!(warps(&one(16, 0), 32), 32);
    }

    #[test]
    fn kernels_with_a_type_in_their_name_have_the_floor_of_their_kind() {
        assert_eq!(of("matvec_q4_k").map(|floor| floor.name), Some("matvec"));
        assert_eq!(of("matvec_groups_f32").map(|floor| floor.name), Some("matvec_groups"));
        assert_eq!(of("rope_table").map(|floor| floor.name), Some("rope_table"));
        assert!(of("ropes").is_none());
    }
}
