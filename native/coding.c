// The works of a compressed op, which codecs do: `pmesh/net/lanes/ring.py` does the same in Python.
//
// What came over a socket is only ever decoded as values; each length and each place is the plan's.
#include "kernels.h"

#include <string.h>

static const struct {
    int64_t (*hop)(const struct pmesh_hop *hop);
    int64_t (*decode)(const void *wire, size_t wire_bytes, void *out, size_t count);
} CODECS[PMESH_CODECS] = {
    [PMESH_CODEC_FP16] = {pmesh_hop_fp16, pmesh_decode_fp16},
    [PMESH_CODEC_BF16] = {pmesh_hop_bf16, pmesh_decode_bf16},
    [PMESH_CODEC_INT8] = {pmesh_hop_int8, pmesh_decode_int8},
    [PMESH_CODEC_INT8_STOCHASTIC] = {pmesh_hop_int8_stochastic, pmesh_decode_int8},
};

// --- works that do not fit are refused before anything is read or written

static bool hop_fits(const struct pmesh_op *op, const struct pmesh_work *work) {
    if (work->arrived == PMESH_FIRST_HOP) {
        return true;
    }
    if (!pmesh_fits(op, PMESH_SCRATCH, work->arrived, work->nbytes)) {
        return false;
    }
    return work->region != PMESH_SCRATCH || work->arrived + work->nbytes <= work->offset ||
           work->offset + work->nbytes <= work->arrived;
}

static bool work_fits(const struct pmesh_op *op, const struct pmesh_work *work, uint32_t queue) {
    const struct pmesh_coding *coding = op->coding;
    const uint64_t begin = work->begin * sizeof(float), nbytes = work->count * sizeof(float);
    const bool decodes = queue > 0;
    if (work->begin > UINT64_MAX / sizeof(float) || work->count > UINT64_MAX / sizeof(float) ||
        !pmesh_fits(op, PMESH_SOURCE, begin, nbytes) ||
        !pmesh_fits(op, PMESH_RESULT, begin, nbytes)) {
        return false;
    }
    if (work->need_begin > work->need_end || work->need_end > op->plan->need_count ||
        work->decodes != decodes || work->divides > 1 || work->region == PMESH_SOURCE ||
        work->nbytes != pmesh_wire_bytes(coding->codec, work->count) ||
        !pmesh_fits(op, work->region, work->offset, work->nbytes)) {
        return false;
    }
    if (!decodes) {
        return hop_fits(op, work);
    }
    // Only one side may use the bounce.
    return work->region == PMESH_SCRATCH || (queue == 1 && work->nbytes <= coding->bounce_bytes);
}

bool pmesh_works_fit(const struct pmesh_op *op) {
    const struct pmesh_plan *plan = op->plan;
    const struct pmesh_coding *coding = op->coding;
    if (!plan->computing) {
        return true;
    }
    if (!coding || coding->codec < 0 || coding->codec >= PMESH_CODECS || !coding->block) {
        return false;
    }
    const struct pmesh_track *queues = plan->tracks + plan->receiving + plan->sending;
    for (uint32_t q = 0; q < plan->computing; q++) {
        if (queues[q].begin > queues[q].end || queues[q].end > plan->work_count) {
            return false;
        }
        for (uint32_t i = queues[q].begin; i < queues[q].end; i++) {
            if (!work_fits(op, &plan->works[i], q)) {
                return false;
            }
        }
    }
    return true;
}

// ---

static void hop(const struct pmesh_op *op, const struct pmesh_work *work) {
    struct pmesh_coding *coding = op->coding;
    const struct pmesh_terms *terms = &coding->terms[work->divides];
    const uint64_t begin = work->begin * sizeof(float);
    const bool is_first = work->arrived == PMESH_FIRST_HOP;
    const struct pmesh_hop hop = {
        .incoming = is_first ? NULL : op->regions[PMESH_SCRATCH] + work->arrived,
        .outgoing = op->regions[work->region] + work->offset,
        .wire_bytes = work->nbytes,
        .own = op->regions[PMESH_SOURCE] + begin,
        .residual = coding->residual ? coding->residual + begin : NULL,
        .residual_out = coding->residual_out ? coding->residual_out + begin : NULL,
        .count = work->count,
        .counter = pmesh_start_of(coding->draw | work->begin / coding->block),
        .own_scale = terms->own_scale,
        .divisor = terms->divisor,
        .residual_factor = terms->residual_factor,
    };
    coding->clipped += CODECS[coding->codec].hop(&hop);
}

static void decode(const struct pmesh_op *op, const struct pmesh_work *work) {
    const struct pmesh_coding *coding = op->coding;
    const uint8_t *wire = op->regions[work->region] + work->offset;
    uint8_t *values = op->regions[PMESH_RESULT] + work->begin * sizeof(float);
    if (work->region == PMESH_RESULT) { // where the values will be
        memcpy(coding->bounce, wire, work->nbytes);
        wire = coding->bounce;
    }
    CODECS[coding->codec].decode(wire, work->nbytes, values, work->count);
}

void pmesh_compute(const struct pmesh_op *op, const struct pmesh_work *work) {
    if (work->count) {
        work->decodes ? decode(op, work) : hop(op, work);
    }
}
