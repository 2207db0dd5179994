// Joins two tables whose rows are divided among the ranks, as crates/dist/examples/hash_join.rs does.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t key, value;
} row_t;

static int rank, ranks;
static MPI_Datatype row_type;

static row_t row_of(uint64_t table, uint64_t number, uint64_t rows) {
    uint64_t mixed = (2 * number + table + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return (row_t){(mixed ^ (mixed >> 31)) % rows, number};
}

// Sends each row to the rank that its key belongs to.
static row_t *shuffle(const row_t *rows, size_t length, int *arrived) {
    int *counts = calloc(4 * ranks, sizeof *counts), *places = counts + ranks, *arriving = places + ranks, *from = arriving + ranks;
    for (size_t i = 0; i < length; i++) counts[rows[i].key % ranks]++;
    for (int i = 1; i < ranks; i++) places[i] = places[i - 1] + counts[i - 1];
    row_t *sent = malloc((length + 1) * sizeof *sent);
    int *next = malloc(ranks * sizeof *next);
    memcpy(next, places, ranks * sizeof *next);
    for (size_t i = 0; i < length; i++) sent[next[rows[i].key % ranks]++] = rows[i];
    MPI_Alltoall(counts, 1, MPI_INT, arriving, 1, MPI_INT, MPI_COMM_WORLD);
    for (int i = 1; i < ranks; i++) from[i] = from[i - 1] + arriving[i - 1];
    *arrived = from[ranks - 1] + arriving[ranks - 1];
    row_t *received = malloc((*arrived + 1) * sizeof *received);
    MPI_Alltoallv(sent, counts, places, row_type, received, arriving, from, row_type, MPI_COMM_WORLD);
    free(counts), free(sent), free(next);
    return received;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Type_contiguous(2, MPI_UINT64_T, &row_type);
    MPI_Type_commit(&row_type);
    size_t rows = argc > 1 ? strtoull(argv[1], 0, 10) : 20000;
    size_t first = rank * rows / ranks, length = (rank + 1) * rows / ranks - first;
    row_t *own[2];
    for (int table = 0; table < 2; table++) {
        own[table] = malloc((length + 1) * sizeof(row_t));
        for (size_t i = 0; i < length; i++) own[table][i] = row_of(table, first + i, rows);
    }

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    int lefts, rights;
    row_t *left = shuffle(own[0], length, &lefts), *right = shuffle(own[1], length, &rights);
    // A hash table with chains.
    size_t slots = 1;
    while (slots < 2 * (size_t)lefts) slots *= 2;
    int *heads = malloc(slots * sizeof *heads), *chain = malloc((lefts + 1) * sizeof *chain);
    memset(heads, -1, slots * sizeof *heads);
    for (int i = 0; i < lefts; i++) {
        size_t slot = left[i].key * 0x9e3779b97f4a7c15u >> 20 & (slots - 1);
        chain[i] = heads[slot], heads[slot] = i;
    }
    uint64_t totals[2] = {0, 0};
    for (int i = 0; i < rights; i++)
        for (int j = heads[right[i].key * 0x9e3779b97f4a7c15u >> 20 & (slots - 1)]; j >= 0; j = chain[j])
            if (left[j].key == right[i].key) totals[0]++, totals[1] += left[j].value ^ right[i].value;
    MPI_Allreduce(MPI_IN_PLACE, totals, 2, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%llu pairs, checksum %llx\n%.3f ms\n", (unsigned long long)totals[0], (unsigned long long)totals[1],
               (MPI_Wtime() - start) * 1e3);
    free(own[0]), free(own[1]), free(left), free(right), free(heads), free(chain);
    MPI_Type_free(&row_type);
    MPI_Finalize();
    return 0;
}
