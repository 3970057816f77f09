"""A client of InfiniStore over RDMA: puts blocks, and another connection gets them; what comes back is compared.

store.py ADDRESS PORT"""
import asyncio
import ctypes
import sys

import infinistore
import sides

BLOCK = 64 << 10
COUNT = 16


def pattern(seed):
    return sides.pattern(seed, BLOCK)


def connection(addr, port):
    config = infinistore.ClientConfig(
        host_addr=addr,
        service_port=port,
        dev_name="ferroce0",
        ib_port=1,
        link_type=infinistore.LINK_ETHERNET,
        connection_type=infinistore.TYPE_RDMA,
        log_level="info",
    )
    out = infinistore.InfinityConnection(config)
    out.connect()
    memory = ctypes.create_string_buffer(BLOCK * COUNT)
    out.register_mr(ctypes.addressof(memory), len(memory))
    return out, memory


def main():
    addr, port = sys.argv[1], int(sys.argv[2])
    wanted = b"".join(pattern(3 + 2 * n) for n in range(COUNT))
    blocks = [(f"block {n}", n * BLOCK) for n in range(COUNT)]

    writer, source = connection(addr, port)
    source.raw = wanted
    asyncio.run(writer.rdma_write_cache_async(blocks, BLOCK, ctypes.addressof(source)))
    assert writer.check_exist("block 7") and not writer.check_exist("block 99")
    assert source.raw == wanted, "the source has changed"

    reader, target = connection(addr, port)
    asyncio.run(reader.rdma_read_cache_async(blocks, BLOCK, ctypes.addressof(target)))
    assert target.raw == wanted, "what came back"
    turned = [(f"block {COUNT - 1 - n}", n * BLOCK) for n in range(COUNT)]
    asyncio.run(reader.rdma_read_cache_async(turned, BLOCK, ctypes.addressof(target)))
    assert target.raw == b"".join(pattern(3 + 2 * (COUNT - 1 - n)) for n in range(COUNT)), "what came back, turned"
    assert reader.delete_keys(["block 7"]) == 1
    try:
        asyncio.run(reader.rdma_read_cache_async([("block 7", 0)], BLOCK, ctypes.addressof(target)))
    except infinistore.InfiniStoreKeyNotFound:
        pass
    else:
        raise AssertionError("what was deleted came back")
    writer.close()
    reader.close()
    print("all compared")


main()
