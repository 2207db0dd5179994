// Reads from a table that the ranks of a host share, as crates/dist/examples/table.rs does.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ENTRIES = 1 << 16 };

static uint64_t mix(uint64_t number) {
    uint64_t mixed = (number + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
}

int main(int argc, char **argv) {
    int rank, ranks, here_rank, here_ranks, unit;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm here;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    MPI_Comm_rank(here, &here_rank);
    MPI_Comm_size(here, &here_ranks);
    uint64_t reads = argc > 1 ? strtoull(argv[1], 0, 10) : 20000, *part, *table;
    MPI_Win window;
    size_t first = (size_t)here_rank * ENTRIES / here_ranks, end = (size_t)(here_rank + 1) * ENTRIES / here_ranks;
    MPI_Aint bytes = here_rank == 0 ? ENTRIES * sizeof *table : 0;
    MPI_Win_allocate_shared(bytes, sizeof *table, MPI_INFO_NULL, here, &part, &window);
    MPI_Win_shared_query(window, 0, &bytes, &unit, &table);

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    MPI_Win_fence(0, window);
    for (size_t i = first; i < end; i++) table[i] = mix(i);
    MPI_Win_fence(0, window);
    uint64_t sum = 0;
    for (uint64_t i = rank * reads / ranks; i < (rank + 1) * reads / ranks; i++) sum += table[mix(i) % ENTRIES];
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%llu reads, sum %llx\n%.3f ms\n", (unsigned long long)reads, (unsigned long long)sum, (MPI_Wtime() - start) * 1e3);
    MPI_Win_free(&window);
    MPI_Comm_free(&here);
    MPI_Finalize();
    return 0;
}
