// Times MPI's collectives the way `distctl bench` times ours, and prints the same lines.
//
// usage: mpi PEER TRANSPORT TOUCH OPERATIONS BYTES, as in: mpi openmpi-4 tcp 0 all_reduce,broadcast 8,1024
//
// A sample is a barrier, then calls back to back for about 4 ms; its time is that of one call on the slowest rank.
// With TOUCH, buffers of 64 KiB and more are rewritten before each call, which is not timed.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLES_MAX = 21, SAMPLES_MIN = 7, WARMUPS = 3, TOUCH_BYTES_MIN = 64 << 10 };

static int rank, ranks, touching, calls;
static float *input, *output;

static int is(const char *operation, const char *name) { return strcmp(operation, name) == 0; }

static int is_between_two(const char *operation) { return is(operation, "sendrecv") || is(operation, "pingpong"); }

static void between_two(const char *operation, int count) {
    int peer = 1 - rank;
    if (is(operation, "sendrecv"))
        MPI_Sendrecv(input, count, MPI_FLOAT, peer, 0, output, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD,
                     MPI_STATUS_IGNORE);
    if (is(operation, "pingpong"))
        for (int turn = 0; turn < 2; turn++) {
            if (turn == rank) MPI_Send(input, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD);
            else MPI_Recv(input, count, MPI_FLOAT, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        }
}

static void call(const char *operation, int count) {
    int root = calls++ % ranks, part = count / ranks;
    MPI_Comm all = MPI_COMM_WORLD;
    if (is(operation, "all_reduce")) MPI_Allreduce(MPI_IN_PLACE, input, count, MPI_FLOAT, MPI_SUM, all);
    else if (is(operation, "reduce_scatter"))
        MPI_Reduce_scatter_block(input, output, part, MPI_FLOAT, MPI_SUM, all);
    else if (is(operation, "all_gather")) MPI_Allgather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, all);
    else if (is(operation, "all_to_all")) MPI_Alltoall(input, part, MPI_FLOAT, output, part, MPI_FLOAT, all);
    else if (is(operation, "broadcast")) MPI_Bcast(input, count, MPI_FLOAT, root, all);
    else if (is(operation, "reduce"))
        MPI_Reduce(rank == root ? MPI_IN_PLACE : input, input, count, MPI_FLOAT, MPI_SUM, root, all);
    else if (is(operation, "gather")) MPI_Gather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, root, all);
    else if (is(operation, "scatter")) MPI_Scatter(input, part, MPI_FLOAT, output, part, MPI_FLOAT, root, all);
    else if (is(operation, "scan")) MPI_Scan(MPI_IN_PLACE, input, count, MPI_FLOAT, MPI_SUM, all);
    else if (is(operation, "barrier")) MPI_Barrier(all);
    else if (rank < 2) between_two(operation, count);
}

// Seconds that so many calls take on this rank.
static double spent(const char *operation, int count, int repeats) {
    int touch = touching && count * sizeof *input >= TOUCH_BYTES_MIN;
    double total = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int i = 0; i < repeats; i++) {
        if (touch) {
            // A rank that is through would rewrite its buffer while others are timed on the same core.
            MPI_Barrier(MPI_COMM_WORLD);
            if (rank < 2 || !is_between_two(operation))
                for (int j = 0; j < count; j++) input[j] = 1;
            MPI_Barrier(MPI_COMM_WORLD);
            start = MPI_Wtime();
        }
        call(operation, count);
        if (touch) total += MPI_Wtime() - start;
    }
    return touch ? total : MPI_Wtime() - start;
}

static int between(double value, int least, int most) {
    return value < least ? least : value > most ? most : (int)value;
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void measure(const char *peer, const char *transport, const char *operation, long bytes) {
    int count = (int)(bytes / sizeof *input), trips = is(operation, "pingpong") ? 2 : 1;
    double one = 0, times[SAMPLES_MAX];
    calls = 0;
    memset(input, 0, bytes);
    for (int i = 0; i < WARMUPS; i++) one = spent(operation, count, 1) * 1e6;
    MPI_Allreduce(MPI_IN_PLACE, &one, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (one < 0.01) one = 0.01;
    int repeats = between(4000 / one, 1, 20000), samples = between(3e6 / (one * repeats), SAMPLES_MIN, SAMPLES_MAX);
    for (int i = 0; i < samples; i++) times[i] = spent(operation, count, repeats) * 1e6 / repeats / trips;
    MPI_Allreduce(MPI_IN_PLACE, times, samples, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(times, samples, sizeof *times, ascending);
    if (rank == 0)
        printf("{\"peer\":\"%s\",\"transport\":\"%s\",\"op\":\"%s\",\"ranks\":%d,\"bytes\":%ld,\"median_us\":%.3f,"
               "\"min_us\":%.3f,\"max_us\":%.3f,\"samples\":%d,\"touch\":%s}\n",
               peer, transport, operation, ranks, bytes, times[samples / 2], times[0], times[samples - 1], samples,
               touching && bytes >= TOUCH_BYTES_MIN ? "true" : "false");
    fflush(stdout);
}

static float *memory(long bytes) {
    float *memory = calloc(1, bytes > 64 ? bytes : 64);
    if (!memory) MPI_Abort(MPI_COMM_WORLD, 1);
    return memory;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 6) return 2;
    touching = atoi(argv[3]);
    for (char *rest, *operation = strtok_r(argv[4], ",", &rest); operation; operation = strtok_r(NULL, ",", &rest)) {
        char sizes[1024], *tail;
        snprintf(sizes, sizeof sizes, "%s", is(operation, "barrier") ? "0" : argv[5]);
        for (char *size = strtok_r(sizes, ",", &tail); size; size = strtok_r(NULL, ",", &tail)) {
            long bytes = atol(size);
            int gathers = is(operation, "all_gather") || is(operation, "gather");
            input = memory(bytes), output = memory(gathers ? bytes * ranks : bytes);
            measure(argv[1], argv[2], operation, bytes);
            free(input), free(output);
        }
    }
    MPI_Finalize();
    return 0;
}
