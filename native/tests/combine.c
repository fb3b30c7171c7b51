// Combines the values of several ranks in several threads, stops some of it, and compares with a
// plain loop: combine SEED RUNS. It prints how many runs were stopped.
#include "../combine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, WORKERS = 3 };

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void check(bool holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static void *work(void *op) {
    return pmesh_combine(op) ? op : NULL;
}

static void *stop(void *op) {
    pmesh_combining_stop(op);
    return NULL;
}

// One run: a fold of all ranks to all, and a copy of the last rank's values to the first.
static bool run(uint64_t count, bool stops) {
    const uint64_t nbytes = count * sizeof(int32_t);
    int32_t *sources[RANKS], *results[RANKS];
    uint64_t source_bytes[RANKS], result_bytes[RANKS];
    struct pmesh_place places[2 * RANKS] = {0};
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        sources[rank] = malloc(nbytes);
        results[rank] = calloc(1, nbytes);
        check(sources[rank] != NULL && results[rank] != NULL, "no memory");
        for (uint64_t i = 0; i < count; i++) {
            sources[rank][i] = (int32_t)draw(1000);
        }
        source_bytes[rank] = result_bytes[rank] = nbytes;
        places[rank].rank = places[RANKS + rank].rank = rank;
    }
    const struct pmesh_fold fold = {nbytes, 0, RANKS, RANKS, 2 * RANKS};
    struct pmesh_combining op = {
        .folds = &fold,
        .places = places,
        .sources = (const uint8_t *const *)sources,
        .source_bytes = source_bytes,
        .results = (uint8_t *const *)results,
        .result_bytes = result_bytes,
        .fold_count = 1,
        .place_count = 2 * RANKS,
        .ranks = RANKS,
        .dtype = PMESH_INT32,
        .reduction = PMESH_SUM,
    };
    check(pmesh_combining_fits(&op), "it fits");
    places[RANKS].offset = sizeof(int32_t);
    check(!pmesh_combining_fits(&op), "it leaves a result");
    places[RANKS].offset = UINT64_MAX - 3;
    check(!pmesh_combining_fits(&op), "its end wraps around");
    places[RANKS].offset = 0;
    places[0].rank = RANKS;
    check(!pmesh_combining_fits(&op), "there is no such rank");
    places[0].rank = 0;
    op.place_count--;
    check(!pmesh_combining_fits(&op), "there is no such place");
    op.place_count++;
    op.dtype = PMESH_DTYPES;
    check(!pmesh_combining_fits(&op), "there is no such dtype");
    op.dtype = PMESH_INT32;

    pthread_t threads[WORKERS + 1];
    bool whole = true;
    for (int i = 0; i < WORKERS; i++) {
        check(pthread_create(&threads[i], NULL, work, &op) == 0, "no thread");
    }
    if (stops) {
        check(pthread_create(&threads[WORKERS], NULL, stop, &op) == 0, "no thread");
        pthread_join(threads[WORKERS], NULL);
    }
    for (int i = 0; i < WORKERS; i++) {
        void *done;
        pthread_join(threads[i], &done);
        whole &= done != NULL;
    }
    check(whole || stops, "only a stop ends it early");
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        for (uint64_t i = 0; whole && i < count; i++) {
            int32_t sum = 0;
            for (uint32_t other = 0; other < RANKS; other++) {
                sum += sources[other][i];
            }
            check(results[rank][i] == sum, "every rank has the sum");
        }
    }
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        free(sources[rank]);
        free(results[rank]);
    }
    return whole;
}

int main(int argc, char **argv) {
    check(argc == 3, "combine SEED RUNS");
    state = strtoull(argv[1], NULL, 10) + 1;
    const uint64_t runs = strtoull(argv[2], NULL, 10);
    int stopped = 0;
    for (uint64_t i = 0; i < runs; i++) {
        stopped += !run(1 + draw(200000), i % 2 == 1);
    }
    printf("%d stopped\n", stopped);
    return 0;
}
