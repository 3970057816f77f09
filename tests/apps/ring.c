/* Four ranks pass 256 KiB around, then add up. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

static char buffer[1 << 18];

int main(int argc, char **argv)
{
	int rank, ranks, one = 1, sum = 0, bad = 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	memset(buffer, rank, sizeof(buffer));
	for (int i = 1; i <= 50; i++) {
		MPI_Sendrecv_replace(buffer, sizeof(buffer), MPI_CHAR, (rank + 1) % ranks, 0,
				     (rank + ranks - 1) % ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		int from = ((rank - i) % ranks + ranks) % ranks;
		for (size_t at = 0; at < sizeof(buffer); at++)
			bad |= buffer[at] != from;
	}
	one += bad * 1000;
	MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	if (!rank)
		printf("%s\n", sum == ranks ? "ring done" : "wrong data");
	MPI_Finalize();
	return sum != ranks;
}
