"""Golden values of SmolLM2-135M-Instruct Q4_1: float64 on the dequantised weights.

Needs: torch, transformers, gguf, accelerate.

    python3 models/goldens/make_smollm2.py .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

Prints one line a prompt, as the table in models/tests/smollm2.rs has them: the greedy continuation
with the margin of the best token over the second at every step, and the five likeliest first tokens.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5,",
]


def main(path):
    path = Path(path)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    ).double()
    prompts = [(text, tokenizer(text).input_ids) for text in TEXTS]
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    prompts.append((chat, tokenizer(chat).input_ids))
    with torch.no_grad():
        for text, ids in prompts:
            print(f"{text!r}\n  ids {ids}")
            sequence, margins = list(ids), []
            for step in range(16):
                row = model(torch.tensor([sequence])).logits[0, -1]
                if step == 0:
                    logprobs = torch.log_softmax(row, 0)
                    top = torch.topk(logprobs, 5)
                    pairs = [(i, round(v, 6)) for i, v in zip(top.indices.tolist(), top.values.tolist())]
                    print(f"  top {pairs}")
                top = torch.topk(row, 2)
                margins.append(round((top.values[0] - top.values[1]).item(), 4))
                sequence.append(top.indices[0].item())
            print(f"  greedy {sequence[len(ids):]}\n  margins {margins}")


if __name__ == "__main__":
    main(sys.argv[1])
