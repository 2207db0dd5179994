// Mean and variance of numbers that are divided among the ranks, as crates/dist/examples/welford.rs does.
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    double count, mean, squares;
} moments_t;

static moments_t merge(moments_t left, moments_t right) {
    double count = left.count + right.count, delta = right.mean - left.mean;
    if (count == 0) return (moments_t){0, 0, 0};
    return (moments_t){count, left.mean + delta * right.count / count,
                       left.squares + right.squares + delta * delta * left.count * right.count / count};
}

// MPI's operation is in[i] ∘ out[i], where `in` is of the lower rank.
static void merge_all(void *in, void *out, int *length, MPI_Datatype *type) {
    (void)type;
    for (int i = 0; i < *length; i++) ((moments_t *)out)[i] = merge(((moments_t *)in)[i], ((moments_t *)out)[i]);
}

static double number(uint64_t index) {
    double whole, scaled = (double)(index + 1) * 0.618033988749895;
    return 1e6 + modf(scaled, &whole);
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    uint64_t count = argc > 1 ? strtoull(argv[1], 0, 10) : 100000;
    MPI_Datatype type;
    MPI_Type_contiguous(3, MPI_DOUBLE, &type);
    MPI_Type_commit(&type);
    MPI_Op op;
    MPI_Op_create(merge_all, 0, &op);

    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    moments_t moments = {0, 0, 0};
    for (uint64_t i = rank * count / ranks; i < (rank + 1) * count / ranks; i++)
        moments = merge(moments, (moments_t){1, number(i), 0});
    MPI_Allreduce(MPI_IN_PLACE, &moments, 1, type, op, MPI_COMM_WORLD);
    if (rank == 0)
        printf("%.0f numbers, mean %.6f, variance %.6f\n%.3f ms\n", moments.count, moments.mean,
               moments.squares / (moments.count - 1), (MPI_Wtime() - start) * 1e3);
    MPI_Op_free(&op);
    MPI_Type_free(&type);
    MPI_Finalize();
    return 0;
}
