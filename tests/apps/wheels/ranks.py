"""mpi4py over the RDMA of its MPI: every rank's messages, one-sided transfers and collectives are compared."""
import sides
from mpi4py import MPI

SIZE = 1 << 20


def pattern(seed, size=SIZE):
    return sides.pattern(seed, size)


def main():
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    left, right = (rank - 1) % size, (rank + 1) % size
    for length in [0, 1, 4096, 65536, SIZE]:
        came = bytearray(length)
        sent = pattern(2 * rank + 3, length)
        world.Sendrecv(sent, dest=right, recvbuf=came, source=left)
        assert came == pattern(2 * left + 3, length), f"{length} bytes from {left}"
    assert world.sendrecv({"rank": rank}, dest=left, source=right) == {"rank": right}, "an object"

    ours = bytearray(SIZE)
    window = MPI.Win.Create(ours, comm=world)
    window.Fence()
    window.Put(pattern(2 * rank + 5), right)
    window.Fence()
    assert ours == pattern(2 * left + 5), "MPI_Put"
    got = bytearray(SIZE)
    window.Get(got, right)
    window.Fence()
    assert got == pattern(2 * rank + 5), "MPI_Get"
    window.Free()

    parts = b"".join(pattern(rank * size + to + 1, 65536) for to in range(size))
    came = bytearray(len(parts))
    world.Alltoall([parts, 65536, MPI.BYTE], [came, 65536, MPI.BYTE])
    assert came == b"".join(pattern(of * size + rank + 1, 65536) for of in range(size)), "MPI_Alltoall"
    everybody = bytearray(65536 * size)
    world.Allgather([pattern(rank + 1, 65536), MPI.BYTE], [everybody, 65536, MPI.BYTE])
    assert everybody == b"".join(pattern(of + 1, 65536) for of in range(size)), "MPI_Allgather"
    shared = bytearray(pattern(7)) if rank == 0 else bytearray(SIZE)
    world.Bcast(shared, root=0)
    assert shared == pattern(7), "MPI_Bcast"
    assert world.allreduce(rank, op=MPI.SUM) == size * (size - 1) // 2, "MPI_Allreduce"
    world.Barrier()
    if rank == 0:
        print("all compared", flush=True)


main()
