"""umbp.py DIR: the published UMBP client with its store in this process, driven by JSON lines on standard input.

A request is a list, the name of a function below and its arguments; the answer is one line of JSON. It is started by
plugins/umbp/tests/peer/run.sh, which finds the Python and the libraries that the client needs.
"""

import json
import os
import sys
import time

# What the libraries print is no answer.
answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
sys.path.insert(0, os.path.abspath(sys.argv[1]))
import mori.umbp as umbp  # noqa: E402

allocator = umbp.UMBPHostMemAllocator()
store = {}


def make(medium, size, count, slots, capacity, folder):
    """A store of `capacity` bytes in memory or in a folder, for batches of `count` objects of `size` bytes, `slots` on their way to or from the disk."""
    config = umbp.UMBPConfig()
    config.dram.capacity_bytes = capacity
    config.ssd.enabled = medium == "ssd"
    config.ssd.storage_dir = folder
    config.ssd.capacity_bytes = capacity
    # A page an object, which is what it is fastest with.
    config.distributed = umbp.UMBPDistributedConfig()
    config.distributed.dram_page_size = size
    if medium == "ssd":
        config.distributed.medium = umbp.UMBPMedium.SSD
        # Each object that is read keeps one for a while. By default there are 16, with which a batch does not go through at once.
        config.distributed.ssd_staging_buffer_slots = slots
    client = umbp.UMBPClient(config)
    handle = allocator.alloc(size * count, umbp.UMBPHostBufferBacking.AnonymousShm)
    with memoryview((bytes_of(handle.ptr, size * count))).cast("B") as room:
        for at in range(0, size * count, size):
            # Objects that differ, none of them zeros.
            room[at : at + size] = bytes([1 + at // size % 255]) * size
    if not client.register_memory(handle.ptr, size * count):
        raise RuntimeError("the memory was not registered")
    store.update(client=client, addresses=[handle.ptr + i * size for i in range(count)], sizes=[size] * count)
    return True


def bytes_of(address, size):
    import ctypes

    return (ctypes.c_ubyte * size).from_address(address)


def all_of(call, names):
    """Calls until every object of a batch went through: what finds no room between memory and disk fails, and has to be asked for again."""
    addresses, sizes = store["addresses"], store["sizes"]
    rest = list(range(len(names)))
    end = time.monotonic() + 60
    while True:
        done = call([names[i] for i in rest], [addresses[i] for i in rest], [sizes[i] for i in rest])
        rest = [i for i, good in zip(rest, done) if not good]
        if not rest:
            return
        if time.monotonic() > end:
            raise RuntimeError("%d of %d objects do not go through" % (len(rest), len(names)))
        time.sleep(0.0005)


def timed(call, batches):
    """Seconds of a call for each batch."""
    count = len(store["sizes"])
    named = [["object-%08d-%04d" % (batch, i) for i in range(count)] for batch in batches]
    begin = time.perf_counter()
    for names in named:
        all_of(call, names)
    return time.perf_counter() - begin


def put(first, calls):
    return timed(store["client"].batch_put_from_ptr, range(first, first + calls))


def get(batches):
    """Seconds, and bytes that the disks gave meanwhile; null where the kernel does not say."""
    before = bytes_read()
    seconds = timed(store["client"].batch_get_into_ptr, batches)
    after = bytes_read()
    return [seconds, None if before is None or after is None else after - before]


def bytes_read():
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return None


functions = {"open": make, "put": put, "get": get}
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = {"answer": functions[name](*arguments)}
    except Exception as error:
        answer = {"error": "%s: %s" % (type(error).__name__, error)}
    print(json.dumps(answer), file=answers, flush=True)
