// Threads that meet for ops again and again, as the servers of one agent's ranks do, and that are
// recalled at any moment. An op is done for all of them or for none: whoever ends it notes its
// number, and each thread compares that with what it is told. A thread that is told no comes again,
// and may recall the others first, as Python does.
//
// Run: meeting [FIRST_SEED [COUNT]]
#include "toy.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "../meeting.h"

// --- threads in an op, and how many there have to be before one of them goes on

static _Atomic uint32_t working, arrived, awaited;
static _Atomic uint64_t shared; // ops that had several

static bool watched_combine(struct pmesh_combining *op) {
    working++;
    shared += ++arrived == 2;
    while (arrived < awaited) {
        sched_yield();
    }
    const bool done = pmesh_combine(op);
    sched_yield(); // the others may be at their last slices
    if (--working == 0) {
        arrived = 0;
    }
    return done;
}

// Another thread may try to wake this one before it waits.
static int slow_wait(pthread_cond_t *changed, pthread_mutex_t *lock) {
    for (int i = 0; i < 5; i++) {
        sched_yield();
    }
    return pthread_cond_wait(changed, lock);
}

#define pmesh_combine watched_combine
#define pthread_cond_wait slow_wait
#include "../meeting.c"
#undef pmesh_combine
#undef pthread_cond_wait

enum {
    MOST_RANKS = 5,
    OPS = 50,             // of a seed
    LARGE_COUNT = 50000,  // several slices, for which it is worth waking a thread
    OTHER_NUMBERS = 1000, // from here on, each rank's own
    HANGS_S = 60,         // of a seed; the program then ends by SIGALRM
    WAITS = 200,
    ELSEWHERE = 77, // what ranks elsewhere add
};

// What becomes of what is folded: each rank gets it, all share it, or rank 0 exchanges it.
enum kind { OWN, SHARED, EXCHANGED, KINDS };

struct rank {
    struct world *world;
    uint32_t index;
    uint64_t op;
    struct random random;
    pthread_t thread;
    _Atomic bool recalled;
    _Atomic uint64_t steps; // into a meeting, and out again: odd if it is there
    uint32_t *sources[2], *results[2];
    const uint32_t *result; // of the last op
};

struct world {
    uint64_t seed, count; // values
    uint32_t size;
    bool has_whims; // of a rank's memory, its number, and whether an op may end
    bool is_slow;   // an exchange, until somebody presses
    _Atomic bool exchanges;
    enum kind kind;
    uint32_t *folded;
    uint32_t *slots[PMESH_MOST_SLOTS];
    struct pmesh_fold fold;
    struct pmesh_place places[2 * MOST_RANKS];
    struct pmesh_combining op;
    struct pmesh_meeting *meeting;
    pthread_mutex_t recalling; // one thread does at a time
    _Atomic uint64_t ended;    // the last op that is done
    _Atomic uint32_t left;     // ranks that have not ended all ops
    _Atomic uint64_t in_vain;  // ops that count for none, for this rank
    struct rank ranks[MOST_RANKS];
};

static struct world *new_world(uint64_t seed, uint32_t size, uint64_t count, enum kind kind) {
    struct world *world = calloc(1, sizeof *world);
    assert(world);
    world->seed = seed;
    world->size = world->left = size;
    world->count = count;
    world->kind = kind;
    world->folded = exactly(4 * count);
    for (int i = 0; i < PMESH_MOST_SLOTS; i++) {
        world->slots[i] = exactly(4 * count);
    }
    pthread_mutex_init(&world->recalling, NULL);
    for (uint32_t r = 0; r < size; r++) {
        struct rank *rank = &world->ranks[r];
        rank->world = world;
        rank->index = r;
        rank->op = 1;
        rank->random.state = mixed(seed * MOST_RANKS + r);
        for (int i = 0; i < 2; i++) {
            rank->sources[i] = exactly(4 * count);
            rank->results[i] = exactly(4 * count);
        }
        world->places[r].rank = world->places[size + r].rank = r;
    }
    world->fold = (struct pmesh_fold){4 * count, 0, size, size, kind ? size + 1 : 2 * size};
    world->op = (struct pmesh_combining){.folds = &world->fold,
                                         .places = world->places,
                                         .fold_count = 1,
                                         .place_count = 2 * size,
                                         .ranks = size,
                                         .dtype = PMESH_INT32,
                                         .reduction = PMESH_SUM};
    world->meeting = pmesh_meeting_new(&world->op, kind == SHARED, kind == EXCHANGED);
    assert(world->meeting);
    return world;
}

static void free_world(struct world *world) {
    pmesh_meeting_free(world->meeting);
    for (uint32_t r = 0; r < world->size; r++) {
        for (int i = 0; i < 2; i++) {
            free(world->ranks[r].sources[i]);
            free(world->ranks[r].results[i]);
        }
    }
    for (int i = 0; i < PMESH_MOST_SLOTS; i++) {
        free(world->slots[i]);
    }
    free(world->folded);
    pthread_mutex_destroy(&world->recalling);
    free(world);
}

static uint32_t first_value(const struct world *world, uint64_t op, uint32_t rank) {
    return (uint32_t)mixed(world->seed + mixed(op * MOST_RANKS + rank));
}

static void write_source(struct rank *rank) {
    const uint32_t first = first_value(rank->world, rank->op, rank->index);
    for (uint64_t i = 0; i < rank->world->count; i++) {
        rank->sources[rank->op % 2][i] = first + (uint32_t)i;
    }
}

static void check_sum(const struct rank *rank, const uint32_t *found, uint32_t more) {
    const struct world *world = rank->world;
    uint32_t sum = more;
    for (uint32_t r = 0; r < world->size; r++) {
        sum += first_value(world, rank->op, r);
    }
    for (uint64_t i = 0; i < world->count; i++) {
        assert(found[i] == sum + world->size * (uint32_t)i);
    }
}

static void check_result(const struct rank *rank) {
    check_sum(rank, rank->result, rank->world->kind == EXCHANGED ? ELSEWHERE : 0);
}

// Whoever ends an op says whether it is done.
static bool may_end(void *of) {
    struct rank *rank = of;
    const bool may = !rank->world->has_whims || below(&rank->random, 8);
    assert(rank->world->ended == rank->op - 1 && !working);
    rank->world->ended += may;
    return may;
}

// What rank 0 does with ranks elsewhere, which may be late, or lost.
static const uint8_t *exchange(void *of) {
    struct rank *rank = of;
    struct world *world = rank->world;
    uint32_t *result = rank->results[rank->op % 2];
    assert(rank->index == 0 && world->ended == rank->op - 1 && !working);
    check_sum(rank, world->folded, 0);
    world->exchanges = true;
    while (!pmesh_meeting_is_pressed(world->meeting) &&
           (world->is_slow || (world->has_whims && below(&rank->random, 50)))) {
        sched_yield();
    }
    if (world->is_slow || (world->has_whims && !below(&rank->random, 8))) {
        return NULL;
    }
    for (uint64_t i = 0; i < world->count; i++) {
        result[i] = world->folded[i] + ELSEWHERE;
    }
    world->ended++;
    return (const uint8_t *)result;
}

// Now and then, bring what must not meet; return whether it is that.
static bool spoil(struct rank *rank, struct pmesh_part *part) {
    const enum kind kind = rank->world->kind;
    switch (rank->world->has_whims ? below(&rank->random, 50) : UINT64_MAX) {
    case 0: part->source_bytes -= 4; return true;
    case 1: part->result_bytes -= 4; return kind != SHARED || rank->index == 0;
    case 2: part->source++; return true; // its values are not aligned
    case 3:
        if (kind == EXCHANGED && rank->index) {
            return false; // it is copied, which needs no alignment
        }
        part->result++;
        return kind != SHARED;
    case 4: part->rank = rank->world->size; return true;
    case 5: part->rank = UINT32_MAX; return true;
    case 6: part->number = OTHER_NUMBERS + rank->index; return rank->world->size > 1;
    default: return false;
    }
}

// Offer all slots, or only those that this rank happens to have free, in its own order.
static void offer(struct rank *rank, struct pmesh_part *part) {
    const uint64_t first = below(&rank->random, PMESH_MOST_SLOTS);
    for (uint64_t i = 0; i < PMESH_MOST_SLOTS; i++) {
        if (!rank->world->has_whims || below(&rank->random, 5)) {
            part->slots[part->slot_count++] =
                (uint8_t *)rank->world->slots[(first + i) % PMESH_MOST_SLOTS];
        }
    }
}

static bool has_offered(const struct pmesh_part *part) {
    bool found = false;
    for (uint32_t i = 0; i < part->slot_count; i++) {
        found |= part->slots[i] == part->result;
    }
    return found;
}

// Come for the next op; return whether it is done.
static bool meet(struct rank *rank) {
    const struct world *world = rank->world;
    const uint64_t op = rank->op;
    struct pmesh_part part = {.rank = rank->index,
                              .number = op,
                              .source = (const uint8_t *)rank->sources[op % 2],
                              .result = (uint8_t *)rank->results[op % 2],
                              .source_bytes = 4 * world->count,
                              .result_bytes = 4 * world->count,
                              .recalled = &rank->recalled,
                              .may_end = may_end,
                              .of = rank};
    const bool exchanges = world->kind == EXCHANGED && rank->index == 0;
    if (exchanges) {
        part.result = (uint8_t *)world->folded;
        part.exchange = exchange;
        part.exchanged_bytes = 4 * world->count;
    }
    const bool is_spoiled = spoil(rank, &part);
    if (world->kind == SHARED) {
        offer(rank, &part);
    }
    assert(world->ended == op - 1); // none was done without this rank
    rank->steps++;
    const bool done = pmesh_meet(world->meeting, &part);
    rank->steps++;
    assert(!working && !(done && is_spoiled));
    assert(world->ended == (done ? op : op - 1));
    assert(!done || world->kind != SHARED || has_offered(&part));
    rank->result = exchanges ? rank->results[op % 2] : (const uint32_t *)part.result;
    return done;
}

static void recall(struct rank *rank) {
    struct world *world = rank->world;
    pthread_mutex_lock(&world->recalling);
    rank->recalled = true;
    pmesh_meeting_wake(world->meeting);
    const uint64_t steps = rank->steps;
    while (steps % 2 && rank->steps == steps) {
        sched_yield();
    }
    rank->recalled = false;
    pthread_mutex_unlock(&world->recalling);
}

static void *repeat(void *argument) {
    struct rank *rank = argument;
    struct world *world = rank->world;
    for (; rank->op <= OPS; rank->op++) {
        write_source(rank);
        while (!meet(rank)) {
            world->in_vain++;
            for (uint32_t r = 0; below(&rank->random, 2) && r < world->size; r++) {
                recall(&world->ranks[r]);
            }
        }
        check_result(rank);
    }
    world->left--;
    return NULL;
}

static void start(struct rank *rank, void *(*what)(void *)) {
    const int failed = pthread_create(&rank->thread, NULL, what, rank);
    assert(!failed);
}

static uint64_t ranks_meet_and_are_recalled(uint64_t seed) {
    struct random random = {mixed(seed)};
    const bool is_large = seed % 3 == 0;
    const uint32_t size = 1 + (uint32_t)(seed % MOST_RANKS);
    const uint64_t count = is_large ? LARGE_COUNT : 1;
    struct world *world = new_world(seed, size, count + below(&random, 300), seed / 2 % KINDS);
    world->has_whims = true;
    awaited = is_large && seed % 2 ? size : 0;
    for (uint32_t r = 0; r < size; r++) {
        start(&world->ranks[r], repeat);
    }
    while (world->left) {
        for (uint64_t i = below(&random, 1000); i && world->left; i--) {
            sched_yield();
        }
        recall(&world->ranks[below(&random, size)]);
    }
    for (uint32_t r = 0; r < size; r++) {
        pthread_join(world->ranks[r].thread, NULL);
    }
    const uint64_t in_vain = world->in_vain;
    awaited = 0;
    free_world(world);
    return in_vain;
}

// --- one op

static void *meet_once(void *argument) {
    struct rank *rank = argument;
    write_source(rank);
    const bool done = meet(rank);
    if (done) {
        check_result(rank);
    }
    return done ? rank : NULL;
}

static bool join(const struct rank *rank) {
    void *done;
    pthread_join(rank->thread, &done);
    return done != NULL;
}

static void recall_from_meeting(struct rank *rank, uint64_t yields) {
    while (rank->steps % 2 == 0) {
        sched_yield();
    }
    for (; yields; yields--) {
        sched_yield();
    }
    recall(rank);
}

// It may wait already, or be about to.
static void who_is_recalled_leaves_and_the_others_wait_on(void) {
    for (uint64_t i = 0; i < WAITS; i++) {
        struct world *world = new_world(i, 3, 10, i % KINDS);
        struct rank *ranks = world->ranks;
        start(&ranks[0], meet_once);
        start(&ranks[1], meet_once);
        recall_from_meeting(&ranks[1], i % 20);
        assert(!join(&ranks[1]));
        start(&ranks[1], meet_once);
        start(&ranks[2], meet_once);
        for (uint32_t r = 0; r < 3; r++) {
            assert(join(&ranks[r]));
        }
        free_world(world);
    }
}

// All of them, for ranks elsewhere do not come.
static void who_is_recalled_ends_an_exchange(void) {
    for (uint64_t i = 0; i < WAITS; i++) {
        struct world *world = new_world(i, 3, 10, EXCHANGED);
        struct rank *ranks = world->ranks;
        world->is_slow = true;
        for (uint32_t r = 0; r < 3; r++) {
            start(&ranks[r], meet_once);
        }
        while (!world->exchanges) {
            sched_yield();
        }
        recall(&ranks[1 + i % 2]);
        for (uint32_t r = 0; r < 3; r++) {
            assert(!join(&ranks[r]));
        }
        free_world(world);
    }
}

static void nans_become_equal_if_they_are_to(void) {
    const uint32_t nan = 0x7fc12345;
    struct world *world = new_world(1, 1, 1, OWN);
    struct rank *rank = &world->ranks[0];
    pmesh_meeting_free(world->meeting);
    world->op.dtype = PMESH_FLOAT32;
    world->op.makes_nan_equal = 1;
    world->meeting = pmesh_meeting_new(&world->op, false, false);
    assert(world->meeting);
    rank->sources[1][0] = nan;
    const bool done = meet(rank);
    assert(done && rank->results[1][0] != nan);
    free_world(world);
}

int main(int count, char **arguments) {
    const uint64_t first = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    const uint64_t seeds = count > 2 ? strtoull(arguments[2], NULL, 10) : 30;
    uint64_t in_vain = 0;
    alarm(HANGS_S);
    who_is_recalled_leaves_and_the_others_wait_on();
    who_is_recalled_ends_an_exchange();
    nans_become_equal_if_they_are_to();
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed); // the last one if it fails
        alarm(HANGS_S);
        in_vain += ranks_meet_and_are_recalled(seed);
    }
    printf("%llu times in vain, %llu ops shared\n", (unsigned long long)in_vain,
           (unsigned long long)shared);
    return 0;
}
