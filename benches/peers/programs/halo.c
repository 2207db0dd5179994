// Heat on a plate whose rows are divided among the ranks, as crates/dist/examples/halo.rs does.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 48, COLUMNS = 32 };

typedef double row_t[COLUMNS];

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    int first = rank * ROWS / ranks, rows = (rank + 1) * ROWS / ranks - first, hot = ROWS / 2;
    int above = rank > 0 ? rank - 1 : MPI_PROC_NULL, below = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    row_t *plate = calloc(rows + 2, sizeof *plate), *next = calloc(rows + 2, sizeof *next);
    if (hot >= first && hot < first + rows)
        for (int j = 0; j < COLUMNS; j++) plate[hot - first + 1][j] = 100;

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int step = 0; step < steps; step++) {
        // At the edge of the plate no heat is lost: the halo is a copy of the edge.
        memcpy(plate[0], plate[1], sizeof *plate), memcpy(plate[rows + 1], plate[rows], sizeof *plate);
        MPI_Request requests[4];
        MPI_Irecv(plate[0], COLUMNS, MPI_DOUBLE, above, 0, MPI_COMM_WORLD, &requests[0]);
        MPI_Irecv(plate[rows + 1], COLUMNS, MPI_DOUBLE, below, 1, MPI_COMM_WORLD, &requests[1]);
        MPI_Isend(plate[1], COLUMNS, MPI_DOUBLE, above, 1, MPI_COMM_WORLD, &requests[2]);
        MPI_Isend(plate[rows], COLUMNS, MPI_DOUBLE, below, 0, MPI_COMM_WORLD, &requests[3]);
        MPI_Waitall(4, requests, MPI_STATUSES_IGNORE);
        for (int i = 1; i <= rows; i++)
            for (int j = 0; j < COLUMNS; j++) {
                double sides = plate[i][j > 0 ? j - 1 : 0] + plate[i][j + 1 < COLUMNS ? j + 1 : j];
                double around = sides + plate[i - 1][j] + plate[i + 1][j];
                next[i][j] = plate[i][j] + 0.25 * (0.25 * around - plate[i][j]);
            }
        row_t *old = plate;
        plate = next, next = old;
    }

    int *counts = malloc(2 * ranks * sizeof *counts), *places = counts + ranks;
    for (int i = 0; i < ranks; i++)
        places[i] = i * ROWS / ranks * COLUMNS, counts[i] = (i + 1) * ROWS / ranks * COLUMNS - places[i];
    row_t *whole = calloc(ROWS, sizeof *whole);
    MPI_Gatherv(plate[1], rows * COLUMNS, MPI_DOUBLE, whole, counts, places, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        double heat = 0, middle = whole[hot][COLUMNS / 2];
        uint64_t bits;
        memcpy(&bits, &middle, sizeof bits);
        for (int i = 0; i < ROWS * COLUMNS; i++) heat += whole[0][i];
        printf("heat %.3f, %.3f in the middle, bits %llx\n", heat, middle, (unsigned long long)bits);
        printf("%.3f ms\n", (MPI_Wtime() - start) * 1e3);
    }
    free(plate), free(next), free(counts), free(whole);
    MPI_Finalize();
    return 0;
}
