// A plan that does not fit its memory is refused before anything is read or written.
#include "combine.h"

enum { MOST_TRACKS = 1 << 16 };

bool pmesh_fits(const struct pmesh_op *op, uint32_t region, uint64_t offset, uint64_t nbytes) {
    return region < PMESH_REGIONS && offset <= op->region_bytes[region] &&
           nbytes <= op->region_bytes[region] - offset;
}

static bool record_fits(const struct pmesh_op *op, const struct pmesh_record *record, bool receives,
                        uint64_t itemsize) {
    const struct pmesh_plan *plan = op->plan;
    if (record->nbytes > PMESH_MAX_BODY_BYTES || record->need_begin > record->need_end ||
        record->need_end > plan->need_count ||
        !pmesh_fits(op, record->region, record->offset, record->nbytes)) {
        return false;
    }
    if (!receives) {
        return true;
    }
    if (record->region == PMESH_SOURCE || record->then > PMESH_ADD_TO_RESULT) {
        return false;
    }
    if (record->then == PMESH_KEEP) {
        return true;
    }
    const uint32_t other = record->then == PMESH_ADD_SOURCE ? PMESH_SOURCE : PMESH_RESULT;
    return itemsize && (record->offset | record->other | record->nbytes) % itemsize == 0 &&
           record->region != other && pmesh_fits(op, other, record->other, record->nbytes);
}

static bool lane_fits(const struct pmesh_lane *lane) {
    const uint64_t room = PMESH_OVERHEAD_BYTES + PMESH_MAX_BODY_BYTES;
    if (lane->subflows) {
        return true; // they have their own buffers
    }
    return lane->filled <= room && lane->unsent_begin <= lane->unsent_end &&
           lane->unsent_end <= room;
}

static bool is_aligned(const struct pmesh_op *op, uint64_t itemsize) {
    const uint64_t alignment = itemsize < sizeof(double) ? itemsize : sizeof(double);
    for (int i = 0; i < PMESH_REGIONS && itemsize; i++) {
        if ((uintptr_t)op->regions[i] % alignment) {
            return false;
        }
    }
    return true;
}

bool pmesh_plan_fits(const struct pmesh_op *op) {
    const struct pmesh_plan *plan = op->plan;
    const uint64_t itemsize = pmesh_itemsize(op->dtype, op->reduction);
    const uint64_t lanes = (uint64_t)plan->receiving + plan->sending;
    const uint64_t tracks = lanes + plan->computing;
    if (!is_aligned(op, itemsize) || !plan->size || tracks > MOST_TRACKS || !pmesh_works_fit(op) ||
        (op->fold && (plan->work_count || !pmesh_makes_source(op->fold, op)))) {
        return false;
    }
    for (uint32_t t = 0; t < lanes; t++) {
        const struct pmesh_track *track = &plan->tracks[t];
        if (track->begin > track->end || track->end > plan->record_count ||
            !lane_fits(op->lanes[t])) {
            return false;
        }
        for (uint32_t i = track->begin; i < track->end; i++) {
            if (!record_fits(op, &plan->records[i], t < plan->receiving, itemsize)) {
                return false;
            }
        }
    }
    for (uint32_t i = 0; i < plan->need_count; i++) {
        if (plan->needs[i].track >= tracks) {
            return false;
        }
    }
    for (uint32_t i = 0; i < plan->copy_count; i++) {
        const struct pmesh_copy *copy = &plan->copies[i];
        if (!pmesh_fits(op, PMESH_SOURCE, copy->source, copy->nbytes) ||
            !pmesh_fits(op, PMESH_RESULT, copy->result, copy->nbytes)) {
            return false;
        }
    }
    return true;
}
