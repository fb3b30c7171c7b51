// Runs plans: `pmesh/net/lanes/executor.py` does the same in Python, and says more.
//
// A runner has two threads. Of a large op, one sends and the other receives and adds, so that both
// cores and both directions are used. Of a small op, one does both; what can be done at once is
// done by the caller, without a thread. A thread that can do nothing waits in `poll`, for its
// sockets and for a pipe by which the other thread, or `pmesh_stop`, wakes it.
#include "combine.h"
#include "pipes.h"
#include "subflows.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RECEIVES = 1, SENDS = 2, BOTH = RECEIVES | SENDS };
enum { SIDES = 2, COPY_BYTES = 256 * 1024, LATE_RECORDS = 64 };

// One thread, and what wakes it.
struct side {
    struct pmesh_runner *runner;
    pthread_t thread;
    bool has_thread;
    unsigned duties;           // of the op that runs; 0 when the thread is idle
    int wake[2];               // a pipe
    _Atomic bool sleeping;     // until the other side gets further
    _Atomic uint32_t progress; // counts what this side has done
    struct pollfd *polled;
};

struct pmesh_runner {
    struct pmesh_op *op;
    _Atomic uint32_t *done; // of each track, how many records
    struct pmesh_waiting *waiting;
    uint32_t room;   // tracks for which there is memory
    uint32_t copy;   // the copy that comes next
    uint64_t copied; // bytes of it
    bool two;        // both sides are at work
    _Atomic bool stopped;
    _Atomic unsigned over; // duties that were seen done: a path may be lost later, with what it has
    struct side sides[SIDES];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int at_work; // threads
    bool closing, signalled;
    int ended[2]; // a pipe
};

// --- what one side does

static void wake(const struct side *side) {
    pmesh_signal(side->wake);
}

static void stop(struct pmesh_runner *runner) {
    runner->stopped = true;
    for (int i = 0; i < SIDES; i++) {
        wake(&runner->sides[i]);
    }
}

// Count a record, and wake the other side if it may have waited for it.
static void count(struct pmesh_runner *runner, struct side *side, uint32_t track) {
    atomic_fetch_add(&runner->done[track], 1);
    if (!runner->two) {
        return;
    }
    struct side *other = &runner->sides[side == runner->sides];
    atomic_fetch_add(&side->progress, 1);
    if (atomic_exchange(&other->sleeping, false)) {
        wake(other);
    }
}

static bool has(const struct pmesh_runner *runner, uint32_t need_begin, uint32_t need_end) {
    const struct pmesh_need *needs = runner->op->plan->needs;
    for (uint32_t i = need_begin; i < need_end; i++) {
        if (atomic_load(&runner->done[needs[i].track]) < needs[i].number) {
            return false;
        }
    }
    return true;
}

static bool has_next(const struct pmesh_runner *runner, uint32_t track) {
    const struct pmesh_track *all = &runner->op->plan->tracks[track];
    return atomic_load(&runner->done[track]) < all->end - all->begin;
}

// The next record of a track; NULL after the last one.
static const struct pmesh_record *next_record(const struct pmesh_runner *runner, uint32_t track) {
    const struct pmesh_plan *plan = runner->op->plan;
    const uint32_t i = plan->tracks[track].begin + atomic_load(&runner->done[track]);
    return has_next(runner, track) ? &plan->records[i] : NULL;
}

// Have these bytes of the source made, if they are made as they are read.
static void need_source(const struct pmesh_op *op, uint64_t offset, uint64_t nbytes) {
    if (op->fold && nbytes) {
        pmesh_fold(op->fold, offset, nbytes);
    }
}

static void add(const struct pmesh_op *op, const struct pmesh_record *record) {
    if (record->then == PMESH_KEEP || !record->nbytes) {
        return;
    }
    const uint64_t values = record->nbytes / pmesh_itemsize(op->dtype, op->reduction);
    uint8_t *arrived = op->regions[record->region] + record->offset, *into = arrived;
    const uint8_t *other = op->regions[PMESH_SOURCE] + record->other;
    if (record->then == PMESH_ADD_TO_RESULT) {
        into = op->regions[PMESH_RESULT] + record->other;
        other = arrived;
    } else {
        need_source(op, record->other, record->nbytes);
    }
    pmesh_accumulate(op->dtype, op->reduction, into, other, values);
    if (record->finishes) {
        pmesh_finish(op->dtype, op->reduction, into, values, op->plan->size);
        if (op->plan->added_twice) { // I3: the other ranks add for themselves
            pmesh_make_nan_equal(op->dtype, into, values);
        }
    }
}

// Returns whether it got further.
static bool receive_some(struct pmesh_runner *runner, struct side *side, uint32_t track) {
    const struct pmesh_record *record = next_record(runner, track);
    struct pmesh_waiting *waiting = &runner->waiting[track];
    waiting->network = waiting->progress = false;
    if (!record || waiting->held) {
        return false;
    }
    if (!has(runner, record->need_begin, record->need_end)) {
        waiting->progress = true;
        return false;
    }
    switch (pmesh_receive(runner->op, track, record, atomic_load(&runner->done[track]), waiting)) {
    case PMESH_LANDED:
        add(runner->op, record);
        count(runner, side, track);
        return true;
    case PMESH_MOVED: return true;
    case PMESH_WAITS: waiting->network = !waiting->held; return false;
    default: stop(runner); return false;
    }
}

// Seal a record, if it may be sent; note whether it waits for another track.
static bool seal_next(struct pmesh_runner *runner, struct side *side, uint32_t track,
                      const struct pmesh_record *record) {
    if (!has(runner, record->need_begin, record->need_end)) {
        runner->waiting[track].progress = true;
        return false;
    }
    if (record->region == PMESH_SOURCE) {
        need_source(runner->op, record->offset, record->nbytes);
    }
    if (!pmesh_seal_record(runner->op, track, record, atomic_load(&runner->done[track]))) {
        stop(runner);
        return false;
    }
    count(runner, side, track);
    return true;
}

static bool send_some(struct pmesh_runner *runner, struct side *side, uint32_t track) {
    const struct pmesh_lane *lane = runner->op->lanes[track];
    const struct pmesh_record *record = next_record(runner, track);
    struct pmesh_waiting *waiting = &runner->waiting[track];
    waiting->network = waiting->progress = false;
    const bool may_seal = pmesh_may_seal(lane);
    const bool sealed = record && may_seal && seal_next(runner, side, track, record);
    const bool awaits_room = record && !may_seal;
    if (runner->stopped || !(sealed || awaits_room || pmesh_has_unsent(lane))) {
        return false;
    }
    switch (pmesh_flush(runner->op, track)) {
    case PMESH_MOVED: return true;
    case PMESH_WAITS: waiting->network = true; return sealed;
    default: stop(runner); return false;
    }
}

static bool compute_some(struct pmesh_runner *runner, struct side *side, uint32_t track) {
    const struct pmesh_plan *plan = runner->op->plan;
    const uint32_t i = plan->tracks[track].begin + atomic_load(&runner->done[track]);
    const struct pmesh_work *work = has_next(runner, track) ? &plan->works[i] : NULL;
    const bool waits = work && !has(runner, work->need_begin, work->need_end);
    runner->waiting[track].progress = waits;
    if (!work || waits) {
        return false;
    }
    pmesh_compute(runner->op, work);
    count(runner, side, track);
    return true;
}

static bool copy_some(struct pmesh_runner *runner) {
    const struct pmesh_op *op = runner->op;
    if (runner->copy == op->plan->copy_count) {
        return false;
    }
    const struct pmesh_copy *copy = &op->plan->copies[runner->copy];
    const uint64_t left = copy->nbytes - runner->copied;
    const uint64_t nbytes = left < COPY_BYTES ? left : COPY_BYTES;
    need_source(op, copy->source + runner->copied, nbytes);
    if (nbytes) {
        memcpy(op->regions[PMESH_RESULT] + copy->result + runner->copied,
               op->regions[PMESH_SOURCE] + copy->source + runner->copied, (size_t)nbytes);
    }
    runner->copied += nbytes;
    if (runner->copied == copy->nbytes) {
        runner->copy++;
        runner->copied = 0;
    }
    return true;
}

// The tracks with a lane; queues of works follow.
static uint32_t lanes_of(const struct pmesh_plan *plan) {
    return plan->receiving + plan->sending;
}

static uint32_t tracks_of(const struct pmesh_plan *plan) {
    return lanes_of(plan) + plan->computing;
}

// The side that sends also does the second queue of works: it decodes what it has sent.
static bool is_ours(const struct pmesh_plan *plan, unsigned duties, uint32_t t) {
    const bool sends = t < lanes_of(plan) ? t >= plan->receiving : t == lanes_of(plan) + 1;
    return duties & (sends ? SENDS : RECEIVES);
}

// Do all that can be done at once; returns whether anything was.
static bool advance(struct pmesh_runner *runner, struct side *side, unsigned duties) {
    const struct pmesh_plan *plan = runner->op->plan;
    const uint32_t lanes = lanes_of(plan);
    bool moved = false;
    for (uint32_t i = 0; i < tracks_of(plan); i++) {
        // What is received makes others go on, so all that may be sent goes first.
        const uint32_t t = i < lanes ? lanes - 1 - i : i;
        if (!is_ours(plan, duties, t)) {
            continue;
        }
        if (runner->stopped) {
            return false;
        }
        moved |= t < plan->receiving ? receive_some(runner, side, t)
                 : t < lanes         ? send_some(runner, side, t)
                                     : compute_some(runner, side, t);
    }
    return moved || (duties & RECEIVES && copy_some(runner));
}

static bool is_over(const struct pmesh_runner *runner, unsigned duties) {
    const struct pmesh_plan *plan = runner->op->plan;
    for (uint32_t t = 0; t < tracks_of(plan); t++) {
        const bool sends = t >= plan->receiving && t < lanes_of(plan);
        const struct pmesh_lane *lane = sends ? runner->op->lanes[t] : NULL;
        if (is_ours(plan, duties, t) && (has_next(runner, t) || (lane && pmesh_has_unsent(lane)))) {
            return false;
        }
    }
    return !(duties & RECEIVES) || runner->copy == plan->copy_count;
}

// Write down the sockets for which these duties wait; note whether they wait for another track.
static nfds_t awaited(const struct pmesh_runner *runner, unsigned duties, struct pollfd *polled,
                      bool *progress) {
    const struct pmesh_plan *plan = runner->op->plan;
    nfds_t count = 0;
    for (uint32_t t = 0; t < tracks_of(plan); t++) {
        if (!is_ours(plan, duties, t)) {
            continue;
        }
        *progress |= runner->waiting[t].progress;
        const struct pmesh_lane *lane = t < lanes_of(plan) ? runner->op->lanes[t] : NULL;
        if (!lane || !runner->waiting[t].network) {
            continue;
        }
        if (lane->subflows) {
            count += pmesh_subflows_polled(lane->subflows, &polled[count]);
        } else {
            const short events = t < plan->receiving ? POLLIN : POLLOUT;
            polled[count++] = (struct pollfd){.fd = lane->fd, .events = events};
        }
    }
    return count;
}

// Wait for a socket, for the other side to get further than `seen`, or for `stop`.
static void sleep_until_woken(struct pmesh_runner *runner, struct side *side, uint32_t seen) {
    struct side *other = &runner->sides[side == runner->sides];
    bool progress = false;
    side->polled[0] = (struct pollfd){.fd = side->wake[0], .events = POLLIN};
    const nfds_t polled = 1 + awaited(runner, side->duties, side->polled + 1, &progress);
    if (progress) {
        atomic_store(&side->sleeping, true);
        if (atomic_load(&other->progress) != seen) {
            atomic_store(&side->sleeping, false);
            return;
        }
    }
    if (!runner->stopped) {
        poll(side->polled, polled, -1);
    }
    atomic_store(&side->sleeping, false);
    if (side->polled[0].revents) {
        pmesh_drain(side->wake);
    }
}

static void run(struct pmesh_runner *runner, struct side *side) {
    const struct side *other = &runner->sides[side == runner->sides];
    while (!runner->stopped) {
        if (is_over(runner, side->duties)) {
            atomic_fetch_or(&runner->over, side->duties);
            break;
        }
        const uint32_t seen = atomic_load(&other->progress);
        if (!advance(runner, side, side->duties) && !is_over(runner, side->duties)) {
            sleep_until_woken(runner, side, seen);
        }
    }
}

// --- the threads

static void *work(void *argument) {
    struct side *side = argument;
    struct pmesh_runner *runner = side->runner;
    pthread_mutex_lock(&runner->lock);
    while (true) {
        while (!side->duties && !runner->closing) {
            pthread_cond_wait(&runner->changed, &runner->lock);
        }
        if (!side->duties) {
            break;
        }
        pthread_mutex_unlock(&runner->lock);
        run(runner, side);
        pthread_mutex_lock(&runner->lock);
        side->duties = 0;
        if (!--runner->at_work) {
            const uint8_t byte = 0;
            runner->signalled = write(runner->ended[1], &byte, 1) == 1;
            pthread_cond_broadcast(&runner->changed);
        }
    }
    pthread_mutex_unlock(&runner->lock);
    return NULL;
}

static bool needs_thread(struct side *side) {
    if (!side->has_thread) {
        side->has_thread = !pthread_create(&side->thread, NULL, work, side);
    }
    return side->has_thread;
}

// --- what Python calls

struct pmesh_runner *pmesh_runner_new(void) {
    struct pmesh_runner *runner = calloc(1, sizeof *runner);
    if (!runner) {
        return NULL;
    }
    pthread_mutex_init(&runner->lock, NULL);
    pthread_cond_init(&runner->changed, NULL);
    bool is_open = pmesh_open_pipe(runner->ended);
    for (int i = 0; i < SIDES; i++) {
        runner->sides[i].runner = runner;
        is_open &= pmesh_open_pipe(runner->sides[i].wake);
    }
    if (!is_open) {
        pmesh_runner_free(runner);
        return NULL;
    }
    return runner;
}

void pmesh_runner_free(struct pmesh_runner *runner) {
    pthread_mutex_lock(&runner->lock);
    runner->closing = true;
    pthread_cond_broadcast(&runner->changed);
    pthread_mutex_unlock(&runner->lock);
    for (int i = 0; i < SIDES; i++) {
        if (runner->sides[i].has_thread) {
            pthread_join(runner->sides[i].thread, NULL);
        }
        pmesh_close_pipe(runner->sides[i].wake);
        free(runner->sides[i].polled);
    }
    pmesh_close_pipe(runner->ended);
    pthread_cond_destroy(&runner->changed);
    pthread_mutex_destroy(&runner->lock);
    free(runner->done);
    free(runner->waiting);
    free(runner);
}

int pmesh_runner_fd(const struct pmesh_runner *runner) {
    return runner->ended[0];
}

static bool make_room(struct pmesh_runner *runner, uint32_t tracks) {
    if (tracks > runner->room) {
        free(runner->done);
        free(runner->waiting);
        runner->done = calloc(tracks, sizeof *runner->done);
        runner->waiting = calloc(tracks, sizeof *runner->waiting);
        bool has_room = runner->done && runner->waiting;
        for (int i = 0; i < SIDES; i++) {
            free(runner->sides[i].polled);
            runner->sides[i].polled =
                calloc(tracks * PMESH_SUBFLOW_POLLS + 1, sizeof(struct pollfd));
            has_room &= !!runner->sides[i].polled;
        }
        runner->room = has_room ? tracks : 0;
    }
    return tracks <= runner->room;
}

static bool set_up(struct pmesh_runner *runner, struct pmesh_op *op) {
    const uint32_t tracks = tracks_of(op->plan);
    op->has_failed = false;
    runner->op = op;
    runner->stopped = runner->two = false;
    runner->over = 0;
    runner->copy = 0;
    runner->copied = 0;
    if (!pmesh_plan_fits(op) || !make_room(runner, tracks)) {
        op->failure = PMESH_INVALID;
        op->has_failed = true;
        return false;
    }
    for (uint32_t t = 0; t < tracks; t++) {
        runner->done[t] = 0;
        runner->waiting[t] = (struct pmesh_waiting){0};
    }
    return true;
}

// Do what can be done at once, by the caller; return false if more could be. Late records and large
// copies must not keep it long.
static bool run_at_once(struct pmesh_runner *runner) {
    const struct pmesh_plan *plan = runner->op->plan;
    const uint32_t most = plan->record_count + plan->work_count + LATE_RECORDS;
    for (uint32_t i = 0; i < most; i++) {
        if (!advance(runner, runner->sides, BOTH)) {
            return true;
        }
    }
    return false;
}

int32_t pmesh_begin(struct pmesh_runner *runner, struct pmesh_op *op) {
    if (!set_up(runner, op)) {
        return PMESH_OVER;
    }
    return op->plan->two_threads || op->plan->computes_much ? PMESH_BUSY : pmesh_advance(runner);
}

int32_t pmesh_advance(struct pmesh_runner *runner) {
    const struct pmesh_plan *plan = runner->op->plan;
    const bool waits = run_at_once(runner);
    if (!runner->stopped && is_over(runner, BOTH)) {
        runner->over = BOTH;
    }
    if (runner->stopped || runner->over == BOTH) {
        return PMESH_OVER;
    }
    if (!waits) {
        return PMESH_BUSY;
    }
    for (uint32_t t = plan->receiving; t < plan->receiving + plan->sending; t++) {
        if (runner->waiting[t].network) {
            return PMESH_BUSY;
        }
    }
    return PMESH_AWAITS;
}

static int64_t now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

int32_t pmesh_wait(struct pmesh_runner *runner, int32_t most_ms) {
    struct side *side = &runner->sides[0];
    const int64_t until = now_ms() + most_ms;
    int32_t state = PMESH_AWAITS;
    for (int64_t left = most_ms; state == PMESH_AWAITS && left > 0; left = until - now_ms()) {
        bool progress = false;
        const nfds_t polled = awaited(runner, BOTH, side->polled, &progress);
        if (poll(side->polled, polled, (int)left) <= 0) {
            break;
        }
        state = pmesh_advance(runner);
    }
    return state;
}

bool pmesh_hand_over(struct pmesh_runner *runner) {
    if (!needs_thread(&runner->sides[0])) {
        runner->op->failure = PMESH_NO_THREAD;
        runner->op->has_failed = true;
        return false;
    }
    const bool two = runner->op->plan->two_threads && needs_thread(&runner->sides[1]);
    pthread_mutex_lock(&runner->lock);
    runner->two = two;
    runner->at_work = two ? 2 : 1;
    runner->sides[0].duties = two ? RECEIVES : BOTH;
    runner->sides[1].duties = two ? SENDS : 0;
    pthread_cond_broadcast(&runner->changed);
    pthread_mutex_unlock(&runner->lock);
    return true;
}

void pmesh_stop(struct pmesh_runner *runner) {
    stop(runner);
}

int32_t pmesh_end(struct pmesh_runner *runner) {
    pthread_mutex_lock(&runner->lock);
    while (runner->at_work) {
        pthread_cond_wait(&runner->changed, &runner->lock);
    }
    if (runner->signalled) {
        uint8_t byte;
        runner->signalled = read(runner->ended[0], &byte, 1) != 1;
    }
    pthread_mutex_unlock(&runner->lock);
    if (runner->op->has_failed) {
        return runner->op->failure;
    }
    return runner->over == BOTH || is_over(runner, BOTH) ? PMESH_DONE : PMESH_STOPPED;
}

const uint32_t *pmesh_layout(void) {
    static const uint32_t layout[] = {
        sizeof(struct pmesh_lane),
        sizeof(struct pmesh_record),
        sizeof(struct pmesh_need),
        sizeof(struct pmesh_copy),
        sizeof(struct pmesh_work),
        sizeof(struct pmesh_coding),
        sizeof(struct pmesh_track),
        sizeof(struct pmesh_plan),
        sizeof(struct pmesh_op),
        offsetof(struct pmesh_lane, seal_key),
        offsetof(struct pmesh_coding, codec),
        offsetof(struct pmesh_op, seal),
        offsetof(struct pmesh_op, has_failed),
        sizeof(struct pmesh_lost_subflow),
        sizeof(struct pmesh_pace),
    };
    return layout;
}
