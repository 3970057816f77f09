"""Mooncake's Transfer Engine over protocol "rdma": WRITE, READ and a batch between two processes; what arrives is compared.

mooncake_engine.py server|client ADDRESS PORT"""
import ctypes
import json

import sides
from mooncake.engine import TransferEngine

SIZE = 8 << 20
BLOCK = 64 << 10


def pattern(seed):
    return sides.pattern(seed, SIZE)


class Side:
    def __init__(self, addr):
        self.engine = TransferEngine()
        assert self.engine.initialize(addr, "P2PHANDSHAKE", "rdma", "ferroce0") == 0, "initialize"
        self.name = f"{addr}:{self.engine.get_rpc_port()}"
        self.memory = ctypes.create_string_buffer(SIZE)
        self.at = ctypes.addressof(self.memory)
        assert self.engine.register_memory(self.at, SIZE) == 0, "register_memory"


def server(side, lines):
    lines.tell(json.dumps([side.name, side.at]))
    for seed, blocks in [(3, 1), (5, 2)]:
        assert lines.hear() == "written"
        wanted = pattern(seed)
        wanted = wanted if blocks == 1 else wanted[: SIZE // 2] + bytes(SIZE // 2)
        assert side.memory.raw == wanted, f"what was written, {seed}"
        side.memory.raw = pattern(seed + 4) if blocks == 1 else wanted
        lines.tell("compared")
    assert side.engine.unregister_memory(side.at) == 0


def client(side, lines):
    peer, there = json.loads(lines.hear())

    def told():
        lines.tell("written")
        assert lines.hear() == "compared"

    side.memory.raw = pattern(3)
    assert side.engine.transfer_sync_write(peer, side.at, there, SIZE) == 0, "write"
    told()
    side.memory.raw = bytes(SIZE)
    assert side.engine.transfer_sync_read(peer, side.at, there, SIZE) == 0, "read"
    assert side.memory.raw == pattern(7), "what was read"
    side.memory.raw = pattern(5)[: SIZE // 2] + bytes(SIZE // 2)
    starts = range(0, SIZE, BLOCK)
    ours, theirs = [side.at + n for n in starts], [there + n for n in starts]
    assert side.engine.batch_transfer_sync_write(peer, ours, theirs, [BLOCK] * len(ours)) == 0, "batch"
    told()
    print("all compared")


def main():
    role, sock = sides.connected()
    {"server": server, "client": client}[role](Side(sock.getsockname()[0]), sides.Lines(sock))


main()
