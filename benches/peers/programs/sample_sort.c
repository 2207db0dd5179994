// Sorts keys that are divided among the ranks, as crates/dist/examples/sample_sort.rs does.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 64 };

static uint64_t key_of(uint64_t number) {
    uint64_t mixed = (number + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
}

static int ascending(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    size_t count = argc > 1 ? strtoull(argv[1], 0, 10) : 20000;
    size_t first = rank * count / ranks, length = (rank + 1) * count / ranks - first;
    uint64_t *keys = malloc((length + 1) * sizeof *keys);
    for (size_t i = 0; i < length; i++) keys[i] = key_of(first + i);

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    qsort(keys, length, sizeof *keys, ascending);
    int samples = length < SAMPLES ? (int)length : SAMPLES, all = 0;
    uint64_t own[SAMPLES];
    for (int i = 0; i < samples; i++) own[i] = keys[i * length / samples];
    int *counts = malloc(4 * ranks * sizeof *counts), *places = counts + ranks, *arriving = places + ranks, *from = arriving + ranks;
    MPI_Allgather(&samples, 1, MPI_INT, counts, 1, MPI_INT, MPI_COMM_WORLD);
    for (int i = 0; i < ranks; i++) places[i] = all, all += counts[i];
    uint64_t *borders = malloc((all + 1) * sizeof *borders);
    MPI_Allgatherv(own, samples, MPI_UINT64_T, borders, counts, places, MPI_UINT64_T, MPI_COMM_WORLD);
    qsort(borders, all, sizeof *borders, ascending);
    size_t at = 0;
    for (int i = 0; i < ranks; i++) {
        places[i] = (int)at;
        while (at < length && (i + 1 == ranks || keys[at] < borders[(i + 1) * all / ranks])) at++;
        counts[i] = (int)at - places[i];
    }
    MPI_Alltoall(counts, 1, MPI_INT, arriving, 1, MPI_INT, MPI_COMM_WORLD);
    int total = 0;
    for (int i = 0; i < ranks; i++) from[i] = total, total += arriving[i];
    uint64_t *sorted = malloc((total + 1) * sizeof *sorted);
    MPI_Alltoallv(keys, counts, places, MPI_UINT64_T, sorted, arriving, from, MPI_UINT64_T, MPI_COMM_WORLD);
    qsort(sorted, total, sizeof *sorted, ascending);
    double spent = MPI_Wtime() - start;

    uint64_t length_here = total, before = 0, sum = 0, checksum;
    MPI_Exscan(&length_here, &before, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) before = 0;
    for (int i = 0; i < total; i++) sum += sorted[i] * (before + i + 1);
    MPI_Reduce(&sum, &checksum, 1, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) printf("%zu keys, checksum %016llx\n%.3f ms\n", count, (unsigned long long)checksum, spent * 1e3);
    free(keys), free(counts), free(borders), free(sorted);
    MPI_Finalize();
    return 0;
}
