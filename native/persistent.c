// Answers the calls that a trainer repeats. Python has run each of them before, and has laid out
// its request, its plan and its replies; here a request is compared, byte for byte, and nothing in
// it is read. Whatever is not one of these requests goes to Python, as it came. So does an op that
// has begun and does not end soon: because a rank is late or calls something else, or a lane
// breaks.
#include "persistent.h"
#include "pipes.h"
#include "records.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL // macOS; Python ignores the signal in its processes
#define MSG_NOSIGNAL 0
#endif

#ifdef __APPLE__ // one clock runs while the machine sleeps, the other stops
enum { ELAPSED = CLOCK_MONOTONIC, AWAKE = CLOCK_UPTIME_RAW };
#else
enum { ELAPSED = CLOCK_BOOTTIME, AWAKE = CLOCK_MONOTONIC };
#endif

enum {
    PREFIX_BYTES = 4,
    NUMBER_BYTES = 9,
    LOOK_MS = 1, // while ranks are late, between two looks at whether it is recalled
    MESSAGE_BYTES = PMESH_UNREAD_BYTES,
};

struct pmesh_server {
    struct pmesh_persistent *calls;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool serves, closing;
    _Atomic bool recalled;
    _Atomic(struct pmesh_meeting *) at; // where it may wait
    int wake[2], stopped[2];            // pipes
};

static double seconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// V8: whether the event loop has looked recently for whether this machine has slept.
static bool is_trusted(const struct pmesh_persistent *calls) {
    return seconds(ELAPSED) * 1e6 <= (double)atomic_load(&calls->trusted_until_us);
}

// --- messages

// Write an integer as MessagePack does, in as few bytes as possible; return how many.
static uint32_t put_number(uint8_t *to, uint64_t number) {
    if (number < 0x80) {
        to[0] = (uint8_t)number;
        return 1;
    }
    const int size = number <= UINT8_MAX    ? 0
                     : number <= UINT16_MAX ? 1
                     : number <= UINT32_MAX ? 2
                                            : 3;
    to[0] = (uint8_t)(0xcc + size);
    pmesh_put(to + 1, number, 1 << size);
    return 1 + (1U << size);
}

// Write a whole message with its length in front into MESSAGE_BYTES; return how many bytes that
// takes, or 0 if there is no room.
static uint32_t put_message(uint8_t *to, const struct pmesh_message *message,
                            const uint64_t numbers[PMESH_MOST_PARTS - 1]) {
    uint32_t end = PREFIX_BYTES;
    for (uint32_t i = 0; i < message->count; i++) {
        if ((uint64_t)end + message->nbytes[i] + NUMBER_BYTES > MESSAGE_BYTES) {
            return 0;
        }
        memcpy(to + end, message->parts[i], message->nbytes[i]);
        end += message->nbytes[i];
        if (i + 1 < message->count) {
            end += put_number(to + end, numbers[i]);
        }
    }
    pmesh_put(to, end - PREFIX_BYTES, PREFIX_BYTES);
    return end;
}

enum matches { IS_WHOLE, IS_PART, IS_OTHER };

// What has come, as far as it was compared.
struct cursor {
    const uint8_t *at, *end;
};

static enum matches eat(struct cursor *cursor, const uint8_t *bytes, uint32_t nbytes) {
    const size_t there = (size_t)(cursor->end - cursor->at);
    if (memcmp(cursor->at, bytes, there < nbytes ? there : nbytes) != 0) {
        return IS_OTHER;
    }
    if (there < nbytes) {
        return IS_PART;
    }
    cursor->at += nbytes;
    return IS_WHOLE;
}

// Read a number as `put_number` writes it, of 63 bits at most.
static enum matches eat_number(struct cursor *cursor, uint64_t *number) {
    const size_t there = (size_t)(cursor->end - cursor->at);
    if (!there) {
        return IS_PART;
    }
    const uint8_t first = cursor->at[0];
    if (first >= 0x80 && (first < 0xcc || first > 0xcf)) {
        return IS_OTHER;
    }
    const int nbytes = first < 0x80 ? 0 : 1 << (first - 0xcc);
    if (there < (size_t)nbytes + 1) {
        return IS_PART;
    }
    *number = nbytes ? pmesh_get(cursor->at + 1, nbytes) : first;
    if (*number > INT64_MAX) { // Python refuses it, and so do other machines
        return IS_OTHER;
    }
    uint8_t shortest[NUMBER_BYTES];
    return eat(cursor, shortest, put_number(shortest, *number));
}

// Compare what has come with a message; read its numbers.
static enum matches compare(const struct pmesh_persistent *calls,
                            const struct pmesh_message *message,
                            uint64_t numbers[PMESH_MOST_PARTS - 1], uint32_t *nbytes) {
    struct cursor cursor = {calls->unread, calls->unread + calls->unread_bytes};
    if (calls->unread_bytes < PREFIX_BYTES) {
        return IS_PART;
    }
    cursor.at += PREFIX_BYTES;
    enum matches found = IS_WHOLE;
    for (uint32_t i = 0; found == IS_WHOLE && i < message->count; i++) {
        found = eat(&cursor, message->parts[i], message->nbytes[i]);
        if (found == IS_WHOLE && i + 1 < message->count) {
            found = eat_number(&cursor, &numbers[i]);
        }
    }
    *nbytes = (uint32_t)(cursor.at - calls->unread);
    const uint64_t says = PREFIX_BYTES + pmesh_get(calls->unread, PREFIX_BYTES);
    const bool is_over = found == IS_WHOLE ? says != *nbytes : says <= calls->unread_bytes;
    return is_over ? IS_OTHER : found;
}

// Whether the numbers of a request are what they may be.
static bool is_next(const struct pmesh_persistent *calls, const struct pmesh_call *call,
                    const uint64_t numbers[PMESH_MOST_PARTS - 1]) {
    if (numbers[0] != calls->next) {
        return false;
    }
    const uint64_t nbytes = call->op->region_bytes[PMESH_SOURCE], offset = numbers[1];
    return !call->says_place ||
           (nbytes <= call->arena_bytes && offset <= call->arena_bytes - nbytes &&
            offset % call->itemsize == 0);
}

// Whether what has come begins with the next request of a call. Notes which call that is, and where
// its values lie; `nbytes` becomes the length of the request.
static enum matches match(struct pmesh_persistent *calls, uint32_t *nbytes) {
    enum matches best = calls->unread_bytes ? IS_OTHER : IS_PART;
    for (uint32_t i = 0; calls->next < calls->limit && i < calls->call_count; i++) {
        struct pmesh_call *call = &calls->calls[i];
        uint64_t numbers[PMESH_MOST_PARTS - 1] = {0};
        const enum matches found = compare(calls, &call->request, numbers, nbytes);
        if (found == IS_WHOLE && is_next(calls, call, numbers)) {
            calls->call = i;
            calls->step = call->says_step ? numbers[call->request.count - 2] : 0;
            if (call->says_place) {
                call->source = call->arena + numbers[1];
            }
            return IS_WHOLE;
        }
        best = found == IS_PART ? IS_PART : best;
    }
    return best;
}

// Take bytes off what has come.
static void take(struct pmesh_persistent *calls, uint32_t nbytes) {
    calls->unread_bytes -= nbytes;
    memmove(calls->unread, calls->unread + nbytes, calls->unread_bytes);
}

// Take the news that arenas are lent no longer off what has come. Returns whether more of one may
// still be on its way.
static bool take_drops(struct pmesh_persistent *calls) {
    uint64_t numbers[PMESH_MOST_PARTS - 1];
    uint32_t nbytes;
    enum matches found;
    while ((found = compare(calls, &calls->drop, numbers, &nbytes)) == IS_WHOLE) {
        uint32_t i = 0;
        while (i < calls->slot_count &&
               !(calls->slots[i].lent && calls->slots[i].number == numbers[0])) {
            i++;
        }
        if (i == calls->slot_count) {
            return false;
        }
        calls->slots[i].lent = false;
        take(calls, nbytes);
    }
    return found == IS_PART;
}

// --- ops

static bool shares(const struct pmesh_call *call) {
    return call->meeting && pmesh_meeting_shares(call->meeting);
}

// Whether the result of the next op may lie in a slot.
static bool may_hold(const struct pmesh_slot *slot, const struct pmesh_persistent *calls,
                     const struct pmesh_call *call) {
    return slot->shared == shares(call) && !slot->lent && slot->free_at <= calls->next &&
           slot->nbytes >= call->op->region_bytes[PMESH_RESULT];
}

// Find memory for the result of the next op, that which was used last if several are free; return
// whether there is any.
static bool find_slot(struct pmesh_persistent *calls, const struct pmesh_call *call) {
    bool found = false;
    for (uint32_t i = 0; i < calls->slot_count; i++) {
        const struct pmesh_slot *slot = &calls->slots[i];
        if (may_hold(slot, calls, call) &&
            !(found && slot->free_at <= calls->slots[calls->slot].free_at)) {
            calls->slot = i;
            found = true;
        }
    }
    return found;
}

// Note which slots may have the shared result of the next op.
static void offer_slots(const struct pmesh_persistent *calls, const struct pmesh_call *call,
                        struct pmesh_part *part) {
    for (uint32_t i = 0; i < calls->slot_count && part->slot_count < PMESH_MOST_SLOTS; i++) {
        if (may_hold(&calls->slots[i], calls, call)) {
            part->slots[part->slot_count++] = calls->slots[i].memory;
        }
    }
}

// Note which slot has the result that is shared.
static void take_slot(struct pmesh_persistent *calls, const uint8_t *result) {
    for (uint32_t i = 0; i < calls->slot_count; i++) {
        if (calls->slots[i].memory == result) {
            calls->slot = i;
        }
    }
}

static double receiving_s(const struct pmesh_op *op) {
    double sum_s = 0;
    for (uint32_t t = 0; t < op->plan->receiving; t++) {
        sum_s += op->lanes[t]->paced_s;
    }
    return sum_s;
}

// Whether an op is not to be waited for any more.
static bool is_pressed(const struct pmesh_server *server) {
    const struct pmesh_meeting *at = server->at;
    return server->recalled || (at && pmesh_meeting_is_pressed(at));
}

// Let threads run an op that has begun; return PMESH_RUNS if they go on with it.
static int32_t run_in_threads(struct pmesh_server *server, double until_s) {
    struct pmesh_runner *runner = server->calls->runner;
    if (!pmesh_hand_over(runner)) {
        return PMESH_OVER;
    }
    struct pollfd polled[] = {{.fd = pmesh_runner_fd(runner), .events = POLLIN},
                              {.fd = server->wake[0], .events = POLLIN}};
    double left_s = until_s - seconds(AWAKE);
    while (!server->recalled && left_s > 0) {
        poll(polled, 2, (int)(1000 * left_s) + 1);
        if (polled[0].revents) {
            return PMESH_OVER;
        }
        left_s = until_s - seconds(AWAKE);
    }
    return PMESH_RUNS;
}

// Run an op until it has ended, or something else is to be done; return its `enum pmesh_state`.
// While others of this agent wait for it, that is looked for each millisecond.
static int32_t run(struct pmesh_server *server, struct pmesh_op *op, double until_s) {
    struct pmesh_runner *runner = server->calls->runner;
    int32_t state = pmesh_begin(runner, op);
    if (state == PMESH_BUSY && op->plan->two_threads && !server->at) {
        return run_in_threads(server, until_s);
    }
    while (state != PMESH_OVER && !is_pressed(server) && seconds(AWAKE) < until_s) {
        if (state == PMESH_BUSY) { // more can be done at once, or a socket is full
            state = pmesh_advance(runner);
        }
        if (state != PMESH_OVER) {
            const int32_t after = pmesh_wait(runner, LOOK_MS);
            // It also says PMESH_AWAITS if a socket is still full.
            state = state == PMESH_BUSY && after == PMESH_AWAITS ? PMESH_BUSY : after;
        }
    }
    return state;
}

static bool send_message(const struct pmesh_persistent *calls, const struct pmesh_message *message,
                         uint64_t number) {
    uint8_t bytes[MESSAGE_BYTES];
    const uint64_t numbers[PMESH_MOST_PARTS - 1] = {number, calls->slots[calls->slot].number};
    const uint32_t nbytes = put_message(bytes, message, numbers);
    ssize_t sent = -1;
    do {
        sent = send(calls->session, bytes, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return nbytes && sent == (ssize_t)nbytes;
}

static bool lends(const struct pmesh_persistent *calls, const struct pmesh_call *call) {
    return calls->may_lend && call->lending.count;
}

// Whether the op of the request that has come may begin here, and has memory for its result.
static bool may_begin(struct pmesh_persistent *calls, const struct pmesh_call *call) {
    if (atomic_load(&calls->ended) - atomic_load(&calls->noted) >= PMESH_LOGGED_OPS ||
        !is_trusted(calls)) {
        return false;
    }
    uint32_t own = 0;
    for (uint32_t i = 0; i < calls->slot_count; i++) {
        own += calls->slots[i].shared == shares(call) && !calls->slots[i].lent;
    }
    return call->reply.count < PMESH_PARTS ||
           (own > (lends(calls, call) ? PMESH_OWN_SLOTS : 0) && find_slot(calls, call));
}

// Note that the op has ended, and answer.
static bool end(struct pmesh_persistent *calls, struct pmesh_ended_op ended) {
    const struct pmesh_call *call = &calls->calls[ended.call];
    const uint64_t count = atomic_load(&calls->ended);
    const bool is_lent = lends(calls, call);
    if (call->reply.count == PMESH_PARTS) {
        // The op after the next one proves that all ranks have ended this one, and its request
        // that the trainer has read the result.
        calls->slots[ended.slot].free_at = ended.number + 2;
        calls->slots[ended.slot].lent = is_lent;
    }
    ended.ended_s = seconds(AWAKE);
    calls->log[count % PMESH_LOGGED_OPS] = ended;
    calls->next = ended.number + 1;
    atomic_store(&calls->ended, count + 1);
    calls->why = PMESH_UNANSWERED;
    return send_message(calls, is_lent ? &call->lending : &call->reply, ended.number);
}

// Run an op over its lanes; return whether it has ended well.
static bool run_well(struct pmesh_server *server, struct pmesh_op *op) {
    struct pmesh_persistent *calls = server->calls;
    calls->state = run(server, op, seconds(AWAKE) + calls->most_wait_s);
    if (calls->state == PMESH_OVER && pmesh_end(calls->runner) == PMESH_DONE && is_trusted(calls)) {
        return true;
    }
    calls->why = PMESH_BEGUN;
    return false;
}

static bool may_end(void *of) {
    const struct pmesh_server *server = of;
    return is_trusted(server->calls);
}

// Do the op with ranks elsewhere, as one for all ranks here.
static const uint8_t *exchange(void *of) {
    struct pmesh_server *server = of;
    struct pmesh_op *op = server->calls->calls[server->calls->call].op;
    return run_well(server, op) ? op->regions[PMESH_RESULT] : NULL;
}

// Do an op with the other ranks of this agent; return whether it has ended for all of them.
static bool do_together(struct pmesh_server *server, const struct pmesh_call *call) {
    const struct pmesh_op *op = call->op;
    const uint64_t source_bytes = op->region_bytes[PMESH_SOURCE];
    const uint64_t result_bytes = op->region_bytes[PMESH_RESULT];
    struct pmesh_part part = {.rank = call->rank,
                              .number = op->number,
                              .source = call->source,
                              .result = call->folded ? call->folded : op->regions[PMESH_RESULT],
                              .source_bytes = source_bytes,
                              .result_bytes = call->folded ? source_bytes : result_bytes,
                              .recalled = &server->recalled,
                              .may_end = may_end,
                              .exchange = call->folded ? exchange : NULL,
                              .exchanged_bytes = result_bytes,
                              .of = server};
    if (shares(call)) {
        offer_slots(server->calls, call, &part);
    }
    server->at = call->meeting; // before it looks whether it is recalled
    const bool done = pmesh_meet(call->meeting, &part);
    server->at = NULL;
    if (done && shares(call)) {
        take_slot(server->calls, part.result);
    }
    return done;
}

// Run the op of the request that has come, and answer; return false if Python goes on.
static bool answer(struct pmesh_server *server, uint32_t request_bytes) {
    struct pmesh_persistent *calls = server->calls;
    const struct pmesh_call *call = &calls->calls[calls->call];
    struct pmesh_op *op = call->op;
    calls->why = PMESH_OTHER;
    if (!may_begin(calls, call)) {
        return false;
    }
    op->number = calls->next;
    op->completed = (int64_t)calls->next - 1;
    op->regions[PMESH_SOURCE] = call->folded ? call->folded : call->source;
    if (call->reply.count == PMESH_PARTS) {
        op->regions[PMESH_RESULT] = calls->slots[calls->slot].memory;
    }
    struct pmesh_ended_op ended = {.began_s = seconds(AWAKE),
                                   .receiving_s = -receiving_s(op),
                                   .number = calls->next,
                                   .step = calls->step,
                                   .call = calls->call};
    if (call->meeting ? !do_together(server, call) : !run_well(server, op)) {
        return false;
    }
    ended.slot = calls->slot;
    ended.receiving_s += receiving_s(op);
    take(calls, request_bytes);
    return end(calls, ended);
}

// --- the thread

// Read what is there; return false at the connection's end, or if there is no room for more.
static bool read_more(struct pmesh_persistent *calls) {
    const uint32_t room = PMESH_UNREAD_BYTES - calls->unread_bytes;
    const ssize_t count =
        recv(calls->session, calls->unread + calls->unread_bytes, room, MSG_DONTWAIT);
    if (count < 0) {
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    }
    calls->unread_bytes += (uint32_t)count;
    return count > 0;
}

static void serve(struct pmesh_server *server) {
    struct pmesh_persistent *calls = server->calls;
    while (true) {
        calls->why = PMESH_RECALLED;
        if (server->recalled) {
            return;
        }
        const bool may_drop = take_drops(calls);
        uint32_t nbytes = 0;
        const enum matches found = match(calls, &nbytes);
        if (found == IS_WHOLE) {
            if (!answer(server, nbytes)) {
                return;
            }
            continue;
        }
        if (found == IS_OTHER && !may_drop) {
            calls->why = PMESH_OTHER;
            return;
        }
        struct pollfd polled[] = {{.fd = server->wake[0], .events = POLLIN},
                                  {.fd = calls->session, .events = POLLIN}};
        poll(polled, 2, -1);
        if (polled[1].revents && !read_more(calls)) {
            calls->why = PMESH_OTHER;
            return;
        }
    }
}

static void *work(void *argument) {
    struct pmesh_server *server = argument;
    pthread_mutex_lock(&server->lock);
    while (!server->closing) {
        if (!server->serves) {
            pthread_cond_wait(&server->changed, &server->lock);
            continue;
        }
        pthread_mutex_unlock(&server->lock);
        serve(server);
        pthread_mutex_lock(&server->lock);
        server->serves = false;
        pmesh_signal(server->stopped);
        pthread_cond_broadcast(&server->changed);
    }
    pthread_mutex_unlock(&server->lock);
    return NULL;
}

// --- what Python calls

static void release(struct pmesh_server *server) {
    pmesh_close_pipe(server->wake);
    pmesh_close_pipe(server->stopped);
    pthread_cond_destroy(&server->changed);
    pthread_mutex_destroy(&server->lock);
    free(server);
}

struct pmesh_server *pmesh_server_new(struct pmesh_persistent *calls) {
    struct pmesh_server *server = calloc(1, sizeof *server);
    if (!server) {
        return NULL;
    }
    server->calls = calls;
    pthread_mutex_init(&server->lock, NULL);
    pthread_cond_init(&server->changed, NULL);
    bool works = pmesh_open_pipe(server->wake);
    works &= pmesh_open_pipe(server->stopped);
    if (!works || pthread_create(&server->thread, NULL, work, server)) {
        release(server);
        return NULL;
    }
    return server;
}

void pmesh_server_free(struct pmesh_server *server) {
    pmesh_recall(server);
    pthread_mutex_lock(&server->lock);
    server->closing = true;
    pthread_cond_broadcast(&server->changed);
    pthread_mutex_unlock(&server->lock);
    pthread_join(server->thread, NULL);
    release(server);
}

int pmesh_server_fd(const struct pmesh_server *server) {
    return server->stopped[0];
}

void pmesh_serve(struct pmesh_server *server) {
    pmesh_drain(server->wake);
    pmesh_drain(server->stopped);
    pthread_mutex_lock(&server->lock);
    server->serves = true;
    pthread_cond_broadcast(&server->changed);
    pthread_mutex_unlock(&server->lock);
}

void pmesh_recall(struct pmesh_server *server) {
    server->recalled = true;
    pmesh_signal(server->wake);
    struct pmesh_meeting *at = server->at;
    if (at) {
        pmesh_meeting_wake(at);
    }
    pthread_mutex_lock(&server->lock);
    while (server->serves) {
        pthread_cond_wait(&server->changed, &server->lock);
    }
    pthread_mutex_unlock(&server->lock);
    server->recalled = false;
}

uint64_t pmesh_take_ended(struct pmesh_persistent *calls, struct pmesh_ended_op *into) {
    const uint64_t noted = atomic_load(&calls->noted), ended = atomic_load(&calls->ended);
    for (uint64_t i = noted; i < ended; i++) {
        into[i - noted] = calls->log[i % PMESH_LOGGED_OPS];
    }
    atomic_store(&calls->noted, ended);
    return ended - noted;
}

const uint32_t *pmesh_persistent_layout(void) {
    static const uint32_t layout[] = {
        sizeof(struct pmesh_message),
        sizeof(struct pmesh_call),
        sizeof(struct pmesh_slot),
        sizeof(struct pmesh_ended_op),
        sizeof(struct pmesh_persistent),
        offsetof(struct pmesh_persistent, runner),
        offsetof(struct pmesh_persistent, log),
        offsetof(struct pmesh_persistent, unread),
        PMESH_MOST_CALLS,
        PMESH_MOST_SLOTS,
        PMESH_OWN_SLOTS,
        PMESH_LOGGED_OPS,
        PMESH_MOST_PARTS,
    };
    return layout;
}
