"""sglang.py DIR: SGLang's native tree core and its file backend, driven by JSON lines on standard input.

A request is a list, the name of a function below and its arguments; the answer is one line of JSON. DIR has SGLang and what it needs of
Python packages; `cargo xtask bench --sglang` puts them there.
"""

import array
import json
import os
import random
import sys
import time

# What the libraries print is no answer.
answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
sys.path.insert(0, os.path.abspath(sys.argv[1]))
import torch  # noqa: E402

PAGE = 16
state = {}


def key(tokens):
    return array.array("q", [state["random"].randrange(150_000) for _ in range(tokens)])


def tree(pages, tokens):
    """A tree that holds `pages` pages in keys of so many tokens."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = "sglang.srt.mem_cache.rust_tree_core.mem_cache"
    folder = os.path.join(sys.argv[1], "sglang", "srt", "mem_cache", "rust_tree_core")
    files = [file for file in os.listdir(folder) if file.startswith("mem_cache.") and file.endswith(".so")]
    # By itself, as SGLang's own modules around it ask for a GPU.
    spec = spec_from_file_location(name, os.path.join(folder, files[0]))
    core = module_from_spec(spec)
    spec.loader.exec_module(core)
    full = [0]
    made = core.RustUnifiedTreeCoreBinding(core.TreeCoreInitParamsBinding(page_size=PAGE, device="cpu"), full)
    state.update(core=core, tree=made, random=random.Random(1), tokens=tokens, keys=[], slots=0)
    for _ in range(-(-pages * PAGE // tokens)):
        state["keys"].append(key(tokens))
        insert_one(state["keys"][-1], fresh(tokens))
    if made.total_size()[0] != len(state["keys"]) * tokens:
        raise RuntimeError("the tree holds %s tokens" % (made.total_size(),))
    return True


def fresh(tokens):
    state["slots"] += tokens
    return torch.arange(state["slots"] - tokens, state["slots"])


def insert_one(key, slots):
    state["tree"].insert(state["core"].InsertParamsBinding(key=key, value=slots))


def match(count):
    """Seconds of matching so many keys from all over the tree, slots of the match included."""
    picked = [state["random"].choice(state["keys"]) for _ in range(count)]
    begin = time.perf_counter()
    for one in picked:
        found = state["tree"].match_prefix(state["core"].MatchParamsBinding(key=one))
        if found.device_prefix_len != len(one):
            raise RuntimeError("%d of %d tokens were found" % (found.device_prefix_len, len(one)))
    return time.perf_counter() - begin


def insert(count):
    """Seconds of inserting so many new keys; nothing has to leave for them."""
    made = [(key(state["tokens"]), fresh(state["tokens"])) for _ in range(count)]
    begin = time.perf_counter()
    for one, slots in made:
        insert_one(one, slots)
    return time.perf_counter() - begin


def files(folder, size, count):
    """The file backend with batches of `count` pages of `size` bytes."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config={"file_storage_path": folder},
    )
    pages = [torch.randint(0, 255, (size,), dtype=torch.uint8) for _ in range(count)]
    state.update(store=HiCacheFile(config, folder), pages=pages, read=[torch.zeros_like(page) for page in pages])
    return True


def names(first, calls):
    return [["%064x" % (batch << 32 | i) for i in range(len(state["pages"]))] for batch in range(first, first + calls)]


def put(first, calls):
    begin = time.perf_counter()
    for batch in names(first, calls):
        if not state["store"].batch_set(batch, state["pages"]):
            raise RuntimeError("a page was not stored")
    return time.perf_counter() - begin


def get(first, calls):
    begin = time.perf_counter()
    for batch in names(first, calls):
        if any(page is None for page in state["store"].batch_get(batch, state["read"])):
            raise RuntimeError("a page was not read")
    seconds = time.perf_counter() - begin
    if not all(torch.equal(read, page) for read, page in zip(state["read"], state["pages"])):
        raise RuntimeError("other bytes were read than stored")
    return seconds


functions = {"tree": tree, "match": match, "insert": insert, "files": files, "put": put, "get": get}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = {"answer": functions[name](*arguments)}
    except Exception as error:
        answer = {"error": "%s: %s" % (type(error).__name__, error)}
    print(json.dumps(answer), file=answers, flush=True)
