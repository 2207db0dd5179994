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

enum operation {
    ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE, GATHER, SCATTER, SCAN, BARRIER, SENDRECV, PINGPONG,
    OPERATIONS
};
static const char *const names[OPERATIONS] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce",
                                              "gather", "scatter", "scan", "barrier", "sendrecv", "pingpong"};

static int is_between_two(enum operation operation) { return operation == SENDRECV || operation == PINGPONG; }

static void to_and_fro(int count) {
    for (int turn = 0; turn < 2; turn++) {
        if (turn == rank) MPI_Send(input, count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD);
        else MPI_Recv(input, count, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

static void call(enum operation operation, int count) {
    int root = calls++ % ranks, part = count / ranks;
    MPI_Comm all = MPI_COMM_WORLD;
    if (is_between_two(operation) && rank > 1) return;
    switch (operation) {
    case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, input, count, MPI_FLOAT, MPI_SUM, all); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(input, output, part, MPI_FLOAT, MPI_SUM, all); break;
    case ALL_GATHER: MPI_Allgather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, all); break;
    case ALL_TO_ALL: MPI_Alltoall(input, part, MPI_FLOAT, output, part, MPI_FLOAT, all); break;
    case BROADCAST: MPI_Bcast(input, count, MPI_FLOAT, root, all); break;
    case REDUCE: MPI_Reduce(rank == root ? MPI_IN_PLACE : input, input, count, MPI_FLOAT, MPI_SUM, root, all); break;
    case GATHER: MPI_Gather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, root, all); break;
    case SCATTER: MPI_Scatter(input, part, MPI_FLOAT, output, part, MPI_FLOAT, root, all); break;
    case SCAN: MPI_Scan(MPI_IN_PLACE, input, count, MPI_FLOAT, MPI_SUM, all); break;
    case BARRIER: MPI_Barrier(all); break;
    case SENDRECV:
        MPI_Sendrecv(input, count, MPI_FLOAT, 1 - rank, 0, output, count, MPI_FLOAT, 1 - rank, 0, all, MPI_STATUS_IGNORE);
        break;
    default: to_and_fro(count);
    }
}

// Seconds that so many calls take on this rank.
static double spent(enum operation operation, int count, int repeats) {
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

static double median(const double *sorted, int count) { return (sorted[(count - 1) / 2] + sorted[count / 2]) / 2; }

static long output_bytes(enum operation operation, long bytes) {
    return operation == ALL_GATHER || operation == GATHER ? bytes * ranks : bytes;
}

static void measure(const char *peer, const char *transport, enum operation operation, long bytes) {
    int count = (int)(bytes / sizeof *input), trips = operation == PINGPONG ? 2 : 1;
    double one = 0, times[SAMPLES_MAX];
    calls = 0;
    memset(input, 0, bytes), memset(output, 0, output_bytes(operation, bytes));
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
               peer, transport, names[operation], ranks, bytes, median(times, samples), times[0], times[samples - 1], samples,
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
    for (char *rest, *name = strtok_r(argv[4], ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        enum operation operation = 0;
        while (operation < OPERATIONS && strcmp(name, names[operation])) operation++;
        if (operation == OPERATIONS) continue;
        char sizes[1024], *tail;
        snprintf(sizes, sizeof sizes, "%s", operation == BARRIER ? "0" : argv[5]);
        for (char *size = strtok_r(sizes, ",", &tail); size; size = strtok_r(NULL, ",", &tail)) {
            long bytes = atol(size);
            input = memory(bytes), output = memory(output_bytes(operation, bytes));
            measure(argv[1], argv[2], operation, bytes);
            free(input), free(output);
        }
    }
    MPI_Finalize();
    return 0;
}
