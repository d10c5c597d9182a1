"""A real client of the store, led by lines of JSON on its standard input."""
import ctypes
import json
import sys
import time

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store = MooncakeDistributedStore()
kept = {}


def buffer(name, size):
    if name not in kept or len(kept[name]) < size:
        kept[name] = ctypes.create_string_buffer(max(size, 1))
        store.register_buffer(ctypes.addressof(kept[name]), len(kept[name]))
    return kept[name]


def setup(host, metadata, segment, master, protocol):
    return store.setup(host, metadata, segment, 160 << 20, protocol, "stand0" if protocol == "rdma" else "", master)


def put(key, path):
    with open(path, "rb") as file:
        return store.put(key, file.read())


def get(key, path):
    data = store.get(key)
    with open(path, "wb") as file:
        file.write(data)
    return len(data)


def batch_put(keys, path, size):
    with open(path, "rb") as file:
        data = file.read()
    room = buffer("put", len(data))
    ctypes.memmove(room, data, len(data))
    start = ctypes.addressof(room)
    return store.batch_put_from(keys, [start + i * size for i in range(len(keys))], [size] * len(keys))


def batch_get(keys, path, size):
    room = buffer("get", size * len(keys))
    ctypes.memset(room, 0, len(room))
    start = ctypes.addressof(room)
    codes = store.batch_get_into(keys, [start + i * size for i in range(len(keys))], [size] * len(keys))
    with open(path, "wb") as file:
        file.write(ctypes.string_at(start, size * len(keys)))
    return codes


def exists(keys):
    return store.batch_is_exist(keys)


def remove(key, force):
    return store.remove(key, force)


def remove_all(force):
    return store.remove_all(force)


def time_batch(count, size):
    source, target = buffer("put", size * count), buffer("get", size * count)
    at = lambda room: [ctypes.addressof(room) + i * size for i in range(count)]
    keys, sizes, sources, targets = ["time-%d" % i for i in range(count)], [size] * count, at(source), at(target)
    begin = time.perf_counter()
    codes = store.batch_put_from(keys, sources, sizes)
    middle = time.perf_counter()
    assert all(code == 0 for code in codes), codes
    between = time.perf_counter()
    codes = store.batch_get_into(keys, targets, sizes)
    end = time.perf_counter()
    assert all(code == size for code in codes), codes
    for key in keys:
        store.remove(key, True)
    return middle - begin, end - between


def time_exists(keys, times):
    begin = time.perf_counter()
    for _ in range(times):
        store.batch_is_exist(keys)
    return time.perf_counter() - begin


def close():
    return store.close()


print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print("answer " + json.dumps(globals()[name](*arguments)), flush=True)
