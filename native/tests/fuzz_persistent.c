// Fuzzes what answers a trainer: it sends any bytes, which arrive in any pieces, and takes its
// replies or not. Whatever comes, an op reads its values from within the arena, writes its result
// where none is needed any more, and what is no request is left as it came. No thread serves here,
// so that a run is short.
#include "toy.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <time.h>

#include "../persistent.h"

enum {
    CALLS = 6,
    MEETING = 5, // the call in which ranks meet: there is only one
    WORDS = 75,  // of the arena: not a round number
    VALUES = 10,
    ITEM_BYTES = 4,
    LONG_BYTES = 4200, // more than a server keeps
    NEARLY_FULL = 1020,
    SLOTS = 2 * PMESH_MOST_SLOTS, // of which the second half is shared
    FIRST_SLOT = 126,             // numbers of arenas: of one byte, and of two
    MOST_CAME = 1 << 16,
};

// --- a trainer that sends the fuzzer's bytes, and a clock on which each look takes a second

static struct {
    const uint8_t *bytes;
    uint64_t left;
    _Atomic bool *recalled;
    uint8_t *came;
    uint64_t came_bytes, followed; // that were handled
    bool is_stuck;
    time_t now_s;
} trainer;

static uint8_t next_byte(void) {
    if (!trainer.left) {
        return 0;
    }
    trainer.left--;
    return *trainer.bytes++;
}

// A recall, nothing yet, a piece, a long row of the same, or the end.
static ssize_t fuzzed_recv(uint8_t *to, size_t nbytes) {
    const uint8_t piece = next_byte();
    if (!nbytes || !trainer.left) {
        return 0;
    }
    if (piece < 2) {
        *trainer.recalled |= !piece;
        errno = EAGAIN;
        return -1;
    }
    size_t count = piece > 200 ? 80U * (piece - 200U) : piece;
    count = count < nbytes ? count : nbytes;
    for (size_t i = 0; i < count; i++) {
        to[i] = piece > 200 ? 'z' : next_byte();
    }
    assert(trainer.came_bytes + count <= MOST_CAME);
    memcpy(trainer.came + trainer.came_bytes, to, count);
    trainer.came_bytes += count;
    return (ssize_t)count;
}

static ssize_t fuzzed_send(const uint8_t *from, size_t nbytes);

static int fuzzed_poll(struct pollfd *polled, nfds_t count) {
    for (nfds_t i = 0; i < count; i++) {
        polled[i].revents = POLLIN;
    }
    return (int)count;
}

static int fuzzed_clock(struct timespec *time) {
    *time = (struct timespec){.tv_sec = ++trainer.now_s};
    return 0;
}

#define recv(fd, to, nbytes, flags) fuzzed_recv(to, nbytes)
#define send(fd, from, nbytes, flags) fuzzed_send(from, nbytes)
#define poll(polled, count, timeout) fuzzed_poll(polled, count)
#define clock_gettime(clock, time) ((void)(clock), fuzzed_clock(time))
#include "../persistent.c"
#undef recv
#undef send
#undef poll
#undef clock_gettime

// --- six calls: a copy, an op without values, one that waits for another rank, a long request,
// one that says its step, and a copy where all ranks of this agent meet, whose result may be shared

static struct {
    struct pmesh_persistent calls;
    struct pmesh_op ops[CALLS];
    struct pmesh_plan plans[CALLS];
    uint64_t used_by[SLOTS]; // the last op that wrote there
    bool is_lent[SLOTS];
    struct pmesh_lane lane; // on which nothing ever comes
    uint8_t *arena, *long_request, *slots[SLOTS];
    struct pmesh_runner *runner;
    struct pmesh_meeting *meetings[2]; // of which the second one shares
} rank;

static struct pmesh_message laid_out(const char *first, const char *second, const char *third) {
    const char *const parts[] = {first, second, third};
    struct pmesh_message message = {.count = third ? 3 : 2};
    for (uint32_t i = 0; i < message.count; i++) {
        message.parts[i] = (const uint8_t *)parts[i];
        message.nbytes[i] = (uint32_t)strlen(parts[i]);
    }
    return message;
}

// Each word of the arena says where it lies.
static void check_result(const uint8_t *result) {
    const uint64_t first = pmesh_get(result, ITEM_BYTES);
    for (uint64_t i = 0; i < VALUES; i++) {
        assert(pmesh_get(result + i * ITEM_BYTES, ITEM_BYTES) == first + i && first + i < WORDS);
    }
}

// A server takes whole messages off what has come: the request of an op, and drops of arenas that
// are lent. Return the number in the last one.
static uint64_t follow(void) {
    const uint64_t end = trainer.came_bytes - rank.calls.unread_bytes;
    uint64_t number = 0;
    while (trainer.followed < end) {
        const uint8_t *message = trainer.came + trainer.followed;
        const uint8_t *at = message + 4 + strlen("copy");
        uint8_t shortest[NUMBER_BYTES];
        number = at[0] < 128 ? at[0] : pmesh_get(at + 1, 1 << (at[0] - 0xcc));
        assert(!memcmp(at, shortest, put_number(shortest, number)));
        if (message[4] == 'd') {
            assert(number - FIRST_SLOT < SLOTS && rank.is_lent[number - FIRST_SLOT]);
            rank.is_lent[number - FIRST_SLOT] = false;
        }
        trainer.followed += 4 + pmesh_get(message, 4);
    }
    assert(trainer.followed == end);
    return number;
}

// A reply is whole, and says that the next op has ended. The trainer may not take it.
static ssize_t fuzzed_send(const uint8_t *from, size_t nbytes) {
    const struct pmesh_persistent *calls = &rank.calls;
    const struct pmesh_ended_op *op = &calls->log[(calls->ended - 1) % PMESH_LOGGED_OPS];
    const uint8_t piece = next_byte();
    assert(nbytes > 9 && pmesh_get(from, 4) == nbytes - 4 && !memcmp(from + 4, "done ", 5));
    assert(op->number + 1 == calls->next && op->number < calls->limit);
    assert(op->call < 2 || op->call == 4 || op->call == MEETING);
    assert(op->number == follow());
    // V8: it was trusted at the look before the last.
    assert(1e6 * (op->ended_s - 1) <= (double)calls->trusted_until_us);
    if (op->call == 0 || op->call == MEETING) {
        const struct pmesh_slot *slot = &calls->slots[op->slot];
        uint32_t own = 0;
        check_result(slot->memory);
        assert(!rank.used_by[op->slot] || rank.used_by[op->slot] + 2 <= op->number);
        assert(slot->free_at == op->number + 2 && slot->lent == calls->may_lend);
        assert(!rank.is_lent[op->slot]);
        rank.is_lent[op->slot] = slot->lent;
        rank.used_by[op->slot] = op->number;
        assert(slot->shared == (op->call == MEETING && shares(&calls->calls[MEETING])));
        for (uint32_t i = 0; i < SLOTS; i++) {
            own += calls->slots[i].shared == slot->shared && !calls->slots[i].lent;
        }
        assert(!calls->may_lend || own >= PMESH_OWN_SLOTS);
    }
    errno = EAGAIN;
    trainer.is_stuck = piece == 1 || piece == 2;
    return piece == 1 ? -1 : piece == 2 ? (ssize_t)nbytes - 1 : (ssize_t)nbytes;
}

static void set_up(uint8_t numbers, uint8_t flags) {
    static const uint64_t FIRST[] = {1, 120, 250, 65530, 4294967290, INT64_MAX - 9};
    static const struct pmesh_copy COPY = {.nbytes = VALUES * ITEM_BYTES};
    static const struct pmesh_record RECORD = {.region = PMESH_RESULT};
    static const struct pmesh_track TRACK = {.end = 1};
    static struct pmesh_lane *const LANES[] = {&rank.lane};
    struct pmesh_persistent *calls = &rank.calls;
    memset(calls, 0, sizeof *calls);
    memset(rank.used_by, 0, sizeof rank.used_by);
    memset(rank.is_lent, 0, sizeof rank.is_lent);
    for (uint32_t i = 0; i < CALLS; i++) {
        rank.plans[i] = (struct pmesh_plan){.size = 2};
        rank.ops[i] = (struct pmesh_op){.plan = &rank.plans[i], .lanes = LANES, .dtype = -1};
        calls->calls[i] = (struct pmesh_call){.op = &rank.ops[i],
                                              .arena = rank.arena,
                                              .arena_bytes = WORDS * ITEM_BYTES,
                                              .itemsize = ITEM_BYTES};
    }
    rank.plans[0].copies = &COPY;
    rank.plans[0].copy_count = 1;
    rank.ops[0].region_bytes[PMESH_SOURCE] = COPY.nbytes;
    rank.ops[0].region_bytes[PMESH_RESULT] = COPY.nbytes;
    rank.ops[MEETING].region_bytes[PMESH_SOURCE] = COPY.nbytes;
    rank.ops[MEETING].region_bytes[PMESH_RESULT] = COPY.nbytes;
    rank.plans[2].records = &RECORD;
    rank.plans[2].tracks = &TRACK;
    rank.plans[2].record_count = rank.plans[2].receiving = 1;
    calls->calls[0].request = laid_out("copy", "from", "");
    calls->calls[0].reply = laid_out("done ", "in", ".");
    calls->calls[0].lending = laid_out("done ", "in", "lent");
    calls->calls[1].request = laid_out("copy", ".", NULL);
    calls->calls[2].request = laid_out("wait", "from", "!");
    calls->calls[3].request = laid_out((const char *)rank.long_request, "", NULL);
    calls->calls[4].request = laid_out("step", "of", "");
    calls->calls[4].says_step = true;
    calls->calls[MEETING].request = laid_out("meet", "from", "");
    calls->calls[MEETING].meeting = rank.meetings[numbers / 6 % 2];
    for (uint32_t i = 0; i < CALLS; i++) {
        calls->calls[i].says_place = calls->calls[i].request.count == PMESH_PARTS && i != 4;
    }
    for (uint32_t i = 1; i < MEETING; i++) {
        calls->calls[i].reply = laid_out("done ", "", NULL);
    }
    calls->calls[MEETING].reply = calls->calls[0].reply;
    calls->calls[MEETING].lending = calls->calls[0].lending;
    calls->drop = laid_out("drop", "", NULL);
    calls->next = FIRST[numbers % 6];
    calls->limit = flags & 1 ? calls->next + 3 : INT64_MAX;
    calls->most_wait_s = 0.1;
    calls->trusted_until_us = flags & 2 ? flags / 16 * 1000U * 1000 : UINT64_MAX;
    calls->may_lend = flags & 4 ? 1 : 0;
    calls->ended = flags & 8 ? NEARLY_FULL : 0;
    calls->call_count = CALLS;
    calls->slot_count = SLOTS;
    calls->runner = rank.runner;
    for (uint32_t i = 0; i < SLOTS; i++) {
        calls->slots[i] = (struct pmesh_slot){.memory = rank.slots[i],
                                              .nbytes = VALUES * ITEM_BYTES,
                                              .number = FIRST_SLOT + i,
                                              .shared = i >= PMESH_MOST_SLOTS};
    }
}

// What stays from one run to the next.
static void set_up_once(void) {
    static const uint8_t KEY[PMESH_KEY_BYTES];
    static const struct pmesh_fold FOLD = {VALUES * ITEM_BYTES, 0, 1, 0, 1};
    static const struct pmesh_place PLACE;
    const struct pmesh_combining op = {.folds = &FOLD,
                                       .places = &PLACE,
                                       .fold_count = 1,
                                       .place_count = 1,
                                       .ranks = 1,
                                       .dtype = -1,
                                       .reduction = -1};
    int ends[2];
    if (rank.runner) {
        return;
    }
    const int failed = socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends);
    assert(!failed);
    rank.lane = new_lane(ends[0], KEY);
    rank.runner = pmesh_runner_new();
    for (int i = 0; i < 2; i++) {
        rank.meetings[i] = pmesh_meeting_new(&op, i, false);
        assert(rank.meetings[i]);
    }
    trainer.came = exactly(MOST_CAME);
    rank.long_request = exactly(LONG_BYTES + 1);
    memset(rank.long_request, 'z', LONG_BYTES);
    rank.long_request[LONG_BYTES] = 0;
    rank.arena = exactly(WORDS * ITEM_BYTES);
    for (uint64_t i = 0; i < WORDS; i++) {
        pmesh_put(rank.arena + i * ITEM_BYTES, i, ITEM_BYTES);
    }
    for (uint32_t i = 0; i < SLOTS; i++) {
        rank.slots[i] = exactly(VALUES * ITEM_BYTES);
    }
}

// Do what Python does once a server serves no longer.
static void go_on(struct pmesh_persistent *calls) {
    static struct pmesh_ended_op ended[PMESH_LOGGED_OPS];
    const uint8_t choice = next_byte();
    if (calls->why == PMESH_BEGUN) {
        const int32_t state = calls->state;
        assert(calls->call < CALLS && calls->next < calls->limit);
        assert(state == PMESH_OVER || (state == PMESH_AWAITS && calls->call == 2));
        pmesh_stop(calls->runner);
        const int32_t status = pmesh_end(calls->runner);
        assert(status == (state == PMESH_OVER ? PMESH_DONE : PMESH_STOPPED));
        calls->slots[calls->slot].free_at = calls->next + 2;
    }
    if (calls->why == PMESH_BEGUN || choice & 1) {
        calls->next++;
    }
    if (choice & 2) {
        pmesh_take_ended(calls, ended);
    }
    if (choice & 4) { // it has been awake
        calls->trusted_until_us = UINT64_MAX;
    }
    if (choice & 8) {
        const uint32_t i = choice % SLOTS;
        calls->slots[i].lent = !calls->may_lend;
        rank.is_lent[i] = !calls->may_lend;
    }
    calls->unread_bytes = 0;
    trainer.came_bytes = trainer.followed = 0;
}

// The first two bytes say with which numbers it begins, and what keeps it from serving.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    struct pmesh_persistent *calls = &rank.calls;
    struct pmesh_server server = {.calls = calls, .wake = {-1, -1}};
    trainer.bytes = data;
    trainer.left = nbytes;
    trainer.recalled = &server.recalled;
    trainer.came_bytes = trainer.followed = 0;
    trainer.now_s = 0;
    trainer.is_stuck = false;
    set_up_once();
    const uint8_t numbers = next_byte();
    set_up(numbers, next_byte());
    while (trainer.left) {
        server.recalled = false;
        serve(&server);
        assert(calls->unread_bytes <= trainer.came_bytes);
        assert(!memcmp(calls->unread, trainer.came + trainer.came_bytes - calls->unread_bytes,
                       calls->unread_bytes));
        assert(calls->why != PMESH_RECALLED || server.recalled);
        assert((calls->why == PMESH_UNANSWERED) == trainer.is_stuck);
        follow();
        for (uint32_t i = 0; i < SLOTS; i++) {
            assert(rank.is_lent[i] == calls->slots[i].lent);
        }
        if (calls->why == PMESH_UNANSWERED) {
            break;
        }
        go_on(calls);
    }
    return 0;
}
