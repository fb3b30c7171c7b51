// Threads that meet for an op. The last one that comes begins it; those that wait help. Whoever is
// recalled before that leaves, and the others wait on: Python, which has recalled it, does the op,
// and recalls them first. Nobody leaves an exchange with ranks elsewhere; who is recalled presses
// rank 0 to end it.
#include "meeting.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

// More bytes than these are worth waking the threads that wait.
enum { ALONE_BYTES = 128 * 1024 };

struct pmesh_meeting {
    struct pmesh_combining op;
    pthread_mutex_t lock; // of all below, and of the memory of the op's ranks
    pthread_cond_t changed;
    uint64_t number;               // of the op for which ranks have come
    uint32_t here;                 // how many
    uint32_t at_work;              // threads in the op that has begun
    uint64_t begun, folded, ended; // how many ops have
    uint64_t moving_bytes;
    bool shares;                      // the result
    bool has_others;                  // ranks elsewhere
    bool was_done;                    // the last op
    _Atomic bool pressed;             // to end its exchange
    uint8_t *slots[PMESH_MOST_SLOTS]; // that all ranks have who are here, for a shared result
    uint32_t slot_count;
    uint8_t *result;    // of the last op, if it is shared
    uintptr_t memory[]; // the sources and the results of all ranks, and their bytes
};

static uint64_t *bytes_of(struct pmesh_meeting *meeting) {
    return (uint64_t *)&meeting->memory[2 * meeting->op.ranks];
}

struct pmesh_meeting *pmesh_meeting_new(const struct pmesh_combining *op, bool shares,
                                        bool has_others) {
    const size_t each = 2 * (sizeof(uintptr_t) + sizeof(uint64_t));
    struct pmesh_meeting *meeting = calloc(1, sizeof *meeting + op->ranks * each);
    if (!meeting) {
        return NULL;
    }
    meeting->shares = shares;
    meeting->has_others = has_others;
    struct pmesh_combining *own = &meeting->op;
    own->folds = op->folds;
    own->places = op->places;
    own->fold_count = op->fold_count;
    own->place_count = op->place_count;
    own->ranks = op->ranks;
    own->dtype = op->dtype;
    own->reduction = op->reduction;
    own->makes_nan_equal = op->makes_nan_equal;
    own->sources = (const uint8_t *const *)meeting->memory;
    own->results = (uint8_t *const *)&meeting->memory[op->ranks];
    own->source_bytes = bytes_of(meeting);
    own->result_bytes = bytes_of(meeting) + op->ranks;
    for (uint32_t i = 0; i < op->fold_count; i++) {
        const struct pmesh_fold *fold = &op->folds[i];
        const uint32_t places =
            fold->take_end - fold->take_begin + fold->give_end - fold->give_begin;
        meeting->moving_bytes += fold->nbytes * places;
    }
    pthread_mutex_init(&meeting->lock, NULL);
    pthread_cond_init(&meeting->changed, NULL);
    return meeting;
}

void pmesh_meeting_free(struct pmesh_meeting *meeting) {
    pthread_cond_destroy(&meeting->changed);
    pthread_mutex_destroy(&meeting->lock);
    free(meeting);
}

bool pmesh_meeting_shares(const struct pmesh_meeting *meeting) {
    return meeting->shares;
}

bool pmesh_meeting_is_pressed(const struct pmesh_meeting *meeting) {
    return meeting->pressed;
}

void pmesh_meeting_wake(struct pmesh_meeting *meeting) {
    pthread_mutex_lock(&meeting->lock);
    pthread_cond_broadcast(&meeting->changed);
    pthread_mutex_unlock(&meeting->lock);
}

// --- with the lock

static bool has(const struct pmesh_part *part, const uint8_t *slot) {
    uint32_t i = 0;
    while (i < part->slot_count && part->slots[i] != slot) {
        i++;
    }
    return i < part->slot_count;
}

// Leave only the slots that this rank has, too. One that has left again may have had fewer.
static void narrow(struct pmesh_meeting *meeting, const struct pmesh_part *part) {
    if (!meeting->here) {
        memcpy(meeting->slots, part->slots, sizeof part->slots);
        meeting->slot_count = part->slot_count;
    }
    uint32_t count = 0;
    for (uint32_t i = 0; i < meeting->slot_count; i++) {
        if (has(part, meeting->slots[i])) {
            meeting->slots[count++] = meeting->slots[i];
        }
    }
    meeting->slot_count = count;
}

static bool come(struct pmesh_meeting *meeting, const struct pmesh_part *part) {
    const uint32_t ranks = meeting->op.ranks;
    if (part->rank >= ranks || (meeting->here && meeting->number != part->number)) {
        return false;
    }
    narrow(meeting, part);
    meeting->number = part->number;
    meeting->memory[part->rank] = (uintptr_t)part->source;
    meeting->memory[ranks + part->rank] = (uintptr_t)part->result;
    bytes_of(meeting)[part->rank] = part->source_bytes;
    bytes_of(meeting)[ranks + part->rank] = part->result_bytes;
    meeting->here++;
    return true;
}

// Wait until the op begins; return false if this rank has left before.
static bool wait_for_others(struct pmesh_meeting *meeting, const struct pmesh_part *part) {
    const uint64_t before = meeting->begun;
    while (meeting->begun == before) {
        if (*part->recalled) {
            meeting->here--;
            return false;
        }
        pthread_cond_wait(&meeting->changed, &meeting->lock);
    }
    return true;
}

static void begin(struct pmesh_meeting *meeting) {
    meeting->here = 0;
    meeting->begun++;
    meeting->pressed = false;
    const bool has_room = !meeting->shares || meeting->slot_count;
    if (meeting->shares && has_room) {
        meeting->result = meeting->slots[0];
        meeting->memory[meeting->op.ranks] = (uintptr_t)meeting->result;
    }
    meeting->was_done = has_room && pmesh_combining_fits(&meeting->op);
    atomic_store(&meeting->op.taken, 0);
    atomic_store(&meeting->op.stopped, !meeting->was_done);
    if (meeting->moving_bytes > ALONE_BYTES) {
        pthread_cond_broadcast(&meeting->changed);
    }
}

static void end(struct pmesh_meeting *meeting, bool well) {
    meeting->ended = meeting->begun;
    meeting->was_done = well;
    pthread_cond_broadcast(&meeting->changed);
}

// Do slices, until none is left; the last thread that has done some ends the op, or lets rank 0
// exchange what they have written.
static void work(struct pmesh_meeting *meeting, const struct pmesh_part *part) {
    meeting->at_work++;
    pthread_mutex_unlock(&meeting->lock);
    pmesh_combine(&meeting->op);
    pthread_mutex_lock(&meeting->lock);
    if (--meeting->at_work == 0) {
        meeting->folded = meeting->begun;
        if (meeting->has_others) {
            pthread_cond_broadcast(&meeting->changed);
        } else {
            end(meeting, meeting->was_done && part->may_end(part->of));
        }
    }
}

// As rank 0, exchange what has been folded, and give the others what comes back.
static bool exchange_and_copy(struct pmesh_meeting *meeting, const struct pmesh_part *part) {
    const uint32_t ranks = meeting->op.ranks;
    bool done = meeting->was_done && part->exchange;
    for (uint32_t i = 1; i < ranks; i++) {
        done = done && meeting->op.result_bytes[i] == part->exchanged_bytes;
    }
    if (!done) {
        return false;
    }
    pthread_mutex_unlock(&meeting->lock);
    const uint8_t *result = part->exchange(part->of);
    pthread_mutex_lock(&meeting->lock);
    for (uint32_t i = 1; result && part->exchanged_bytes && i < ranks; i++) {
        memcpy(meeting->op.results[i], result, part->exchanged_bytes);
    }
    return result;
}

bool pmesh_meet(struct pmesh_meeting *meeting, struct pmesh_part *part) {
    pthread_mutex_lock(&meeting->lock);
    bool done = come(meeting, part);
    if (done && meeting->here == meeting->op.ranks) {
        begin(meeting);
    } else if (done) {
        done = wait_for_others(meeting, part);
    }
    if (done) {
        if (meeting->folded != meeting->begun) {
            work(meeting, part);
        }
        if (meeting->has_others && part->rank == 0) {
            while (meeting->folded != meeting->begun) {
                pthread_cond_wait(&meeting->changed, &meeting->lock);
            }
            end(meeting, exchange_and_copy(meeting, part));
        }
        while (meeting->ended != meeting->begun) {
            if (*part->recalled) {
                meeting->pressed = true;
            }
            pthread_cond_wait(&meeting->changed, &meeting->lock);
        }
        done = meeting->was_done;
        part->result = meeting->shares ? meeting->result : part->result;
    }
    pthread_mutex_unlock(&meeting->lock);
    return done;
}
