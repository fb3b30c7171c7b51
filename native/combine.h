// Ops whose ranks are all at one agent: pmesh/core/ops/together.py.
#ifndef PMESH_COMBINE_H
#define PMESH_COMBINE_H

#include "pmesh.h"

// Where values begin in the source, or in the result, of a rank.
struct pmesh_place {
    uint64_t offset;
    uint32_t rank, unused;
};

// Reduce the values at some places, in their order, and write the result at others.
struct pmesh_fold {
    uint64_t nbytes;
    uint32_t take_begin, take_end, give_begin, give_end; // in the places
};

// One op. Python owns it, and all that it points to, until no thread works on it any more.
struct pmesh_combining {
    const struct pmesh_fold *folds;
    const struct pmesh_place *places;
    const uint8_t *const *sources; // of each rank; its trainer may write there meanwhile
    const uint64_t *source_bytes;
    uint8_t *const *results;
    const uint64_t *result_bytes;
    uint32_t fold_count, place_count, ranks;
    int32_t dtype, reduction; // as in `struct pmesh_op`
    uint32_t makes_nan_equal;
    _Atomic uint64_t taken;  // slices that a thread has begun
    _Atomic uint8_t *folded; // of each slice, for `pmesh_fold`; zeros at first
    _Atomic bool stopped;
};

// Return whether all places lie in their memory; call it once, before `pmesh_combine`.
PMESH_API bool pmesh_combining_fits(const struct pmesh_combining *op);
// Do slices until none is left; several threads may call it at once. Returns false if it was
// stopped before.
PMESH_API bool pmesh_combine(struct pmesh_combining *op);
// Whether its only fold makes the source of an op, whose parts `pmesh_fold` may then make.
bool pmesh_makes_source(const struct pmesh_combining *op, const struct pmesh_op *of);
// Make these bytes of the result of the only fold, if they are not there yet; several threads may
// call it at once. Not beside `pmesh_combine`.
void pmesh_fold(struct pmesh_combining *op, uint64_t offset, uint64_t nbytes);
// Make `pmesh_combine` return after the slice that it is at; any thread may call it.
PMESH_API void pmesh_combining_stop(struct pmesh_combining *op);
// Sizes and an offset, for the test that compares them with Python's.
PMESH_API const uint32_t *pmesh_combining_layout(void);

#endif
