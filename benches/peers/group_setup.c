// Times what a communicator costs until its first result, as the example `group_setup` of dist-groups does.
//
// usage: mpirun -n 2 ./group_setup
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 300, WARMUPS = 20 };

static void sum(MPI_Comm comm) {
    float values[2] = {1, 1};
    MPI_Allreduce(MPI_IN_PLACE, values, 2, MPI_FLOAT, MPI_SUM, comm);
}

static MPI_Comm dup(MPI_Comm comm) {
    MPI_Comm made;
    MPI_Comm_dup(comm, &made);
    return made;
}

static MPI_Comm split(MPI_Comm comm) {
    MPI_Comm made;
    MPI_Comm_split(comm, 0, 0, &made);
    return made;
}

static void dup_and_sum(void) {
    MPI_Comm made = dup(MPI_COMM_WORLD);
    sum(made);
    MPI_Comm_free(&made);
}

static void split_and_sum(void) {
    MPI_Comm made = split(MPI_COMM_WORLD);
    sum(made);
    MPI_Comm_free(&made);
}

static void dup_and_message(void) {
    float values[2] = {1, 1};
    int rank;
    MPI_Comm made = dup(MPI_COMM_WORLD);
    MPI_Comm_rank(made, &rank);
    if (rank == 0) MPI_Send(values, 2, MPI_FLOAT, 1, 0, made);
    if (rank == 1) MPI_Recv(values, 2, MPI_FLOAT, 0, 0, made, MPI_STATUS_IGNORE);
    MPI_Comm_free(&made);
}

static void dup_and_split(void) {
    MPI_Comm first = dup(MPI_COMM_WORLD), second = split(first);
    sum(first);
    sum(second);
    MPI_Comm_free(&second);
    MPI_Comm_free(&first);
}

static int ascending(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

static void measure(const char *name, void (*run)(void), int rank) {
    static double samples[SAMPLES];
    for (int i = 0; i < SAMPLES; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        run();
        samples[i] = 1e6 * (MPI_Wtime() - start);
    }
    double first = samples[0], *counted = samples + WARMUPS;
    int count = SAMPLES - WARMUPS;
    qsort(counted, count, sizeof *counted, ascending);
    if (rank == 0)
        printf("%s: first %.1f, least %.1f, median %.1f us\n", name, first, counted[0], counted[count / 2]);
}

int main(int argc, char **argv) {
    int rank;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    sum(MPI_COMM_WORLD);
    measure("dup + allreduce", dup_and_sum, rank);
    measure("split + allreduce", split_and_sum, rank);
    measure("dup + message", dup_and_message, rank);
    measure("dup + split + 2 allreduces", dup_and_split, rank);
    MPI_Finalize();
    return 0;
}
