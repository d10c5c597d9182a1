"""Golden values of the tiny models, made with Hugging Face transformers in float64.

Needs: torch, transformers, safetensors. Write a tiny checkpoint, then read it, for example:

    cargo run --release -p kvdock-models --example tiny -- qwen2 /tmp/tiny-qwen2
    python3 models/goldens/make_tiny.py /tmp/tiny-qwen2

The printed values are those of models/tests/goldens.rs.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

MASK = (1 << 64) - 1


def uniform(name, count):
    """`count` numbers in [0, 1) that follow from `name` (FNV-1a, then splitmix64)."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x100000001B3) & MASK
    for index in range(count):
        z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        yield (z >> 40) / 2**24


def main(folder):
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).double()
    key = config.model_type
    ids = [int(u * config.vocab_size) for u in uniform(f"{key}.tokens", 96)]
    print(f"{key}: ids {ids[:8]} ... {ids[-3:]}")
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
        logits = out.logits[0]
        for t in (0, 15, 63, 95):
            top = torch.topk(logits[t], 3)
            pairs = ", ".join(f"({i}, {v:.5f})" for i, v in zip(top.indices.tolist(), top.values.tolist()))
            lse = torch.logsumexp(logits[t], 0).item()
            print(f"t{t}: top [{pairs}] lse {lse:.5f} first {[round(v, 5) for v in logits[t, :3].tolist()]}")
        # The last entry of hidden_states is behind the final norm: ask the layers themselves.
        residuals = []
        hooks = [
            layer.register_forward_hook(
                lambda _m, _i, o: residuals.append((o[0] if isinstance(o, tuple) else o)[0, 95, :3].tolist()
                                                   if not isinstance(o, torch.Tensor) else o[0, 95, :3].tolist())
            )
            for layer in model.model.layers
        ]
        model(torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        for layer, values in enumerate(residuals):
            print(f"residual after layer {layer} at t95: {[round(v, 5) for v in values]}")
        sequence, smallest = list(ids), float("inf")
        for _ in range(8):
            row = model(torch.tensor([sequence])).logits[0, -1]
            top = torch.topk(row, 2)
            smallest = min(smallest, (top.values[0] - top.values[1]).item())
            sequence.append(top.indices[0].item())
        print(f"greedy {sequence[len(ids):]}, smallest margin {smallest:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
