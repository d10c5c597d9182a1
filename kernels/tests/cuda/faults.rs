//! Faults that are planted in kernels have to be found by their checks: this keeps the checks honest.

use crate::attention::{decode_small, hopper_case, hopper_small, prefill_case, prefill_small, small};
use crate::compile::Program;
use crate::emulator::Checked;
use crate::{delta, elementwise, latent, norm, pages, sampling};
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
    in_decode(
        "f32 total = sinks ? exp2f(sinks[head] * LOG2_E - most)",
        "f32 total = sinks ? exp2f(sinks[head] - most)",
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
        pages::seals,
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
    let from = "const bool no_magic =";
    said(
        "seal.cu",
        from,
        "if (lane == 5) return;\n    const bool no_magic =",
        pages::seals,
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
