// One rank whose peers lie, forge and close, whose plans do not fit, and whose system has no room.
//
// Run: faults
#include "toy.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

// --- a system that refuses after so many more calls; -1: never

static int threads_left = -1, pipes_left = -1, blocks_left = -1;

static bool is_refused(int *left) {
    return *left == 0 || (*left > 0 && (*left)-- == 0);
}

static int scarce_create(pthread_t *thread, const pthread_attr_t *attributes,
                         void *(*start)(void *), void *argument) {
    return is_refused(&threads_left) ? EAGAIN : pthread_create(thread, attributes, start, argument);
}

static int scarce_pipe(int ends[2]) {
    errno = EMFILE;
    return is_refused(&pipes_left) ? -1 : pipe(ends);
}

static void *scarce_calloc(size_t count, size_t nbytes) {
    return is_refused(&blocks_left) ? NULL : calloc(count, nbytes);
}

#define pthread_create scarce_create
#define pipe scarce_pipe
#define calloc scarce_calloc
#include "../executor.c"
#undef pthread_create
#undef pipe
#undef calloc

// --- one rank with one lane in and one lane out

enum { NBYTES = 4096, VALUES = NBYTES / 4, ROSTER = 7, NUMBER = 5, WAITS_MS = 20 * 1000 };
static const uint8_t KEY[PMESH_KEY_BYTES] = "sixteen bytes ..";
static const uint64_t FINGERPRINT = 0xfedcba9876543210U;

struct fixture {
    struct pmesh_runner *runner;
    struct pmesh_lane in, out, peer; // `peer` seals what comes in
    int peer_of_in, peer_of_out;
    struct pmesh_lane *lanes[2];
    struct pmesh_record records[2];
    struct pmesh_need needs[1];
    struct pmesh_copy copies[1];
    struct pmesh_track tracks[2];
    struct pmesh_plan plan;
    struct pmesh_op op;
    uint8_t *regions[PMESH_REGIONS];
};

// It receives one record into the result, and sends one from the source.
static void set_plan(struct fixture *f) {
    f->records[0] = (struct pmesh_record){.nbytes = NBYTES, .region = PMESH_RESULT};
    f->records[1] = (struct pmesh_record){.nbytes = NBYTES, .region = PMESH_SOURCE};
    f->needs[0] = (struct pmesh_need){.track = 0, .number = 1};
    f->copies[0] = (struct pmesh_copy){0};
    f->tracks[0] = (struct pmesh_track){.begin = 0, .end = 1};
    f->tracks[1] = (struct pmesh_track){.begin = 1, .end = 2};
    f->plan = (struct pmesh_plan){
        .records = f->records,
        .needs = f->needs,
        .copies = f->copies,
        .tracks = f->tracks,
        .record_count = 2,
        .need_count = 1,
        .copy_count = 1,
        .receiving = 1,
        .sending = 1,
        .size = 2,
    };
    f->op = (struct pmesh_op){
        .plan = &f->plan,
        .lanes = f->lanes,
        .seal = (pmesh_function)toy_seal,
        .open = (pmesh_function)toy_open,
        .roster = ROSTER,
        .number = NUMBER,
        .fingerprint = FINGERPRINT,
        .completed = NUMBER - 1,
        .dtype = PMESH_INT32,
        .reduction = PMESH_SUM,
    };
    for (int i = 0; i < PMESH_REGIONS; i++) {
        f->op.regions[i] = f->regions[i];
        f->op.region_bytes[i] = NBYTES;
    }
}

// All that a test says fits in, before anyone reads.
static void new_pair(int ends[2]) {
    const int room = 256 * 1024;
    const int failed = socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    assert(!failed);
    for (int i = 0; i < 2; i++) {
        setsockopt(ends[i], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
        setsockopt(ends[i], SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    }
}

static struct fixture *new_fixture(void) {
    struct fixture *f = calloc(1, sizeof *f);
    int in[2], out[2];
    assert(f);
    new_pair(in);
    new_pair(out);
    f->runner = pmesh_runner_new();
    f->in = new_lane(in[0], KEY);
    f->out = new_lane(out[0], KEY);
    f->peer = new_lane(in[1], KEY);
    f->peer_of_in = in[1];
    f->peer_of_out = out[1];
    f->lanes[0] = &f->in;
    f->lanes[1] = &f->out;
    for (int i = 0; i < PMESH_REGIONS; i++) {
        f->regions[i] = exactly(NBYTES);
        memset(f->regions[i], i + 1, NBYTES);
    }
    set_plan(f);
    return f;
}

static void free_fixture(struct fixture *f) {
    struct pmesh_lane *lanes[] = {&f->in, &f->out, &f->peer};
    if (f->runner) {
        pmesh_runner_free(f->runner);
    }
    for (int i = 0; i < 3; i++) {
        free(lanes[i]->out);
        free(lanes[i]->in);
    }
    for (int i = 0; i < PMESH_REGIONS; i++) {
        free(f->regions[i]);
    }
    close(f->in.fd);
    close(f->out.fd);
    close(f->peer_of_in);
    close(f->peer_of_out);
    free(f);
}

static int32_t end_op(struct fixture *f, bool under_way) {
    struct pollfd ended = {.fd = pmesh_runner_fd(f->runner), .events = POLLIN};
    if (under_way) {
        const int ready = poll(&ended, 1, WAITS_MS);
        assert(ready == 1);
    }
    return pmesh_end(f->runner);
}

static bool begin(struct fixture *f) {
    return pmesh_begin(f->runner, &f->op) != PMESH_OVER && pmesh_hand_over(f->runner);
}

static int32_t run_op(struct fixture *f) {
    return end_op(f, begin(f));
}

// --- what a peer sends; `flip` is a bit of it that is changed, or -1

struct said {
    uint64_t roster, number, fingerprint, nbytes;
    uint32_t segment;
    int64_t flip;
};

static const struct said EXPECTED = {ROSTER, NUMBER, FINGERPRINT, NBYTES, 0, -1};

static void say(struct fixture *f, const struct said *said) {
    uint8_t *body = exactly(said->nbytes);
    const struct pmesh_record record = {.nbytes = said->nbytes, .region = PMESH_SOURCE};
    struct pmesh_lane *peers[] = {&f->peer};
    struct pmesh_op op = f->op;
    memset(body, 9, said->nbytes);
    op.regions[PMESH_SOURCE] = body;
    op.roster = said->roster;
    op.number = said->number;
    op.fingerprint = said->fingerprint;
    op.lanes = peers;
    const bool sealed = pmesh_seal_record(&op, 0, &record, said->segment);
    assert(sealed);
    if (said->flip >= 0) {
        f->peer.out[said->flip / 8] ^= (uint8_t)(1 << said->flip % 8);
    }
    for (uint64_t sent = 0; sent < f->peer.unsent_end;) {
        const ssize_t count = send(f->peer_of_in, f->peer.out + sent, f->peer.unsent_end - sent, 0);
        assert(count > 0);
        sent += (uint64_t)count;
    }
    free(body);
}

// Run the op with this record, in one thread or two; return how it ends.
static int32_t status_of(const struct said *said, int two_threads, uint64_t *detail) {
    struct fixture *f = new_fixture();
    f->plan.two_threads = (uint8_t)two_threads;
    say(f, said);
    const int32_t status = run_op(f);
    assert(status == PMESH_DONE || f->op.track == 0);
    *detail = f->op.detail;
    free_fixture(f);
    return status;
}

static void records_that_are_not_expected_end_the_op(void) {
    const struct {
        struct said said;
        int32_t status;
        uint64_t detail;
    } cases[] = {
        {{ROSTER, NUMBER, FINGERPRINT, NBYTES, 0, -1}, PMESH_DONE, 0},
        {{ROSTER, NUMBER, FINGERPRINT, NBYTES, 1, -1}, PMESH_OUT_OF_PLACE, 0},
        {{ROSTER, NUMBER, FINGERPRINT, NBYTES - 4, 0, -1}, PMESH_OUT_OF_PLACE, 0},
        {{ROSTER, NUMBER, FINGERPRINT, NBYTES + 4, 0, -1}, PMESH_OUT_OF_PLACE, 0},
        {{ROSTER, NUMBER + 1, FINGERPRINT, NBYTES, 0, -1}, PMESH_DIFFERS, NUMBER},
        {{ROSTER, NUMBER - 2, FINGERPRINT, NBYTES, 0, -1}, PMESH_DIFFERS, NUMBER - 2},
        {{ROSTER, NUMBER, FINGERPRINT + 1, 2 * NBYTES, 0, -1}, PMESH_DIFFERS, NUMBER},
        {{ROSTER, NUMBER, FINGERPRINT + 1, 0, 0, -1}, PMESH_DIFFERS, NUMBER},
        {{ROSTER, NUMBER + 1, FINGERPRINT, 9, 0, 8 * 45}, PMESH_FORGED, 0},
        {{ROSTER - 1, NUMBER, FINGERPRINT, 9, 0, 8 * 45}, PMESH_FORGED, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int two = 0; two < 2; two++) {
            uint64_t detail;
            assert(status_of(&cases[i].said, two, &detail) == cases[i].status);
            assert(detail == cases[i].detail);
        }
    }
}

static void every_flipped_bit_is_noticed(void) {
    const int64_t header = 8 * PMESH_HEADER_BYTES, end = header + 8 * (NBYTES + PMESH_TAG_BYTES);
    uint64_t detail;
    // Not those of a size, which make it wait for more, nor of a roster, which is held or dropped.
    for (int64_t bit = 8 * 12; bit < end; bit += bit < header ? 3 : 331) {
        struct said said = EXPECTED;
        said.flip = bit;
        const int32_t status = status_of(&said, 0, &detail);
        assert(status == PMESH_FORGED || (status == PMESH_OUT_OF_PLACE && bit / 8 / 4 == 5));
    }
}

static void a_header_may_claim_no_more_than_the_buffers_hold(void) {
    const uint64_t claims[] = {PMESH_MAX_BODY_BYTES + 1, 0x80000000U, 0xffffffffU};
    for (int i = 0; i < 3; i++) {
        struct fixture *f = new_fixture();
        uint8_t header[PMESH_HEADER_BYTES] = {0};
        for (int byte = 0; byte < 4; byte++) {
            header[byte] = (uint8_t)(claims[i] >> (24 - 8 * byte));
        }
        assert(send(f->peer_of_in, header, sizeof header, 0) == sizeof header);
        assert(run_op(f) == PMESH_TOO_LARGE && f->op.detail == claims[i]);
        free_fixture(f);
    }
}

static void a_late_record_is_dropped_and_an_early_one_is_held_until_its_op(void) {
    for (int two = 0; two < 2; two++) {
        struct fixture *f = new_fixture();
        struct said said = EXPECTED;
        f->plan.two_threads = (uint8_t)two;
        for (uint64_t nbytes = 0; nbytes <= 3 * NBYTES; nbytes += NBYTES / 2) { // longer, too
            said = (struct said){ROSTER - 1, NUMBER + nbytes, FINGERPRINT, nbytes, 3, -1};
            say(f, &said);
        }
        said = EXPECTED;
        said.roster = ROSTER + 1;
        say(f, &said);
        const bool under_way = begin(f);
        assert(under_way);
        pmesh_stop(f->runner);
        assert(end_op(f, true) == PMESH_STOPPED);

        set_plan(f);
        f->plan.two_threads = (uint8_t)two;
        f->op.roster = ROSTER + 1;
        assert(run_op(f) == PMESH_DONE && f->regions[PMESH_RESULT][NBYTES - 1] == 9);
        assert(f->in.dropped == 7 && f->in.filled == 0);
        pmesh_stop(f->runner); // after the end: no effect on the next op
        say(f, &(struct said){ROSTER + 1, NUMBER + 1, FINGERPRINT, NBYTES, 0, -1});
        f->op.number++;
        assert(run_op(f) == PMESH_DONE);
        free_fixture(f);
    }
}

static void a_peer_that_closes_ends_the_op(void) {
    for (int two = 0; two < 2; two++) {
        for (size_t nbytes = 0; nbytes < 3; nbytes++) {
            struct fixture *f = new_fixture();
            f->plan.two_threads = (uint8_t)two;
            const bool under_way = begin(f); // it may wait by now
            assert(under_way);
            assert(send(f->peer_of_in, "ab", nbytes, 0) == (ssize_t)nbytes);
            shutdown(f->peer_of_in, SHUT_WR);
            assert(end_op(f, true) == PMESH_ENDED && f->op.track == 0);
            free_fixture(f);
        }
        struct fixture *f = new_fixture();
        f->plan.two_threads = (uint8_t)two;
        shutdown(f->peer_of_out, SHUT_RDWR);
        assert(run_op(f) == PMESH_FAILED && f->op.track == 1 && f->op.detail == EPIPE);
        free_fixture(f);
    }
}

// The caller then waits for the network only if nothing else is left to do.
static void what_takes_long_is_left_to_threads(void) {
    const uint64_t nbytes = 40U * 1024 * 1024; // in pieces of 256 KiB, with one record
    struct fixture *f = new_fixture();
    f->op.regions[PMESH_SOURCE] = exactly(nbytes);
    f->op.regions[PMESH_RESULT] = exactly(nbytes);
    f->op.region_bytes[PMESH_SOURCE] = f->op.region_bytes[PMESH_RESULT] = nbytes;
    memset(f->op.regions[PMESH_SOURCE], 5, nbytes);
    f->copies[0] =
        (struct pmesh_copy){.source = NBYTES, .result = NBYTES, .nbytes = nbytes - NBYTES};
    say(f, &EXPECTED);
    assert(pmesh_begin(f->runner, &f->op) == PMESH_BUSY);
    assert(end_op(f, pmesh_hand_over(f->runner)) == PMESH_DONE);
    assert(f->op.regions[PMESH_RESULT][NBYTES - 1] == 9);
    assert(f->op.regions[PMESH_RESULT][nbytes - 1] == 5);
    free(f->op.regions[PMESH_SOURCE]);
    free(f->op.regions[PMESH_RESULT]);
    free_fixture(f);
}

static void an_op_that_awaits_a_record_goes_on_when_it_is_there(void) {
    struct fixture *f = new_fixture();
    assert(pmesh_begin(f->runner, &f->op) == PMESH_AWAITS);
    assert(pmesh_advance(f->runner) == PMESH_AWAITS);
    say(f, &EXPECTED);
    assert(pmesh_advance(f->runner) == PMESH_OVER && pmesh_end(f->runner) == PMESH_DONE);

    set_plan(f);
    f->op.number++;
    assert(pmesh_begin(f->runner, &f->op) == PMESH_AWAITS);
    pmesh_stop(f->runner);
    assert(pmesh_advance(f->runner) == PMESH_OVER && pmesh_end(f->runner) == PMESH_STOPPED);
    free_fixture(f);
}

// --- plans that do not fit

static void receiving_too_much(struct fixture *f) {
    f->records[0].nbytes = NBYTES + 1;
}
static void receiving_past_the_end(struct fixture *f) {
    f->records[0].offset = 1;
}
static void receiving_at_an_offset_that_overflows(struct fixture *f) {
    f->records[0].offset = UINT64_MAX - NBYTES / 2;
}
static void receiving_into_the_source(struct fixture *f) {
    f->records[0].region = PMESH_SOURCE;
}
static void a_region_that_is_none(struct fixture *f) {
    f->records[1].region = PMESH_REGIONS;
}
static void sending_past_the_end(struct fixture *f) {
    f->records[1].offset = NBYTES;
}
static void more_than_a_record_holds(struct fixture *f) {
    f->op.region_bytes[PMESH_SOURCE] = 2 * PMESH_MAX_BODY_BYTES;
    f->records[1].nbytes = PMESH_MAX_BODY_BYTES + 1;
}
static void an_addition_that_is_none(struct fixture *f) {
    f->records[0].then = PMESH_ADD_TO_RESULT + 1;
}
static void an_addition_past_the_end(struct fixture *f) {
    f->records[0].then = PMESH_ADD_SOURCE;
    f->records[0].other = 4;
}
static void an_addition_to_itself(struct fixture *f) {
    f->records[0].then = PMESH_ADD_TO_RESULT;
}
static void an_addition_of_half_a_value(struct fixture *f) {
    f->records[0].then = PMESH_ADD_SOURCE;
    f->records[0].nbytes = 6;
}
static void an_addition_beside_the_values(struct fixture *f) {
    f->records[0] = (struct pmesh_record){
        .nbytes = 8, .other = 2, .region = PMESH_RESULT, .then = PMESH_ADD_SOURCE};
}
static void an_addition_without_a_dtype(struct fixture *f) {
    f->records[0].then = PMESH_ADD_SOURCE;
    f->op.dtype = -1;
}
static void an_addition_of_what_is_not_there(struct fixture *f) {
    f->records[0].then = PMESH_ADD_SOURCE;
    f->op.dtype = PMESH_COMPLEX64;
    f->op.reduction = PMESH_PROD;
}
static void memory_that_is_not_aligned(struct fixture *f) {
    f->op.regions[PMESH_SCRATCH] += 2;
    f->op.region_bytes[PMESH_SCRATCH] -= 4;
}
static void a_mean_of_nobody(struct fixture *f) {
    f->plan.size = 0;
}
static void needs_past_the_end(struct fixture *f) {
    f->records[1].need_end = 2;
}
static void needs_backwards(struct fixture *f) {
    f->records[1].need_begin = 1;
}
static void a_need_of_no_track(struct fixture *f) {
    f->needs[0].track = 2;
}
static void a_track_past_the_end(struct fixture *f) {
    f->tracks[1].end = 3;
}
static void a_track_backwards(struct fixture *f) {
    f->tracks[1] = (struct pmesh_track){.begin = 2, .end = 1};
}
static void a_copy_from_past_the_end(struct fixture *f) {
    f->copies[0] = (struct pmesh_copy){.source = 1, .nbytes = NBYTES};
}
static void a_copy_to_past_the_end(struct fixture *f) {
    f->copies[0] = (struct pmesh_copy){.result = UINT64_MAX, .nbytes = 1};
}
static void a_copy_whose_end_overflows(struct fixture *f) {
    f->copies[0] = (struct pmesh_copy){.source = 8, .result = 8, .nbytes = UINT64_MAX - 7};
}
static void more_tracks_than_can_be_counted(struct fixture *f) {
    f->plan.receiving = UINT32_MAX;
    f->plan.sending = 2;
}
static void a_lane_with_more_than_its_buffer_holds(struct fixture *f) {
    f->in.filled = ROOM + 1;
}
static void a_lane_that_has_sent_more_than_there_was(struct fixture *f) {
    f->out.unsent_begin = 1;
}

static void a_plan_that_does_not_fit_is_refused(void) {
    void (*const harms[])(struct fixture *) = {
        receiving_too_much,
        receiving_past_the_end,
        receiving_at_an_offset_that_overflows,
        receiving_into_the_source,
        a_region_that_is_none,
        sending_past_the_end,
        more_than_a_record_holds,
        an_addition_that_is_none,
        an_addition_past_the_end,
        an_addition_to_itself,
        an_addition_of_half_a_value,
        an_addition_beside_the_values,
        an_addition_without_a_dtype,
        an_addition_of_what_is_not_there,
        memory_that_is_not_aligned,
        a_mean_of_nobody,
        needs_past_the_end,
        needs_backwards,
        a_need_of_no_track,
        a_track_past_the_end,
        a_track_backwards,
        a_copy_from_past_the_end,
        a_copy_to_past_the_end,
        a_copy_whose_end_overflows,
        more_tracks_than_can_be_counted,
        a_lane_with_more_than_its_buffer_holds,
        a_lane_that_has_sent_more_than_there_was,
    };
    for (size_t i = 0; i < sizeof harms / sizeof *harms; i++) {
        for (int two = 0; two < 2; two++) {
            struct fixture *f = new_fixture();
            f->plan.two_threads = (uint8_t)two;
            harms[i](f);
            if (run_op(f) != PMESH_INVALID) {
                fprintf(stderr, "plan %zu is not refused\n", i);
                abort();
            }
            free_fixture(f);
        }
    }
}

// --- a system without room

static void without_a_second_thread_one_does_both(void) {
    for (int threads = 0; threads < 3; threads++) {
        struct fixture *f = new_fixture();
        f->plan.two_threads = 1;
        threads_left = threads;
        say(f, &EXPECTED);
        assert(run_op(f) == (threads ? PMESH_DONE : PMESH_NO_THREAD));
        threads_left = -1;
        if (!threads) { // the next op has room
            set_plan(f);
            f->plan.two_threads = 1;
            assert(run_op(f) == PMESH_DONE);
        }
        free_fixture(f);
    }
}

static void without_a_pipe_there_is_no_runner(void) {
    for (int pipes = 0; pipes < 3; pipes++) {
        pipes_left = pipes;
        assert(!pmesh_runner_new());
    }
    pipes_left = -1;
}

static void without_memory_an_op_is_refused_and_a_later_one_runs(void) {
    for (int blocks = 0; blocks < 4; blocks++) {
        struct fixture *f = new_fixture();
        blocks_left = blocks;
        assert(run_op(f) == PMESH_INVALID);
        blocks_left = -1;
        set_plan(f);
        say(f, &EXPECTED);
        assert(run_op(f) == PMESH_DONE);
        free_fixture(f);
    }
}

// UBSan sees each of them; the tests in Python compare their bits with numpy's.
static void every_reduction_takes_any_bits(void) {
    struct random random = {1};
    uint64_t x[64], y[64];
    for (int32_t dtype = -1; dtype <= PMESH_DTYPES; dtype++) {
        for (int32_t reduction = -1; reduction <= PMESH_REDUCTIONS; reduction++) {
            const uint64_t itemsize = pmesh_itemsize(dtype, reduction);
            for (int i = 0; i < 64; i++) {
                x[i] = mixed(below(&random, UINT64_MAX));
                y[i] = below(&random, 2) ? mixed(below(&random, UINT64_MAX)) : x[i];
            }
            if (itemsize) {
                pmesh_accumulate(dtype, reduction, x, y, sizeof x / itemsize);
                pmesh_finish(dtype, reduction, x, sizeof x / itemsize, 3);
                pmesh_make_nan_equal(dtype, x, sizeof x / itemsize);
            }
        }
    }
}

#define TEST(NAME) {#NAME, NAME}

int main(void) {
    const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {
        TEST(records_that_are_not_expected_end_the_op),
        TEST(every_flipped_bit_is_noticed),
        TEST(a_header_may_claim_no_more_than_the_buffers_hold),
        TEST(a_late_record_is_dropped_and_an_early_one_is_held_until_its_op),
        TEST(a_peer_that_closes_ends_the_op),
        TEST(what_takes_long_is_left_to_threads),
        TEST(an_op_that_awaits_a_record_goes_on_when_it_is_there),
        TEST(a_plan_that_does_not_fit_is_refused),
        TEST(without_a_second_thread_one_does_both),
        TEST(without_a_pipe_there_is_no_runner),
        TEST(without_memory_an_op_is_refused_and_a_later_one_runs),
        TEST(every_reduction_takes_any_bits),
    };
    signal(SIGPIPE, SIG_IGN); // as Python does
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        fprintf(stderr, "%s\n", tests[i].name); // the last one if it fails
        tests[i].run();
    }
    return 0;
}
