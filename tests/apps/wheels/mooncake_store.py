"""Mooncake Store over protocol "rdma": one process lends the memory, another puts objects there and gets them; what comes back is
compared.

mooncake_store.py server|client ADDRESS PORT"""
import ctypes
import json
import shutil
import socket
import subprocess
import sys
import time

import sides
from mooncake.store import MooncakeDistributedStore

SIZE = 1 << 20
COUNT = 8
LENT = 128 << 20


def pattern(seed):
    return sides.pattern(seed, SIZE)


def opened(addr, master, lent):
    store = MooncakeDistributedStore()
    done = store.setup(addr, "P2PHANDSHAKE", lent, 64 << 20, "rdma", "ferroce0", master)
    assert done == 0, f"setup: {done}"
    return store


def free_port(addr):
    with socket.create_server((addr, 0)) as free:
        return free.getsockname()[1]


def server(addr, port):
    """The master, and the memory."""
    rpc, metrics = free_port(addr), free_port(addr)
    words = [shutil.which("mooncake_master"), f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
    master = subprocess.Popen(words)
    try:
        until = time.monotonic() + 60
        while True:
            assert master.poll() is None and time.monotonic() < until, "the master does not listen"
            try:
                socket.create_connection((addr, rpc)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        store = opened(addr, f"{addr}:{rpc}", LENT)
        with socket.create_server((addr, port)) as listener:
            sock = listener.accept()[0]
        lines = sides.Lines(sock)
        lines.tell(json.dumps(f"{addr}:{rpc}"))
        assert lines.hear() == "done"
        store.close()
    finally:
        master.kill()
        master.wait()


def client(addr, port):
    lines = sides.Lines(socket.create_connection((addr, port)))
    store = opened(addr, json.loads(lines.hear()), 0)
    memory = ctypes.create_string_buffer(SIZE)
    at = ctypes.addressof(memory)
    assert store.register_buffer(at, SIZE) == 0, "register_buffer"
    for n in range(COUNT):
        memory.raw = pattern(3 + 2 * n)
        assert store.put_from(f"object {n}", at, SIZE) == 0, "put_from"
    assert store.put("small", b"some bytes") == 0, "put"
    for n in reversed(range(COUNT)):
        memory.raw = bytes(SIZE)
        assert store.get_into(f"object {n}", at, SIZE) == SIZE, "get_into"
        assert memory.raw == pattern(3 + 2 * n), f"what came back of object {n}"
    assert store.get("small") == b"some bytes", "get"
    assert store.is_exist("object 3") == 1 and store.is_exist("object 99") == 0
    assert store.unregister_buffer(at) == 0
    store.close()
    lines.tell("done")
    print("all compared")


{"server": server, "client": client}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
