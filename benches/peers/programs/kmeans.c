// k-means over points that are divided among the ranks, as crates/dist/examples/kmeans.rs does.
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { CENTRES = 3 };

static double noise(long number, double factor) {
    double whole;
    return modf((double)(number + 1) * factor, &whole) * 4 - 2;
}

static double distance(const double *a, const double *b) { return hypot(a[0] - b[0], a[1] - b[1]); }

int main(int argc, char **argv) {
    static const double around[CENTRES][2] = {{0, 0}, {10, 0}, {0, 10}};
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    long count = argc > 1 ? atol(argv[1]) : 30000;
    long first = rank * count / ranks, length = (rank + 1) * count / ranks - first;
    double(*points)[2] = malloc((length + 1) * sizeof *points);
    for (long i = 0; i < length; i++) {
        points[i][0] = around[(first + i) % CENTRES][0] + noise(first + i, 0.618033988749895);
        points[i][1] = around[(first + i) % CENTRES][1] + noise(first + i, 0.754877666246693);
    }

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime(), centres[CENTRES][2] = {{1, 1}, {2, 1}, {1, 2}}, moved = 1;
    MPI_Bcast(centres, 2 * CENTRES, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    int round = 0;
    while (moved >= 1e-9) {
        double sums[CENTRES][3] = {{0}};
        for (long i = 0; i < length; i++) {
            int nearest = 0;
            for (int j = 1; j < CENTRES; j++)
                if (distance(centres[j], points[i]) < distance(centres[nearest], points[i])) nearest = j;
            sums[nearest][0] += points[i][0], sums[nearest][1] += points[i][1], sums[nearest][2] += 1;
        }
        MPI_Allreduce(MPI_IN_PLACE, sums, 3 * CENTRES, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        moved = 0;
        for (int j = 0; j < CENTRES; j++) {
            double next[2] = {sums[j][0] / sums[j][2], sums[j][1] / sums[j][2]};
            moved = fmax(moved, distance(next, centres[j]));
            centres[j][0] = next[0], centres[j][1] = next[1];
        }
        round++;
    }
    if (rank == 0) {
        printf("after %d rounds:\n", round);
        for (int j = 0; j < CENTRES; j++) printf("(%.3f, %.3f)\n", centres[j][0], centres[j][1]);
        printf("%.3f ms\n", (MPI_Wtime() - start) * 1e3);
    }
    free(points);
    MPI_Finalize();
    return 0;
}
