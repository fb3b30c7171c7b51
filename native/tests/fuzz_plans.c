// Fuzzes what Python calls: any plan, over any memory. Either it is refused, or all that the
// executor reads and writes is inside the memory. Its lanes read and write a record at once.
#include "toy.h"

#include "../executor.c"
#include "../kernels.h"

bool pmesh_may_seal(const struct pmesh_lane *lane) {
    return lane->unsent_begin == lane->unsent_end;
}

bool pmesh_has_unsent(const struct pmesh_lane *lane) {
    return lane->unsent_begin != lane->unsent_end;
}

nfds_t pmesh_subflows_polled(struct pmesh_subflows *subflows, struct pollfd polled[]) {
    return !subflows || !polled; // none here
}

bool pmesh_seal_record(struct pmesh_op *op, uint32_t track, const struct pmesh_record *record,
                       uint32_t segment) {
    const uint8_t *body = op->regions[record->region] + record->offset;
    memcpy(op->lanes[track]->out, body, record->nbytes);
    op->lanes[track]->sealed += segment < UINT32_MAX;
    return true;
}

enum pmesh_progress pmesh_flush(struct pmesh_op *op, uint32_t track) {
    assert(op->lanes[track]);
    return PMESH_MOVED;
}

enum pmesh_progress pmesh_receive(struct pmesh_op *op, uint32_t track,
                                  const struct pmesh_record *record, uint32_t segment,
                                  struct pmesh_waiting *waiting) {
    memset(op->regions[record->region] + record->offset, (int)segment, record->nbytes);
    op->lanes[track]->opened += !waiting->held;
    return PMESH_LANDED;
}

// --- a plan from the fuzzer's bytes; zeros follow them

struct input {
    const uint8_t *bytes;
    size_t left;
};

static uint8_t byte_of(struct input *input) {
    if (!input->left) {
        return 0;
    }
    input->left--;
    return *input->bytes++;
}

// Mostly a small number; else one that is near to overflowing.
static uint64_t number_of(struct input *input) {
    const uint8_t high = byte_of(input), low = byte_of(input);
    const uint64_t number = (uint64_t)(high & 15) << 8 | low;
    switch (high >> 4) {
    case 15: return UINT64_MAX - number;
    case 14: return PMESH_MAX_BODY_BYTES + number;
    default: return number;
    }
}

static struct pmesh_record record_of(struct input *input) {
    struct pmesh_record record = {
        .offset = number_of(input), .nbytes = number_of(input), .other = number_of(input)};
    const uint8_t flags = byte_of(input);
    record.need_begin = byte_of(input);
    record.need_end = record.need_begin + byte_of(input) % 8U;
    record.region = flags & 3;
    record.then = flags >> 2 & 3;
    record.finishes = flags >> 4 & 1;
    return record;
}

// Mostly one whose sizes fit; what else may be wrong is the fuzzer's.
static struct pmesh_work work_of(struct input *input, int32_t codec) {
    struct pmesh_work work = {
        .begin = number_of(input), .count = number_of(input), .offset = number_of(input)};
    const uint8_t flags = byte_of(input);
    work.nbytes = flags >> 5 == 7 ? number_of(input) : pmesh_wire_bytes(codec, work.count);
    work.arrived = flags & 1 ? PMESH_FIRST_HOP : number_of(input);
    work.region = flags >> 1 & 3;
    work.decodes = flags >> 3 & 1;
    work.divides = flags >> 4 & 1;
    work.need_begin = byte_of(input);
    work.need_end = work.need_begin + byte_of(input) % 8U;
    return work;
}

struct arrays {
    struct pmesh_work *works;
    struct pmesh_record *records;
    struct pmesh_need *needs;
    struct pmesh_copy *copies;
    struct pmesh_track *tracks;
};

static struct arrays arrays_of(struct input *input, struct pmesh_plan *plan, int32_t codec) {
    const uint32_t tracks = plan->receiving + plan->sending + plan->computing;
    const struct arrays arrays = {
        .works = exactly(plan->work_count * sizeof *arrays.works),
        .records = exactly(plan->record_count * sizeof *arrays.records),
        .needs = exactly(plan->need_count * sizeof *arrays.needs),
        .copies = exactly(plan->copy_count * sizeof *arrays.copies),
        .tracks = exactly(tracks * sizeof *arrays.tracks),
    };
    for (uint32_t i = 0; i < tracks; i++) {
        const uint8_t begin = byte_of(input);
        arrays.tracks[i] = (struct pmesh_track){.begin = begin, .end = begin + byte_of(input) % 8U};
    }
    for (uint32_t i = 0; i < plan->need_count; i++) {
        arrays.needs[i] = (struct pmesh_need){.track = byte_of(input), .number = byte_of(input)};
    }
    for (uint32_t i = 0; i < plan->record_count; i++) {
        arrays.records[i] = record_of(input);
    }
    for (uint32_t i = 0; i < plan->copy_count; i++) {
        arrays.copies[i] = (struct pmesh_copy){
            .source = number_of(input), .result = number_of(input), .nbytes = number_of(input)};
    }
    for (uint32_t i = 0; i < plan->work_count; i++) {
        arrays.works[i] = work_of(input, codec);
    }
    plan->works = arrays.works;
    plan->records = arrays.records;
    plan->needs = arrays.needs;
    plan->copies = arrays.copies;
    plan->tracks = arrays.tracks;
    return arrays;
}

static void free_arrays(const struct arrays *arrays) {
    free(arrays->works);
    free(arrays->records);
    free(arrays->needs);
    free(arrays->copies);
    free(arrays->tracks);
}

// Of records.
static uint32_t done_of(const struct pmesh_runner *runner) {
    uint32_t done = 0;
    for (uint32_t t = 0; t < runner->op->plan->receiving + runner->op->plan->sending; t++) {
        done += runner->done[t];
    }
    return done;
}

static void run_op(struct pmesh_op *op, const struct pmesh_lane *lane) {
    static struct pmesh_runner *runner;
    runner = runner ? runner : pmesh_runner_new();
    assert(runner);
    const bool under_way = pmesh_begin(runner, op) != PMESH_OVER;
    if (under_way) {
        const bool has_thread = pmesh_hand_over(runner);
        assert(has_thread);
        pmesh_stop(runner);
    }
    const int32_t status = pmesh_end(runner);
    assert(status == PMESH_DONE || status == PMESH_INVALID || (under_way && status));
    if (status != PMESH_INVALID) {
        assert(done_of(runner) == lane->sealed + lane->opened);
    }
}

static struct pmesh_coding coding_of(struct input *input, int32_t codec, uint64_t values) {
    const uint8_t flags = byte_of(input);
    struct pmesh_coding coding = {
        .draw = number_of(input), .block = byte_of(input), .codec = codec};
    coding.bounce_bytes = number_of(input) % PMESH_MAX_BODY_BYTES;
    coding.bounce = exactly(coding.bounce_bytes);
    coding.residual_out = flags & 1 ? exactly(4 * values) : NULL;
    if (coding.residual_out) {
        memset(coding.residual_out, flags, 4 * values);
    }
    coding.residual = flags & 2 ? coding.residual_out : NULL;
    for (int i = 0; i < 2; i++) {
        coding.terms[i] = (struct pmesh_terms){byte_of(input), byte_of(input), byte_of(input)};
    }
    return coding;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    static uint8_t *out;
    struct input input = {data, nbytes};
    out = out ? out : exactly(ROOM);
    const uint8_t flags = byte_of(&input);
    struct pmesh_plan plan = {.receiving = byte_of(&input) % 8, .sending = byte_of(&input) % 8};
    plan.record_count = byte_of(&input) % 32;
    plan.need_count = byte_of(&input) % 32;
    plan.copy_count = byte_of(&input) % 8;
    plan.size = byte_of(&input);
    plan.two_threads = (flags & 7) == 7; // seldom: threads take long
    plan.added_twice = flags >> 3 & 1;
    int32_t codec = -1;
    if (flags >> 4 & 1) { // else as before there were works, for the older seeds
        plan.computing = byte_of(&input) % 4;
        plan.work_count = byte_of(&input) % 16;
        codec = byte_of(&input) % (PMESH_CODECS + 2) - 1;
    }
    const struct arrays arrays = arrays_of(&input, &plan, codec);
    if (flags >> 4 == 15) {
        plan.receiving += UINT32_MAX - 7; // refused before the arrays are read
        plan.sending += 8;
    }
    struct pmesh_lane lane = {.out = out}, *lanes[16];
    struct pmesh_op op = {.plan = &plan, .lanes = lanes};
    for (int i = 0; i < 16; i++) {
        lanes[i] = &lane;
    }
    op.dtype = byte_of(&input) % (PMESH_DTYPES + 2) - 1;
    op.reduction = byte_of(&input) % (PMESH_REDUCTIONS + 2) - 1;
    uint8_t *memory[PMESH_REGIONS];
    for (int i = 0; i < PMESH_REGIONS; i++) {
        const uint8_t high = byte_of(&input), shift = high >> 5;
        op.region_bytes[i] = (high & 15) << 8 | byte_of(&input);
        memory[i] = exactly(op.region_bytes[i] + shift);
        memset(memory[i], i, op.region_bytes[i] + shift);
        op.regions[i] = memory[i] + shift;
    }
    struct pmesh_coding coding = coding_of(&input, codec, op.region_bytes[PMESH_SOURCE] / 4);
    op.coding = flags >> 4 & 1 ? &coding : NULL;
    run_op(&op, &lane);
    free(coding.bounce);
    free(coding.residual_out);
    for (int i = 0; i < PMESH_REGIONS; i++) {
        free(memory[i]);
    }
    free_arrays(&arrays);
    return 0;
}
