// Multiplies matrices that are divided into blocks on a grid of ranks, as crates/dist/examples/summa.rs does.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double factor(int which, int row, int column) {
    return which == 0 ? (7 * row + 3 * column) % 10 : (5 * row + column) % 10;
}

static int border(int n, int index, int parts) { return (int)((long)index * n / parts); }

static int owner(int n, int place, int parts) {
    int index = 0;
    while (border(n, index + 1, parts) <= place) index++;
    return index;
}

int main(int argc, char **argv) {
    int rank, ranks, grid[2] = {0, 0}, periods[2] = {0, 0}, place[2];
    MPI_Init(&argc, &argv);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Dims_create(ranks, 2, grid);
    MPI_Comm mesh, along_columns, along_rows;
    MPI_Cart_create(MPI_COMM_WORLD, 2, grid, periods, 0, &mesh);
    MPI_Comm_rank(mesh, &rank);
    MPI_Cart_coords(mesh, rank, 2, place);
    MPI_Cart_sub(mesh, (int[]){0, 1}, &along_columns);
    MPI_Cart_sub(mesh, (int[]){1, 0}, &along_rows);
    int n = argc > 1 ? atoi(argv[1]) : 60;
    int top = border(n, place[0], grid[0]), height = border(n, place[0] + 1, grid[0]) - top;
    int side = border(n, place[1], grid[1]), width = border(n, place[1] + 1, grid[1]) - side;
    double *left = malloc((height * width + 1) * sizeof *left), *right = malloc((height * width + 1) * sizeof *right);
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++)
            left[i * width + j] = factor(0, top + i, side + j), right[i * width + j] = factor(1, top + i, side + j);
    double *product = calloc(height * width + 1, sizeof *product);
    double *lefts = malloc((height * n + 1) * sizeof *lefts), *rights = malloc((width * n + 1) * sizeof *rights);

    MPI_Barrier(mesh);
    double start = MPI_Wtime();
    // A panel belongs to one column of ranks on the left and to one row of ranks on the right.
    for (int from = 0, to; from < n; from = to) {
        int from_column = owner(n, from, grid[1]), from_row = owner(n, from, grid[0]);
        int end = border(n, from_column + 1, grid[1]), other = border(n, from_row + 1, grid[0]);
        to = end < other ? end : other;
        int depth = to - from;
        if (from_column == place[1])
            for (int i = 0; i < height; i++)
                memcpy(lefts + i * depth, left + i * width + from - side, depth * sizeof *lefts);
        if (from_row == place[0]) memcpy(rights, right + (from - top) * width, depth * width * sizeof *rights);
        MPI_Bcast(lefts, height * depth, MPI_DOUBLE, from_column, along_columns);
        MPI_Bcast(rights, depth * width, MPI_DOUBLE, from_row, along_rows);
        for (int i = 0; i < height; i++)
            for (int k = 0; k < depth; k++)
                for (int j = 0; j < width; j++) product[i * width + j] += lefts[i * depth + k] * rights[k * width + j];
    }

    double totals[2] = {0, 0};
    for (int i = 0; i < height; i++)
        for (int j = 0; j < width; j++) {
            totals[0] += product[i * width + j];
            totals[1] += product[i * width + j] * ((top + i + 2 * (side + j)) % 13);
        }
    MPI_Allreduce(MPI_IN_PLACE, totals, 2, MPI_DOUBLE, MPI_SUM, mesh);
    if (rank == 0) printf("sum %.0f, weighted %.0f\n%.3f ms\n", totals[0], totals[1], (MPI_Wtime() - start) * 1e3);
    free(left), free(right), free(product), free(lefts), free(rights);
    MPI_Comm_free(&along_columns), MPI_Comm_free(&along_rows), MPI_Comm_free(&mesh);
    MPI_Finalize();
    return 0;
}
