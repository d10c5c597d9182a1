"""A real client of the store, led by lines of JSON on its standard input."""
import ctypes
import json
import sys

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store = MooncakeDistributedStore()
kept = {}


def buffer(name, size):
    if name not in kept or len(kept[name]) < size:
        kept[name] = ctypes.create_string_buffer(max(size, 1))
        store.register_buffer(ctypes.addressof(kept[name]), len(kept[name]))
    return kept[name]


def setup(host, metadata, segment, master, protocol="tcp"):
    return store.setup(host, metadata, segment, 64 << 20, protocol, "stand0" if protocol == "rdma" else "", master)


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


def remove(key):
    return store.remove(key)


def close():
    return store.close()


print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print("answer " + json.dumps(globals()[name](*arguments)), flush=True)
