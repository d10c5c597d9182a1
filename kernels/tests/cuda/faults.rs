//! Faults that are planted in kernels have to be found by their checks: this keeps the checks honest.

use crate::attention::{
    decode_small, decode_tiles_small, hopper_case, hopper_small, prefill_case, prefill_small, small, small_tiles,
};
use crate::compile::Program;
use crate::emulator::Checked;
use crate::{delta, elementwise, heads, latent, norm, pages, sampling};
use kvdock_kernels::KvDtype;

/// Runs `check` on `file` with `from` replaced by `to`, and demands that it fails.
fn found(file: &str, macros: &[&str], from: &str, to: &str, check: fn(&Program) -> Checked) {
    let faulty = Program::with_fault(file, macros, from, to);
    if check(&faulty).is_ok() {
        panic!("nobody noticed {to:?} in place of {from:?} in {file}");
    }
}

fn in_decode(from: &str, to: &str) {
    let macros = small(KvDtype::F16).decode_macros(3);
    found("decode.cu", &macros.iter().map(String::as_str).collect::<Vec<_>>(), from, to, decode_small);
}

fn in_decode_tiles(from: &str, to: &str) {
    let macros = small_tiles(KvDtype::F16).decode_macros(3);
    found("decode_tiles.cu", &macros.iter().map(String::as_str).collect::<Vec<_>>(), from, to, decode_tiles_small);
}

fn in_latent_tiles(from: &str, to: &str) {
    let macros = latent::packed_tiles_macros();
    found("latent_tiles.cu", &macros.iter().map(String::as_str).collect::<Vec<_>>(), from, to, latent::packed_tiles);
}

fn in_index_tiles(from: &str, to: &str) {
    found("index_tiles.cu", &["-DPARTS=2"], from, to, latent::index_tiles);
}

fn in_prefill(from: &str, to: &str) {
    let macros = prefill_case(KvDtype::F16).macros();
    found("prefill.cu", &macros.iter().map(String::as_str).collect::<Vec<_>>(), from, to, prefill_small);
}

fn in_hopper(from: &str, to: &str) {
    let macros = hopper_case(KvDtype::F16).macros();
    found("prefill_hopper.cu", &macros.iter().map(String::as_str).collect::<Vec<_>>(), from, to, hopper_small);
}

/// A place is filled again while somebody still reads it.
#[test]
fn a_place_that_nobody_has_let_go_of_is_found() {
    in_hopper("if (turn >= STAGES) barrier_wait(shared.free + place, (turn / STAGES - 1) % 2);", "");
}

#[test]
fn bytes_that_never_come_are_found() {
    in_hopper("barrier_expect(there, boxes * box * DIM * 2);", "barrier_expect(there, KEYS * DIM * 2);");
}

/// What is no number stays so with a weight of 0.
#[test]
fn values_beyond_the_end_are_found() {
    in_hopper("if (base < seen.first || base + KEYS > seen.end) {", "if (base + KEYS <= seen.first) {");
}

#[test]
fn queries_without_their_swizzle_are_found() {
    in_hopper("(piece % 8 ^ row % 8) * 8;", "piece % 8 * 8;");
}

#[test]
fn scores_that_are_not_waited_for_are_found() {
    in_hopper("wgmma_wait<1>();\n        hold(scores);", "wgmma_wait<2>();\n        hold(scores);");
}

/// Sums are scaled while the product before is still added to them.
#[test]
fn sums_that_are_not_waited_for_are_found() {
    in_hopper("wgmma_wait<0>();\n        hold(sums);", "wgmma_wait<1>();\n        hold(sums);");
}

/// Values are overwritten while they are multiplied.
#[test]
fn values_that_are_let_go_of_too_soon_are_found() {
    let soften = "        soften(base);\n        wgmma_wait<0>();\n        hold(sums);\n";
    let free = "        if (lane == 0) barrier_arrive(shared.free + (turn - 1) % STAGES);\n";
    in_hopper(&format!("{soften}{free}"), &format!("{free}{soften}"));
}

/// One warpgroup waits for ever for its turn to start products.
#[test]
fn a_turn_that_is_not_given_is_found() {
    in_hopper("        give_turn(base);\n", "");
}

/// One warpgroup is given a turn more than it takes.
#[test]
fn a_turn_that_nobody_takes_is_found() {
    in_hopper("if (warpgroup == 1 || base + KEYS <= highest) turn_give(other_turn);", "turn_give(other_turn);");
}

#[test]
fn a_box_from_the_page_before_is_found() {
    in_hopper("first_page + table[at / page_tokens]", "first_page + table[(at + 8) / page_tokens]");
}

#[test]
fn a_norm_that_drops_the_tail_is_found() {
    let from = "for (u32 i = threadIdx.x; i < width; i += NORM_THREADS) squares = fmaf(x[i], x[i], squares);";
    let to = "for (u32 i = threadIdx.x; i < (width & ~31u); i += NORM_THREADS) squares = fmaf(x[i], x[i], squares);";
    found("norm.cu", &[], from, to, norm::rms_norms);
}

#[test]
fn a_token_in_the_page_before_is_found() {
    found("kv.cu", &[], "u64 page = slot / page_tokens", "u64 page = (slot - 1) / page_tokens", elementwise::kv_writes);
}

/// What is not rotated behind the rotated part of a head is left where it was read.
#[test]
fn a_head_without_its_tail_is_found() {
    found("heads.cu", &[], "const u32 at = i < offset ? i : i + dim;", "const u32 at = i;", heads::enters);
}

#[test]
fn a_rotation_the_wrong_way_is_found() {
    found("rope.cu", &[], "head[second] = a * s + b * c;", "head[second] = b * c - a * s;", elementwise::ropes);
}

/// The key at a page's border is looked for in the page before.
#[test]
fn decode_off_by_one_page_is_found() {
    in_decode("table[position / page_tokens]", "table[(position + page_tokens - 1) / page_tokens]");
}

#[test]
fn decode_without_its_barrier_is_found() {
    in_decode(
        "    __syncthreads();\n    for (u32 i = threadIdx.x; i < GROUP * DIM_V",
        "    for (u32 i = threadIdx.x; i < GROUP * DIM_V",
    );
}

/// A split that the row does not see any more takes part in the merge.
#[test]
fn a_stale_split_is_found() {
    in_decode(
        "const u32 first = start_position / split_tokens, end = (end_position - 1) / split_tokens + 1;",
        "const u32 first = start_position * 0, end = (end_position - 1) / split_tokens + 1;",
    );
}

#[test]
fn a_sink_on_the_wrong_scale_is_found() {
    in_decode("sinks ? sinks[head] * LOG2_E : -INFINITE", "sinks ? sinks[head] : -INFINITE");
}

#[test]
fn decode_by_tiles_off_by_one_page_is_found() {
    in_decode_tiles("table[position / page_tokens]", "table[(position + page_tokens - 1) / page_tokens]");
}

/// Keys are used before their copies have been waited for.
#[test]
fn decode_by_tiles_without_its_wait_is_found() {
    in_decode_tiles("cp_async_wait<1>();", "cp_async_wait<2>();");
}

/// What a warp leaves for the merge lies where others still have keys.
#[test]
fn decode_by_tiles_without_its_barrier_is_found() {
    in_decode_tiles("    __syncthreads();\n    f32* outs", "    f32* outs");
}

/// The weights of two keys are swapped.
#[test]
fn swapped_weights_are_found() {
    in_decode_tiles(
        "pack(scores[0][2], scores[0][3]), pack(scores[1][0], scores[1][1])",
        "pack(scores[1][0], scores[1][1]), pack(scores[0][2], scores[0][3])",
    );
}

/// Two halves of what a lane gets of a matrix are swapped.
#[test]
fn a_swapped_lane_is_found() {
    in_prefill(
        "ldmatrix_x4_trans(both, tile_values + (16 * k + lane % 16) * V_STRIDE + 16 * n + lane / 16 * 8);",
        "ldmatrix_x4_trans(both, tile_values + (16 * k + (lane ^ 8) % 16) * V_STRIDE + 16 * n + lane / 16 * 8);",
    );
}

/// A tile is used before its copies have been waited for.
#[test]
fn a_copy_that_nobody_waits_for_is_found() {
    in_prefill("cp_async_wait<1>();", "cp_async_wait<2>();");
}

/// The next tile overwrites one that other warps still read.
#[test]
fn prefill_without_its_second_barrier_is_found() {
    in_prefill(
        "        __syncthreads();\n    }\n\n#pragma unroll\n    for (u32 i = 0; i < 2; i++) {\n        f32 sum",
        "    }\n\n#pragma unroll\n    for (u32 i = 0; i < 2; i++) {\n        f32 sum",
    );
}

#[test]
fn a_window_that_is_one_too_wide_is_found() {
    in_prefill(
        "from[i] = window && position[i] + 1 > window ? position[i] + 1 - window : 0;",
        "from[i] = window && position[i] > window ? position[i] - window : 0;",
    );
}

#[test]
fn a_page_copied_with_heads_and_tokens_swapped_is_found() {
    found(
        "page_copy.cu",
        &[],
        "(u64(head) * page_tokens + token) * row) + unit;",
        "(u64(token) * heads + head) * row) + unit;",
        pages::copies,
    );
}

#[test]
fn a_copy_that_drops_its_tail_is_found() {
    let from = "for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];";
    found("page_copy.cu", &[], from, "", pages::bytes);
}

#[test]
fn a_checksum_moved_by_too_much_is_found() {
    found(
        "seal.cu",
        &[],
        "moved(crc, u64(rows - end) * row_bytes)",
        "moved(crc, u64(rows - first) * row_bytes)",
        pages::checksums,
    );
}

#[test]
fn a_threshold_that_forgets_ties_is_found() {
    found("sampling.cu", &[], "(order == kept.order && ties < kept.ties)", "order == kept.order", sampling::samples);
}

#[test]
fn a_latent_split_without_its_barrier_is_found() {
    let from = "            total[head] = fmaf(total[head], kept[head], sum);\n        }\n        __syncthreads();\n";
    let to = "            total[head] = fmaf(total[head], kept[head], sum);\n        }\n";
    found("latent.cu", &latent::MLA_SMALL, from, to, latent::mla_small);
}

/// Weights are made before all warps have added their part of the columns.
#[test]
fn scores_of_some_columns_are_found() {
    in_latent_tiles(
        "        __syncthreads();\n\n        f32 score[THREAD_KEYS], now = most;",
        "        f32 score[THREAD_KEYS], now = most;",
    );
}

/// Every tile but the first two has the rows of the one before.
#[test]
fn a_tile_of_rows_that_were_seen_before_is_found() {
    in_latent_tiles("min(base + 2 * KEYS + threadIdx.x, end - 1)", "min(base + KEYS + threadIdx.x, end - 1)");
}

#[test]
fn scales_of_another_tile_are_found() {
    in_latent_tiles("row_scales[(tile + 1) % 2 * KEYS + threadIdx.x]", "row_scales[tile % 2 * KEYS + threadIdx.x]");
}

/// What rounding leaves of weights is not multiplied.
#[test]
fn a_dropped_part_of_weights_is_found() {
    in_latent_tiles(
        "E::mma(sums[m][2 * n + 1], weight[p][m], right);",
        "E::mma(sums[m][2 * n + 1], weight[0][m], right);",
    );
}

/// The rows of packed pools become bf16 while warps still multiply those before.
#[test]
fn a_tile_that_is_overwritten_is_found() {
    in_latent_tiles(
        "        cp_async_wait<0>();\n        __syncthreads();\n        if (base",
        "        cp_async_wait<0>();\n        if (base",
    );
}

#[test]
fn a_head_with_the_weight_of_another_is_found() {
    in_index_tiles("shared_weights[head + lane / 4 + 8 * i]", "shared_weights[head + lane / 4]");
}

#[test]
fn keys_of_the_tile_before_are_found() {
    in_index_tiles("cp_async_wait<0>();", "cp_async_wait<1>();");
}

#[test]
fn a_state_that_decays_twice_is_found() {
    found("delta.cu", &[], "state[i] *= kept;", "state[i] *= kept * kept;", delta::small);
}

/// The shim tells what is wrong, in the words that it should.
fn said(file: &str, from: &str, to: &str, check: fn(&Program) -> Checked, words: &str) {
    let error = check(&Program::with_fault(file, &[], from, to)).unwrap_err();
    assert!(error.contains(words), "{error}");
}

#[test]
fn a_write_past_the_end_is_told() {
    let from = "if (at >= u64(positions) * pairs) return;";
    said("rope.cu", from, "", elementwise::ropes, "AddressSanitizer: heap-buffer-overflow");
}

#[test]
fn a_warp_operation_that_lacks_a_lane_is_told() {
    let from = "crc = warp_xor(moved";
    said(
        "seal.cu",
        from,
        "if (threadIdx.x == 5) return;\n    crc = warp_xor(moved",
        pages::checksums,
        "waits for lane 5 of warp 0",
    );
}

#[test]
fn arguments_of_the_wrong_kind_are_told() {
    let from = "u32 pairs) {\n    u64 at";
    said(
        "rope.cu",
        from,
        "f64 pairs_as_number) {\n    u32 pairs = u32(pairs_as_number);\n    u64 at",
        elementwise::ropes,
        "argument 5",
    );
}
