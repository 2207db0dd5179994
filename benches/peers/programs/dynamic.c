// Takes rounds of a loop as ranks are ready for them, as crates/dist/examples/dynamic.rs does.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { CHUNK = 256 };

static uint64_t steps(uint64_t number) {
    uint64_t steps = 0;
    for (; number > 1; steps++) number = number % 2 == 0 ? number / 2 : 3 * number + 1;
    return steps;
}

int main(int argc, char **argv) {
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int64_t rounds = argc > 1 ? strtoll(argv[1], 0, 10) : 5000, *taken, chunk = CHUNK;
    MPI_Win window;
    MPI_Win_allocate(rank == 0 ? sizeof *taken : 0, sizeof *taken, MPI_INFO_NULL, MPI_COMM_WORLD, &taken, &window);
    if (rank == 0) *taken = 0;

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    uint64_t total = 0;
    MPI_Win_lock_all(0, window);
    for (;;) {
        int64_t first;
        MPI_Fetch_and_op(&chunk, &first, MPI_INT64_T, 0, 0, MPI_SUM, window);
        MPI_Win_flush(0, window);
        if (first >= rounds) break;
        for (int64_t i = first; i < first + CHUNK && i < rounds; i++) total += steps((uint64_t)i);
    }
    MPI_Win_unlock_all(window);
    MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%llu steps\n%.3f ms\n", (unsigned long long)total, (MPI_Wtime() - start) * 1e3);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
