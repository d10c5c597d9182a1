//! The same shapes with PyTorch, where it is installed.

use std::process::Command;

use super::table::Table;

/// Prints a line for each row: what, seconds, floating point operations or bytes a second.
const PROGRAM: &str = "
import json, time, torch
import torch.nn.functional as F
def timed(run, times):
    run(); torch.cuda.synchronize(); began = time.perf_counter()
    for _ in range(times): run()
    torch.cuda.synchronize(); return (time.perf_counter() - began) / times
def tell(what, seconds, rate, unit): print(json.dumps([what, seconds, rate / seconds, unit]), flush=True)
kind = dict(device='cuda', dtype=torch.bfloat16)
a, b = torch.randn(4096, 4096, **kind), torch.randn(4096, 4096, **kind)
tell('PyTorch: product, 4096 x 4096 by 4096 in BF16', timed(lambda: a @ b, 20), 2 * 4096 ** 3, 'flop')
for context in (8192, 65536):
    q = torch.randn(1, 32, 1, 128, **kind); k = torch.randn(1, 8, context, 128, **kind); v = torch.randn_like(k)
    run = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    tell(f'PyTorch: decode attention over {context} tokens, one sequence', timed(run, 50), 2 * context * 8 * 128 * 2, 'byte')
q = torch.randn(1, 32, 8192, 128, **kind); k = torch.randn(1, 8, 8192, 128, **kind); v = torch.randn_like(k)
run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
tell('PyTorch: prefill attention of 8192 tokens', timed(run, 5), 2 * 8192 ** 2 * 32 * 128, 'flop')
";

/// Adds PyTorch's rows, or why there are none.
pub fn measure(table: &mut Table) {
    let output = match Command::new("python3").args(["-c", PROGRAM]).output() {
        Ok(output) => output,
        Err(error) => return table.note(&format!("PyTorch: python3 can't be run ({error})")),
    };
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok((what, seconds, rate, unit)) = serde_json::from_str::<(String, f64, f64, String)>(line) else {
            continue;
        };
        let rate = match unit.as_str() {
            "flop" => format!("{:.1} TFLOP/s", rate / 1e12),
            _ => format!("{:.0} GB/s", rate / 1e9),
        };
        table.row(&what, seconds, rate, None, "");
    }
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        table.note(&format!("PyTorch: {}", said.lines().last().unwrap_or("it failed and says nothing")));
    }
}
