// Finds where a function is largest, as crates/dist/examples/argmax.rs does.
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static double height(uint64_t point) { return sqrt((double)(point * 7919 % 10007)); }

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    uint64_t points = argc > 1 ? strtoull(argv[1], 0, 10) : 100000;

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    // The index is an int: MPI has no pair of a double and a 64-bit index.
    struct {
        double value;
        int index;
    } best = {-INFINITY, 0};
    for (uint64_t point = rank * points / ranks; point < (rank + 1) * points / ranks; point++)
        if (height(point) > best.value) best.value = height(point), best.index = (int)point;
    MPI_Allreduce(MPI_IN_PLACE, &best, 1, MPI_DOUBLE_INT, MPI_MAXLOC, MPI_COMM_WORLD);
    if (rank == 0) printf("%.6f at %d\n%.3f ms\n", best.value, best.index, (MPI_Wtime() - start) * 1e3);
    MPI_Finalize();
    return 0;
}
