// Rank 0 gives tasks to the ranks that are ready, as crates/dist/examples/task_farm.rs does.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t steps(uint64_t number) {
    uint64_t steps = 0;
    for (; number > 1; steps++) number = number % 2 == 0 ? number / 2 : 3 * number + 1;
    return steps;
}

// The numbers of a task are 64 in a row.
static uint64_t work(uint64_t task) {
    uint64_t total = 0;
    for (uint64_t number = 64 * task; number < 64 * (task + 1); number++) total += steps(number);
    return total;
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    uint64_t tasks = argc > 1 ? strtoull(argv[1], 0, 10) : 100, next = 0, total = 0, task, result = 0;

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    if (ranks == 1) {
        for (; next < tasks; next++) total += work(next);
    } else if (rank == 0) {
        for (int working = ranks - 1; working > 0;) {
            MPI_Status status;
            MPI_Recv(&result, 1, MPI_UINT64_T, MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &status);
            total += result;
            task = next < tasks ? next++ : UINT64_MAX;
            working -= task == UINT64_MAX;
            MPI_Send(&task, 1, MPI_UINT64_T, status.MPI_SOURCE, 0, MPI_COMM_WORLD);
        }
    } else {
        for (;;) {
            MPI_Send(&result, 1, MPI_UINT64_T, 0, 0, MPI_COMM_WORLD);
            MPI_Recv(&task, 1, MPI_UINT64_T, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            if (task == UINT64_MAX) break;
            result = work(task);
        }
    }
    if (rank == 0) printf("%llu steps\n%.3f ms\n", (unsigned long long)total, (MPI_Wtime() - start) * 1e3);
    MPI_Finalize();
    return 0;
}
