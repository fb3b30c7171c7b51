// Works of codecs without a network: what they do with any bytes, and which are refused.
//
// Run: works
#include "toy.h"

#include <poll.h>
#include <stdio.h>

#include "../kernels.h"

enum { COUNT = 700, NBYTES = 4 * COUNT, WAITS_MS = 20 * 1000 };

// A first hop into the result, a hop of what is in the scratch, and a decoding of each.
struct fixture {
    struct pmesh_runner *runner;
    struct pmesh_work works[4];
    struct pmesh_need needs[2];
    struct pmesh_track tracks[3];
    struct pmesh_plan plan;
    struct pmesh_coding coding;
    struct pmesh_op op;
    uint8_t *regions[PMESH_REGIONS], *residual;
};

static void set_works(struct fixture *f, uint64_t count) {
    const uint64_t nbytes = pmesh_wire_bytes(f->coding.codec, count);
    f->works[0] = (struct pmesh_work){
        .count = count, .nbytes = nbytes, .arrived = PMESH_FIRST_HOP, .region = PMESH_RESULT};
    f->works[1] = f->works[0];
    f->works[1].begin = f->works[1].count;
    f->works[1].offset = NBYTES / 2;
    f->works[1].arrived = NBYTES / 2;
    f->works[1].divides = 1;
    for (uint32_t i = 2; i < 4; i++) {
        f->works[i] = f->works[i - 2];
        f->works[i].decodes = 1;
        f->works[i].need_begin = i - 2;
        f->works[i].need_end = i - 1;
        f->needs[i - 2] = (struct pmesh_need){.track = 0, .number = i - 1};
    }
}

static struct fixture *new_fixture(int32_t codec) {
    struct fixture *f = calloc(1, sizeof *f);
    assert(f);
    f->runner = pmesh_runner_new();
    assert(f->runner);
    for (int i = 0; i < PMESH_REGIONS; i++) {
        f->op.regions[i] = f->regions[i] = exactly(NBYTES);
        f->op.region_bytes[i] = NBYTES;
        memset(f->regions[i], 0, NBYTES);
    }
    f->residual = exactly(NBYTES);
    memset(f->residual, 0, NBYTES);
    f->coding = (struct pmesh_coding){
        .residual = f->residual,
        .residual_out = f->residual,
        .bounce = exactly(NBYTES / 2),
        .bounce_bytes = NBYTES / 2,
        .block = 256,
        .terms = {{1, 1, 1}, {1, 2, 2}},
        .codec = codec,
    };
    set_works(f, COUNT / 2);
    f->tracks[0] = (struct pmesh_track){.begin = 0, .end = 2};
    f->tracks[1] = (struct pmesh_track){.begin = 2, .end = 4};
    f->plan = (struct pmesh_plan){
        .works = f->works,
        .needs = f->needs,
        .tracks = f->tracks,
        .work_count = 4,
        .need_count = 2,
        .computing = 2,
        .size = 2,
    };
    f->op.plan = &f->plan;
    f->op.coding = &f->coding;
    f->op.dtype = f->op.reduction = -1;
    return f;
}

static void free_fixture(struct fixture *f) {
    pmesh_runner_free(f->runner);
    for (int i = 0; i < PMESH_REGIONS; i++) {
        free(f->regions[i]);
    }
    free(f->residual);
    free(f->coding.bounce);
    free(f);
}

// In the caller's thread, in one of the runner's, or in both.
static int32_t run_op(struct fixture *f, int threads) {
    f->plan.computes_much = threads == 1;
    f->plan.two_threads = threads == 2;
    const int32_t state = pmesh_begin(f->runner, &f->op);
    if (state != PMESH_OVER) {
        struct pollfd ended = {.fd = pmesh_runner_fd(f->runner), .events = POLLIN};
        const bool has_thread = pmesh_hand_over(f->runner);
        assert(has_thread && threads && state == PMESH_BUSY);
        const int ready = poll(&ended, 1, WAITS_MS);
        assert(ready == 1);
    }
    return pmesh_end(f->runner);
}

static float float_at(const uint8_t *values, uint64_t i) {
    float value;
    memcpy(&value, values + 4 * i, sizeof value);
    return value;
}

static void hops_add_and_round_and_keep_the_rest_and_decodings_follow(void) {
    const float own = 1 + 0x1p-12F, large = -70000;
    const uint16_t half = 0x4200; // 3 in fp16
    for (int threads = 0; threads < 3; threads++) {
        struct fixture *f = new_fixture(PMESH_CODEC_FP16);
        memcpy(f->regions[PMESH_SOURCE], &own, sizeof own);
        memcpy(f->regions[PMESH_SOURCE] + 4, &large, sizeof large);
        memcpy(f->regions[PMESH_SOURCE] + NBYTES / 2, &own, sizeof own);
        memcpy(f->regions[PMESH_SCRATCH] + NBYTES / 2, &half, sizeof half);
        assert(run_op(f, threads) == PMESH_DONE);
        assert(f->coding.clipped == 1);
        assert(float_at(f->regions[PMESH_RESULT], 0) == 1);
        assert(float_at(f->regions[PMESH_RESULT], 1) == -65504);
        assert(float_at(f->regions[PMESH_RESULT], COUNT / 2) == 2); // the mean of 3 and 1
        assert(float_at(f->residual, 0) == 0x1p-12F);
        assert(float_at(f->residual, 1) == -70000 + 65504);
        assert(float_at(f->residual, COUNT / 2) == 0x1p-12F);
        free_fixture(f);
    }
}

static void any_bytes_are_some_values(void) {
    struct random random = {1};
    for (int32_t codec = 0; codec < PMESH_CODECS; codec++) {
        for (uint64_t count = 0; count <= COUNT / 2; count += 1 + count / 3) {
            struct fixture *f = new_fixture(codec);
            for (int i = 0; i < PMESH_REGIONS; i++) {
                for (uint64_t at = 0; at < NBYTES; at++) {
                    f->regions[i][at] = (uint8_t)(below(&random, 4) ? below(&random, 256) : 0xFF);
                }
            }
            set_works(f, count);
            assert(run_op(f, (int)below(&random, 3)) == PMESH_DONE);
            free_fixture(f);
        }
    }
}

// --- works that do not fit

static void a_hop_of_values_past_the_end(struct fixture *f) {
    f->works[0].begin = COUNT / 2 + 1;
}
static void a_hop_of_values_past_the_source(struct fixture *f) {
    f->op.region_bytes[PMESH_SOURCE] = NBYTES - 1;
}
static void a_decoding_of_values_past_the_result(struct fixture *f) {
    f->op.region_bytes[PMESH_RESULT] = NBYTES - 1;
}
static void values_whose_bytes_overflow(struct fixture *f) {
    f->works[0].begin = UINT64_MAX / 4 + 2;
}
static void as_many_values_as_overflow(struct fixture *f) {
    f->works[0].count = UINT64_MAX / 2 + 1;
    f->works[0].nbytes = 0;
}
static void encoded_bytes_past_the_end(struct fixture *f) {
    f->works[0].offset = NBYTES;
}
static void an_encoded_piece_that_is_shorter(struct fixture *f) {
    f->works[0].nbytes -= 4;
}
static void an_encoded_piece_that_is_longer(struct fixture *f) {
    f->works[2].nbytes += 4;
}
static void an_arrival_past_the_end(struct fixture *f) {
    f->works[1].arrived = NBYTES - 4;
}
static void an_arrival_that_overflows(struct fixture *f) {
    f->works[1].arrived = UINT64_MAX - 1;
}
static void an_arrival_that_is_overwritten(struct fixture *f) {
    f->works[1].region = PMESH_SCRATCH;
    f->works[1].arrived = f->works[1].offset + 4;
}
static void an_arrival_that_overwrites(struct fixture *f) {
    f->works[1].region = PMESH_SCRATCH;
    f->works[1].arrived = f->works[1].offset - 4;
}
static void a_hop_into_the_source(struct fixture *f) {
    f->works[0].region = PMESH_SOURCE;
}
static void a_decoding_from_no_region(struct fixture *f) {
    f->works[2].region = PMESH_REGIONS;
}
static void a_hop_among_decodings(struct fixture *f) {
    f->works[3].decodes = 0;
}
static void a_decoding_among_hops(struct fixture *f) {
    f->works[1].decodes = 1;
}
static void terms_that_are_none(struct fixture *f) {
    f->works[1].divides = 2;
}
static void too_small_a_bounce(struct fixture *f) {
    f->coding.bounce_bytes = f->works[2].nbytes - 1;
}
static void a_bounce_for_two_sides(struct fixture *f) {
    f->tracks[1].end = 3;
    f->tracks[2] = (struct pmesh_track){.begin = 3, .end = 4};
    f->plan.computing = 3;
}
static void no_coding(struct fixture *f) {
    f->op.coding = NULL;
}
static void a_codec_below_the_first(struct fixture *f) {
    f->coding.codec = -1;
}
static void a_codec_beyond_the_last(struct fixture *f) {
    f->coding.codec = PMESH_CODECS;
    for (int i = 0; i < 4; i++) {
        f->works[i].nbytes = 0;
    }
}
static void blocks_of_nothing(struct fixture *f) {
    f->coding.block = 0;
}
static void needs_past_the_end(struct fixture *f) {
    f->works[3].need_end = 3;
}
static void needs_backwards(struct fixture *f) {
    f->works[2].need_begin = 2;
}
static void a_need_of_no_track(struct fixture *f) {
    f->needs[0].track = 2;
}
static void a_queue_past_the_end(struct fixture *f) {
    f->plan.work_count = 3;
}
static void a_queue_backwards(struct fixture *f) {
    f->tracks[1].begin = 5;
}
static void more_queues_than_can_be_counted(struct fixture *f) {
    f->plan.computing = UINT32_MAX;
}

static void works_that_do_not_fit_are_refused(void) {
    void (*const harms[])(struct fixture *) = {
        a_hop_of_values_past_the_end,
        a_hop_of_values_past_the_source,
        a_decoding_of_values_past_the_result,
        values_whose_bytes_overflow,
        as_many_values_as_overflow,
        encoded_bytes_past_the_end,
        an_encoded_piece_that_is_shorter,
        an_encoded_piece_that_is_longer,
        an_arrival_past_the_end,
        an_arrival_that_overflows,
        an_arrival_that_is_overwritten,
        an_arrival_that_overwrites,
        a_hop_into_the_source,
        a_decoding_from_no_region,
        a_hop_among_decodings,
        a_decoding_among_hops,
        terms_that_are_none,
        too_small_a_bounce,
        a_bounce_for_two_sides,
        no_coding,
        a_codec_below_the_first,
        a_codec_beyond_the_last,
        blocks_of_nothing,
        needs_past_the_end,
        needs_backwards,
        a_need_of_no_track,
        a_queue_past_the_end,
        a_queue_backwards,
        more_queues_than_can_be_counted,
    };
    for (size_t i = 0; i < sizeof harms / sizeof *harms; i++) {
        struct fixture *f = new_fixture(PMESH_CODEC_BF16);
        harms[i](f);
        if (run_op(f, 2) != PMESH_INVALID) {
            fprintf(stderr, "works %zu are not refused\n", i);
            abort();
        }
        free_fixture(f);
    }
}

int main(void) {
    hops_add_and_round_and_keep_the_rest_and_decodings_follow();
    any_bytes_are_some_values();
    works_that_do_not_fit_are_refused();
    return 0;
}
