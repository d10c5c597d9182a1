"""Words that the pre-tokenizers of the field make of some texts, by the Python package tokenizers.

Needs: tokenizers. Writes goldens/pretokens.json beside this file.

    python3 models/goldens/make_pretokens.py

The Rust side uses another regular-expression engine; this shows that both cut alike.
"""

import json
from pathlib import Path

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    return Split(Regex(pattern), "isolated")


BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
PRE = {
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "gpt-2": ByteLevel(add_prefix_space=False),
    "llama-bpe": Sequence([split(LLAMA3), BYTES]),
    "qwen2": Sequence([split(LLAMA3.replace("{1,3}", "")), BYTES]),
    "deepseek-v3": Sequence([split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_WORDS), BYTES]),
}
TEXTS = [
    "Hello, world! 12345",
    "don't DON'T I'LL we'Ve 's 'S",
    "  two  spaces   three \n\n\n lines\r\n\r\n end  ",
    "tabs\t\there\u00a0nbsp\u3000wide\u2003em",
    "x = foo(1, 22)\n\treturn x  # ok",
    "naïve café e\u0301 \u0301 Ω ß ſ",
    "你好,世界。こんにちは カタカナ 한국어 ไทย العربية ١٢٣",
    "½ Ⅷ ² 1234567 3.14159 1,000,000 0xFF",
    "🦀🦀 👩‍👩‍👧 🇩🇪 ok\U0001f600",
    "<tag attr='v'>&amp; $x_y-z\\n {a: [1]} ~!@#%^&*()",
    "\x00\x01\x7f\u200b\ufeff\u2028line",
    "ǅ ǈ ʰ ａｂｃ １２３",
    " a",
    "a ",
    "\n",
    "   ",
    "'",
    "''s",
]

if __name__ == "__main__":
    rows = [
        {"pre": name, "text": text, "words": [word for word, _ in pre.pre_tokenize_str(text)]}
        for name, pre in PRE.items()
        for text in TEXTS
    ]
    path = Path(__file__).with_name("pretokens.json")
    lines = ",\n".join(json.dumps(row, ensure_ascii=True) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")
