// Reduces and copies the values of ranks that share a machine, slice by slice. Each piece of the
// result is made in the first place that gets it, and copied to the others from the cache.
#include "combine.h"

#include <sched.h>
#include <string.h>

enum {
    SLICE_BYTES = 64 * 1024, // a thread's turn; both are multiples of all sizes of values
    PIECE_BYTES = 4 * 1024,  // which stays in the fastest cache until all ranks' values are added
    LINE_BYTES = 64,         // of a cache; some have larger ones
};
enum { UNTOUCHED, BEGUN, FOLDED };

static bool lies_in(const struct pmesh_place *place, uint64_t nbytes, const uint8_t *const *memory,
                    const uint64_t *memory_bytes, const struct pmesh_combining *op,
                    uint64_t alignment) {
    return place->rank < op->ranks && nbytes <= memory_bytes[place->rank] &&
           place->offset <= memory_bytes[place->rank] - nbytes &&
           ((uintptr_t)memory[place->rank] + place->offset) % alignment == 0;
}

static bool fold_fits(const struct pmesh_fold *fold, const struct pmesh_combining *op) {
    const bool reduces = op->dtype >= 0;
    const uint64_t itemsize = reduces ? pmesh_itemsize(op->dtype, op->reduction) : 1;
    const uint64_t alignment = itemsize > sizeof(uint64_t) ? sizeof(uint64_t) : itemsize;
    if (itemsize == 0 || fold->nbytes % itemsize != 0 || fold->take_begin >= fold->take_end ||
        fold->take_end > op->place_count || fold->give_begin >= fold->give_end ||
        fold->give_end > op->place_count || (!reduces && fold->take_end - fold->take_begin > 1)) {
        return false;
    }
    for (uint32_t i = fold->take_begin; i < fold->take_end; i++) {
        if (!lies_in(&op->places[i], fold->nbytes, op->sources, op->source_bytes, op, alignment)) {
            return false;
        }
    }
    for (uint32_t i = fold->give_begin; i < fold->give_end; i++) {
        if (!lies_in(&op->places[i], fold->nbytes, (const uint8_t *const *)op->results,
                     op->result_bytes, op, alignment)) {
            return false;
        }
    }
    return true;
}

bool pmesh_combining_fits(const struct pmesh_combining *op) {
    for (uint32_t i = 0; i < op->fold_count; i++) {
        if (!fold_fits(&op->folds[i], op)) {
            return false;
        }
    }
    return true;
}

static uint64_t slices_of(const struct pmesh_fold *fold) {
    return fold->nbytes / SLICE_BYTES + (fold->nbytes % SLICE_BYTES != 0);
}

static const uint8_t *source_at(const struct pmesh_combining *op, uint32_t place, uint64_t from) {
    return op->sources[op->places[place].rank] + op->places[place].offset + from;
}

static uint8_t *result_at(const struct pmesh_combining *op, uint32_t place, uint64_t from) {
    return op->results[op->places[place].rank] + op->places[place].offset + from;
}

// A processor fetches ahead by itself, but has to find out anew for each page of each rank.
static void prefetch(const uint8_t *values, uint64_t nbytes) {
    for (uint64_t i = 0; i < nbytes; i += LINE_BYTES) {
        __builtin_prefetch(values + i);
    }
}

static void do_piece(const struct pmesh_combining *op, const struct pmesh_fold *fold, uint64_t from,
                     uint64_t nbytes) {
    uint8_t *first = result_at(op, fold->give_begin, from);
    memcpy(first, source_at(op, fold->take_begin, from), nbytes);
    if (op->dtype >= 0) {
        const uint64_t count = nbytes / pmesh_itemsize(op->dtype, op->reduction);
        for (uint32_t i = fold->take_begin + 1; i < fold->take_end; i++) {
            if (i + 1 < fold->take_end) {
                prefetch(source_at(op, i + 1, from), nbytes);
            }
            pmesh_accumulate(op->dtype, op->reduction, first, source_at(op, i, from), count);
        }
        pmesh_finish(op->dtype, op->reduction, first, count, fold->take_end - fold->take_begin);
        if (op->makes_nan_equal) {
            pmesh_make_nan_equal(op->dtype, first, count);
        }
    }
    for (uint32_t i = fold->give_begin + 1; i < fold->give_end; i++) {
        memcpy(result_at(op, i, from), first, nbytes);
    }
}

static void do_slice(const struct pmesh_combining *op, const struct pmesh_fold *fold,
                     uint64_t from) {
    const uint64_t left = fold->nbytes - from;
    const uint64_t end = from + (left < SLICE_BYTES ? left : SLICE_BYTES);
    for (; from < end; from += PIECE_BYTES) {
        do_piece(op, fold, from, end - from < PIECE_BYTES ? end - from : PIECE_BYTES);
    }
}

bool pmesh_combine(struct pmesh_combining *op) {
    uint64_t before = 0; // slices of the folds before this one
    uint32_t at = 0;
    for (;;) {
        if (atomic_load_explicit(&op->stopped, memory_order_relaxed)) {
            return false;
        }
        const uint64_t slice = atomic_fetch_add_explicit(&op->taken, 1, memory_order_relaxed);
        while (at < op->fold_count && slice - before >= slices_of(&op->folds[at])) {
            before += slices_of(&op->folds[at]);
            at++;
        }
        if (at == op->fold_count) {
            return true;
        }
        do_slice(op, &op->folds[at], (slice - before) * SLICE_BYTES);
    }
}

bool pmesh_makes_source(const struct pmesh_combining *op, const struct pmesh_op *of) {
    if (op->fold_count != 1 || !op->folded || !pmesh_combining_fits(op)) {
        return false;
    }
    const struct pmesh_fold *fold = op->folds;
    return fold->nbytes == of->region_bytes[PMESH_SOURCE] &&
           result_at(op, fold->give_begin, 0) == of->regions[PMESH_SOURCE];
}

void pmesh_fold(struct pmesh_combining *op, uint64_t offset, uint64_t nbytes) {
    const uint64_t end = offset + nbytes;
    for (uint64_t slice = offset / SLICE_BYTES; slice * SLICE_BYTES < end; slice++) {
        uint8_t state = UNTOUCHED;
        if (atomic_compare_exchange_strong(&op->folded[slice], &state, BEGUN)) {
            atomic_fetch_add_explicit(&op->taken, 1, memory_order_relaxed);
            do_slice(op, op->folds, slice * SLICE_BYTES);
            atomic_store(&op->folded[slice], FOLDED);
            continue;
        }
        while (atomic_load(&op->folded[slice]) != FOLDED) { // another thread is at it: 10 us
            sched_yield();
        }
    }
}

void pmesh_combining_stop(struct pmesh_combining *op) {
    atomic_store_explicit(&op->stopped, true, memory_order_relaxed);
}

const uint32_t *pmesh_combining_layout(void) {
    static const uint32_t layout[] = {
        sizeof(struct pmesh_place),
        sizeof(struct pmesh_fold),
        sizeof(struct pmesh_combining),
        offsetof(struct pmesh_combining, folded),
        offsetof(struct pmesh_combining, stopped),
    };
    return layout;
}
