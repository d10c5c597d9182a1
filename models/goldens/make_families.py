"""Golden values of the tiny checkpoints of the families beyond the dense one, with Hugging Face transformers in float64.

Needs: torch, transformers, safetensors, accelerate. Write the checkpoints, then read them:

    cargo xtask tiny-models /tmp/tiny
    python3 models/goldens/make_families.py /tmp/tiny > models/goldens/families.json

Values of DeepSeek-V4 in that file are those of a float64 implementation of the model's published description.
"""

import json
import os
import sys

import torch
from make_tiny import uniform
from transformers import AutoConfig, AutoModelForCausalLM

NAMES = ["qwen3_moe", "gpt_oss", "gpt_oss_mxfp4", "mimo", "qwen3_5", "qwen3_next", "glm_dsa", "deepseek_v32"]
LENGTH = 96
POSITIONS = (0, 7, 15, 16, 17, 63, 64, 95)


def load(folder, name):
    config = AutoConfig.from_pretrained(folder)
    kwargs = {}
    if name == "mimo":
        # transformers knows the layers' kinds under this key only.
        config.layer_types = ["full_attention" if kind == 0 else "sliding_attention" for kind in [0, 1, 1, 0]]
        kwargs["config"] = config
    if name == "gpt_oss_mxfp4":
        from transformers import Mxfp4Config

        kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                 experts_implementation="eager", **kwargs)
    return model.double().eval()


def rounded(values):
    return [round(v, 5) for v in values]


def golden(folder, name):
    model = load(folder, name)
    ids = [int(u * 256) for u in uniform(f"{name}.tokens", LENGTH)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        positions = []
        for t in POSITIONS:
            top = torch.topk(logits[t], 3)
            positions.append({
                "at": t,
                "top": [[i, round(v, 5)] for i, v in zip(top.indices.tolist(), top.values.tolist())],
                "log_sum_exp": round(torch.logsumexp(logits[t], 0).item(), 5),
                "first": rounded(logits[t, :3].tolist()),
            })
        sequence, greedy = list(ids), []
        for _ in range(8):
            row = model(torch.tensor([sequence])).logits[0, -1]
            top = torch.topk(row, 2)
            if (top.values[0] - top.values[1]).item() < 2e-3:
                break
            sequence.append(top.indices[0].item())
            greedy.append(sequence[-1])
    return {"prompt": f"{name}.tokens", "length": LENGTH, "positions": positions, "greedy": greedy}


def main(folder):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "families.json")
    out = json.load(open(path)) if os.path.exists(path) else {}
    for name in NAMES:
        out[name] = golden(os.path.join(folder, name), name)
    lines = []
    for name, value in out.items():
        positions = ",\n".join("   " + json.dumps(p) for p in value["positions"])
        fixture = f'"fixture": "{value["fixture"]}", ' if "fixture" in value else ""
        head = f' "{name}": {{{fixture}"prompt": "{value["prompt"]}", "length": {value["length"]}, '
        lines.append(head + f'"greedy": {json.dumps(value["greedy"])}, "positions": [\n{positions}\n ]}}')
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(sys.argv[1])
