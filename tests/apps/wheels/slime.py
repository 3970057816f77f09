"""DLSlime's RDMA endpoints: WRITE, WRITE with immediate, READ and SEND between two processes; what arrives is compared.

slime.py server|client ADDRESS PORT"""
import ctypes
import json

import sides
from dlslime import RDMAEndpoint

SIZE = 4 << 20


def pattern(seed):
    return sides.pattern(seed, SIZE)


class Side:
    def __init__(self, sock):
        self.lines = sides.Lines(sock)
        self.endpoint = RDMAEndpoint("ferroce0", 1, "RoCE", 2)
        self.memory = ctypes.create_string_buffer(SIZE)
        self.at = ctypes.addressof(self.memory)
        self.here = self.endpoint.register_memory_region("memory", self.at, 0, SIZE)
        self.tell({"endpoint": self.endpoint.endpoint_info(), "memory": self.endpoint.mr_info()["memory"]})
        peer = self.hear()
        self.endpoint.connect(peer["endpoint"])
        self.there = self.endpoint.register_remote_memory_region("memory", peer["memory"])
        self.meet()

    def tell(self, what):
        self.lines.tell(json.dumps(what))

    def hear(self):
        return json.loads(self.lines.hear())

    def meet(self):
        self.tell("here")
        assert self.hear() == "here"

    def whole(self):
        return [(self.here, self.there, 0, 0, SIZE)]


def server(side):
    side.meet()
    assert side.memory.raw == pattern(3), "WRITE"
    side.memory.raw = pattern(5)
    side.meet()
    future = side.endpoint.imm_recv()
    side.meet()
    assert future.wait() == 0, "receive of immediate data"
    assert future.imm_data() == 4711
    assert side.memory.raw == pattern(7)[:65536] + pattern(5)[65536:], "WRITE with immediate"
    future = side.endpoint.recv((side.at, 0, SIZE))
    side.meet()
    assert future.wait() == 0, "RECEIVE"
    assert side.memory.raw == pattern(9), "SEND"
    side.meet()


def client(side):
    side.memory.raw = pattern(3)
    assert side.endpoint.write(side.whole()).wait() == 0, "WRITE"
    side.meet()
    side.meet()
    assert side.endpoint.read(side.whole()).wait() == 0, "READ"
    assert side.memory.raw == pattern(5), "what was read"
    side.memory.raw = pattern(7)
    part = [(side.here, side.there, 0, 0, 65536)]
    side.meet()
    assert side.endpoint.write_with_imm(part, 4711).wait() == 0, "WRITE with immediate"
    side.meet()
    side.memory.raw = pattern(9)
    assert side.endpoint.send((side.at, 0, SIZE)).wait() == 0, "SEND"
    side.meet()
    print("all compared", flush=True)


def main():
    role, sock = sides.connected()
    side = Side(sock)
    {"server": server, "client": client}[role](side)
    side.endpoint.shutdown()


main()
