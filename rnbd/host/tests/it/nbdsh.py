"""What libnbd's tests ask of a server, by its Python binding: `tests/nbd_tools.rs` runs this with the socket of a mapping of `disk`
and `ro`, which is read-only, of 8 MiB each."""

import errno
import sys

import nbd

SOCKET = sys.argv[1]
SIZE = 8 << 20


def handle(name=""):
    h = nbd.NBD()
    h.set_export_name(name)
    return h


def fails(number, ask):
    try:
        ask()
    except nbd.Error as e:
        assert e.errnum == number, f"{e.errnum} instead of {number}: {e}"
    else:
        raise AssertionError("it is not refused")


def negotiates():
    h = handle("nosuch")
    h.set_opt_mode(True)
    h.connect_unix(SOCKET)
    assert h.get_protocol() == "newstyle-fixed"
    names = []
    assert h.opt_list(lambda name, text: names.append(name) and 0 or 0) == 2
    assert names == ["disk", "ro"], names
    for ask in (h.opt_info, h.opt_go):
        fails(errno.ENOENT, ask)
        assert h.aio_is_negotiating()
    h.set_export_name("ro")
    h.add_meta_context("base:allocation")
    h.add_meta_context("qemu:dirty-bitmap:none")
    contexts = []
    h.opt_list_meta_context(lambda name: contexts.append(name) and 0 or 0)
    assert contexts == ["base:allocation"], contexts
    h.opt_info()
    assert h.is_read_only() and h.get_size() == SIZE
    h.set_export_name("disk")
    h.opt_go()
    assert not h.is_read_only() and h.get_size() == SIZE
    assert h.can_meta_context("base:allocation") and not h.can_meta_context("qemu:dirty-bitmap:none")
    assert [h.get_block_size(which) for which in (nbd.SIZE_MINIMUM, nbd.SIZE_MAXIMUM)] == [512, 32 << 20]
    h.shutdown()

    h = handle()
    h.set_opt_mode(True)
    h.connect_unix(SOCKET)
    h.opt_abort()
    assert h.aio_is_closed()


def refuses():
    h = handle("disk")
    h.connect_unix(SOCKET)
    # The server is to refuse, not the library.
    h.set_strict_mode(0)
    sector = bytearray(512)
    for number, ask in [
        (errno.EINVAL, lambda: h.pread(512, 1)),
        (errno.EINVAL, lambda: h.pread(511, 0)),
        (errno.EINVAL, lambda: h.pread(512, SIZE)),
        (errno.EINVAL, lambda: h.pread(1024, SIZE - 512)),
        (errno.EINVAL, lambda: h.pread(512, 2**64 - 512)),
        (errno.ENOSPC, lambda: h.pwrite(sector, SIZE)),
        (errno.ENOSPC, lambda: h.zero(512, SIZE)),
        (errno.EINVAL, lambda: h.trim(512, SIZE)),
        (errno.EINVAL, lambda: h.cache(512, SIZE)),
        (errno.EINVAL, lambda: h.pread(512, 0, nbd.CMD_FLAG_NO_HOLE)),
        (errno.EINVAL, lambda: h.pwrite(sector, 0, nbd.CMD_FLAG_DF)),
        (errno.EINVAL, lambda: h.pwrite(sector, 0, 1 << 7)),
        # NBD_CMD_FLAG_PAYLOAD_LEN is of extended headers, which this version of libnbd does not ask for.
        (errno.EINVAL, lambda: h.pwrite(sector, 0, 1 << 5)),
        (errno.EINVAL, lambda: h.flush(nbd.CMD_FLAG_NO_HOLE)),
    ]:
        fails(number, ask)
        assert h.aio_is_ready()
    h.shutdown()

    h = handle("ro")
    h.connect_unix(SOCKET)
    h.set_strict_mode(0)
    for ask in (lambda: h.pwrite(sector, 0), lambda: h.zero(512, 0), lambda: h.trim(512, 0)):
        fails(errno.EPERM, ask)
    h.pread(512, 0)
    h.shutdown()


def works(structured):
    h = handle("disk")
    if structured:
        h.add_meta_context("base:allocation")
    else:
        h.set_request_structured_replies(False)
    h.connect_unix(SOCKET)
    assert h.get_structured_replies_negotiated() == structured
    data = bytearray(n * 7 % 251 for n in range(1 << 20))
    h.pwrite(data, 1 << 20, nbd.CMD_FLAG_FUA)
    assert h.pread(len(data), 1 << 20) == data
    h.zero(4096, 1 << 20)
    h.zero(4096, (1 << 20) + 8192, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    data[:4096] = data[8192:12288] = bytes(4096)
    assert h.pread(len(data), 1 << 20) == data
    h.trim(4096, 4 << 20)
    h.cache(1 << 20, 0)
    h.flush()
    if structured:
        chunks = []

        def chunk(part, offset, status, error):
            chunks.append((bytes(part), offset, status))

        # Not to be fragmented: one chunk, as it is always.
        h.pread_structured(len(data), 1 << 20, chunk, nbd.CMD_FLAG_DF)
        assert chunks == [(bytes(data), 1 << 20, nbd.READ_DATA)]
        extents = []

        def extent(context, offset, entries, error):
            extents.append((context, offset, entries))

        h.block_status(SIZE, 0, extent)
        [(context, offset, entries)] = extents
        assert (context, offset, sum(entries[::2])) == ("base:allocation", 0, SIZE), extents
    h.shutdown()


negotiates()
refuses()
works(True)
works(False)
print("done")
