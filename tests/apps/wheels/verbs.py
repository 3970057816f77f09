"""PyPI's ibverbs: WRITE, WRITE with immediate, READ, atomic operations and SEND between two processes; what arrives is compared.

verbs.py server|client ADDRESS PORT"""
import ctypes
import sys

import ibverbs as ib
import sides

SIZE = 1 << 20
FLAGS = ib.AccessFlags
ACCESS = (
    FLAGS.LOCAL_WRITE | FLAGS.REMOTE_WRITE | FLAGS.REMOTE_READ | FLAGS.REMOTE_ATOMIC | FLAGS.RELAXED_ORDERING
)


def pattern(seed):
    return sides.pattern(seed, SIZE)


class Side:
    def __init__(self, sock):
        self.sock = sock
        self.context = ib.get_device_list()[0].open()
        self.pd = self.context.alloc_pd()
        self.channel = self.context.create_comp_channel()
        self.cq = self.context.create_cq(64, channel=self.channel)
        self.memory = ctypes.create_string_buffer(SIZE)
        self.mr = self.pd.reg_mr(ctypes.addressof(self.memory), SIZE, ACCESS)
        self.qp = self.pd.create_qp(ib.QPInitAttr(self.cq, self.cq, ib.QPType.RC))
        port, gid = self.context.query_port(1), self.context.query_gid(1, 0)
        own = ib.local_qp_info(self.qp, port, gid, port=1, psn=77).to_bytes()
        sock.sendall(own + self.mr.addr.to_bytes(8, "big") + self.mr.rkey.to_bytes(4, "big"))
        peer = ib.QPInfo.from_bytes(sides.exactly(sock, len(own)))
        self.addr = int.from_bytes(sides.exactly(sock, 8), "big")
        self.rkey = int.from_bytes(sides.exactly(sock, 4), "big")
        ib.connect_rc(self.qp, peer, port=1, sgid_index=0, access=ACCESS, local_psn=77)

    def meet(self):
        self.sock.sendall(b"!")
        sides.exactly(self.sock, 1)

    def completion(self):
        """The next one; slept for at the channel."""
        while not (found := self.cq.poll(1)):
            self.cq.req_notify()
            if found := self.cq.poll(1):
                break
            self.channel.get_cq_event()
            self.cq.ack_events(1)
        found[0].raise_for_status()
        return found[0]

    def receive(self):
        self.qp.post_recv(ib.RecvWR(sg_list=[ib.SGE(self.mr, SIZE)]))

    def send(self, opcode, length=SIZE, **more):
        self.qp.post_send(
            ib.SendWR(
                sg_list=[ib.SGE(self.mr, length)],
                opcode=opcode,
                send_flags=ib.SendFlags.SIGNALED,
                remote_addr=self.addr,
                rkey=self.rkey,
                **more,
            )
        )
        self.completion()


def server(side):
    side.receive()
    side.meet()
    done = side.completion()
    assert (done.opcode, done.byte_len) == (ib.WCOpcode.RECV, SIZE), done
    assert side.memory.raw == pattern(3), "SEND"
    side.receive()
    side.meet()
    done = side.completion()
    assert (done.opcode, done.imm_data) == (ib.WCOpcode.RECV_RDMA_WITH_IMM, 0x01020304), done
    assert side.memory.raw == pattern(5), "WRITE with immediate"
    side.meet()
    side.meet()
    assert side.memory.raw == pattern(7), "WRITE"
    side.memory.raw = pattern(9)
    side.meet()
    side.meet()
    start = int.from_bytes(pattern(9)[:8], sys.byteorder)
    assert int.from_bytes(side.memory.raw[:8], sys.byteorder) == 99, "COMPARE AND SWAP"
    assert side.memory.raw[8:] == pattern(9)[8:], "atomic operations wrote more than their word"
    assert start != 99


def client(side):
    writes = [(ib.WROpcode.SEND, 3, {}), (ib.WROpcode.RDMA_WRITE_WITH_IMM, 5, {"imm_data": 0x01020304})]
    for opcode, seed, more in writes:
        side.meet()
        side.memory.raw = pattern(seed)
        side.send(opcode, **more)
    side.meet()
    side.memory.raw = pattern(7)
    side.send(ib.WROpcode.RDMA_WRITE)
    side.meet()
    side.meet()
    side.memory.raw = bytes(SIZE)
    side.send(ib.WROpcode.RDMA_READ)
    assert side.memory.raw == pattern(9), "READ"
    start = int.from_bytes(pattern(9)[:8], sys.byteorder)
    side.send(ib.WROpcode.ATOMIC_FETCH_AND_ADD, length=8, compare_add=5)
    assert int.from_bytes(side.memory.raw[:8], sys.byteorder) == start, "FETCH AND ADD"
    side.send(ib.WROpcode.ATOMIC_CMP_AND_SWP, length=8, compare_add=start + 5, swap=99)
    assert int.from_bytes(side.memory.raw[:8], sys.byteorder) == start + 5, "COMPARE AND SWAP"
    side.meet()
    print("all compared")


def main():
    role, sock = sides.connected()
    {"server": server, "client": client}[role](Side(sock))


main()
