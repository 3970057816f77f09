"""Two agents of NIXL with its UCX back end: WRITE with a notification, and READ; what arrives is compared.

agents.py server|client ADDRESS PORT"""
import ctypes
import struct
import time

import sides
from nixl_cu12 import nixl_agent, nixl_agent_config

SIZE = 4 << 20


def pattern(seed):
    return sides.pattern(seed, SIZE)


class Side:
    def __init__(self, name, sock):
        self.sock = sock
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        self.memory = ctypes.create_string_buffer(SIZE)
        region = [(ctypes.addressof(self.memory), SIZE, 0)]
        self.registered = self.agent.register_memory([region[0] + ("",)], "DRAM")
        self.here = self.agent.get_xfer_descs(region, "DRAM")
        self.tell(self.agent.get_agent_metadata())
        self.tell(self.agent.get_serialized_descs(self.here))
        self.peer = self.agent.add_remote_agent(self.hear())
        self.there = self.agent.deserialize_descs(self.hear())

    def tell(self, what):
        self.sock.sendall(struct.pack("!I", len(what)) + what)

    def hear(self):
        return sides.exactly(self.sock, struct.unpack("!I", sides.exactly(self.sock, 4))[0])

    def meet(self):
        self.tell(b"here")
        assert self.hear() == b"here"

    def transfer(self, operation, note):
        handle = self.agent.initialize_xfer(operation, self.here, self.there, self.peer, note)
        state = self.agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.001)
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)


def note(side, wanted):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if found := side.agent.get_new_notifs():
            assert found == {side.peer if isinstance(side.peer, str) else side.peer.decode(): [wanted]}, found
            return
        time.sleep(0.001)
    raise AssertionError(f"no notification {wanted}")


def server(side):
    note(side, b"written")
    assert side.memory.raw == pattern(3), "WRITE"
    side.memory.raw = pattern(5)
    side.meet()
    note(side, b"read")
    side.meet()


def client(side):
    side.memory.raw = pattern(3)
    side.transfer("WRITE", b"written")
    side.meet()
    side.transfer("READ", b"read")
    assert side.memory.raw == pattern(5), "READ"
    side.meet()
    print("all compared")


def main():
    role, sock = sides.connected()
    side = Side(role, sock)
    {"server": server, "client": client}[role](side)
    side.agent.remove_remote_agent(side.peer)
    side.agent.deregister_memory(side.registered)


main()
