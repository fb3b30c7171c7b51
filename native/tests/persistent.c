// Ranks in one process whose trainers repeat calls. Each has its server, a trainer in a thread, and
// a thread that does what Python does: it lets the server serve, recalls it at any moment, and goes
// on with whatever the server leaves. The trainers know all values, and look at each result for as
// long as they may. Now and then a rank stops its op: then all of them do, those that lack the last
// result take it from one that has it, and they go on with a higher roster. With some seeds the
// servers meet in each call, as those of one agent; Python then still uses lanes.
//
// Run: persistent [FIRST_SEED [COUNT]]
#include "toy.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

// --- a system that has no room after so many more calls (-1: never), and counts what was read

enum { MOST_DESCRIPTORS = 1024 };
static int threads_left = -1, pipes_left = -1;
static _Atomic uint64_t read_bytes[MOST_DESCRIPTORS];
static _Atomic uint64_t wasted_polls; // while a server serves: it has nothing to read, nor to stop

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

static ssize_t counted_recv(int fd, void *to, size_t nbytes, int flags) {
    const ssize_t count = recv(fd, to, nbytes, flags);
    read_bytes[fd] += count > 0 ? (uint64_t)count : 0;
    return count;
}

static int counted_poll(struct pollfd *polled, nfds_t count, int timeout) {
    const int ready = poll(polled, count, timeout);
    wasted_polls += ready > 0 && !polled[count - 1].revents;
    return ready;
}

#define pthread_create scarce_create
#define pipe scarce_pipe
#define recv counted_recv
#define poll counted_poll
#include "../persistent.c"
#undef pthread_create
#undef pipe
#undef recv
#undef poll

enum {
    MOST_RANKS = 3,
    MOST_LANES = 2 * (MOST_RANKS - 1),
    CALLS = 5,
    FIXED = 4,          // the call whose values lie always in the same place
    PIECE_BYTES = 8192, // of a record
    MOST_PIECES = 16,
    ARENA_BYTES = 1024 * 1024,    // offsets of up to five bytes
    OPS = 60,                     // of a seed
    SLOTS = 2 * PMESH_MOST_SLOTS, // of a rank; the second half is shared
    FIRST_SLOT = 126,             // numbers of arenas: of one byte, and of two
    STREAM_BYTES = 16384,         // more than a trainer says in a seed
    RECALLS = 200,
    HANGS_MS = 60 * 1000,
    HANGS_S = 120, // of a seed; the program then ends by SIGALRM
    MOST_WAIT_MS = 100,
    LATE_MS = MOST_WAIT_MS + 20,
};

struct world;

struct rank {
    struct world *world;
    uint32_t index;
    struct random random; // of the thread that is Python
    struct pmesh_persistent *calls;
    struct pmesh_server *server;
    struct pmesh_op ops[CALLS];
    struct pmesh_plan plans[CALLS];
    struct pmesh_record records[CALLS][MOST_LANES * MOST_PIECES];
    struct pmesh_need needs[MOST_PIECES];
    struct pmesh_track tracks[CALLS][MOST_LANES];
    struct pmesh_copy copies[CALLS];
    struct pmesh_lane in[MOST_RANKS], out[MOST_RANKS], *lanes[MOST_LANES]; // [there]
    uint8_t *arena, *scratch, *slots[SLOTS], *own[2];                      // `own`: of Python alone
    int session, trainer;                                                  // the two ends

    // What Python knows:
    uint64_t roster, ended;  // the number of the last op
    const uint8_t *result;   // of that op, which others may ask for
    uint64_t used_by[SLOTS]; // the last op that wrote there
    bool is_lent[SLOTS];     // as the messages say
    uint64_t followed;       // bytes of the stream that were answered
    struct pmesh_ended_op log[PMESH_LOGGED_OPS];
    uint64_t logged;
    uint8_t unread[PMESH_UNREAD_BYTES];
    uint32_t unread_bytes;

    // What the trainer knows:
    struct random whims;
    uint8_t stream[STREAM_BYTES]; // all that it says
    uint64_t said, sent;
    uint64_t done;             // the last op with a reply
    const uint8_t *results[2]; // of the last two ops, unless they are kept
    uint64_t keeps[SLOTS];     // the op whose result it keeps there, or 0
    uint64_t at[2];            // where its values lie
};

struct world {
    uint64_t seed, first, last; // ops
    uint32_t size;
    uint64_t counts[CALLS]; // values
    struct rank ranks[MOST_RANKS];
    struct pmesh_place places[2 * MOST_RANKS]; // where the ranks meet
    struct pmesh_fold folds[CALLS];
    uint8_t *shared[PMESH_MOST_SLOTS];
    _Atomic uint64_t roster; // higher than a rank's own once it is to stop
    _Atomic int stops_left;
    _Atomic uint32_t done; // ranks
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t met;
    uint64_t meetings;
    _Atomic uint64_t begun, served, lent, together; // counts
};

static const char *const REQUESTS[CALLS][PMESH_PARTS] = {
    {"op ", " meets in step ", ""}, {"op ", " sums from ", ""},      {"op ", " sums from ", " on"},
    {"op ", " sums from ", "."},    {"op ", " sums the same", NULL},
};
static const char *const DONE[] = {"done ", " in ", ""}, *const LENT[] = {"done ", " in ", " lent"};
static const char *const MET[] = {"done ", ".", NULL}, *const DROP[] = {"drop ", "", NULL};

static uint32_t call_of(const struct world *world, uint64_t op) {
    return (uint32_t)(mixed(world->seed + op) % CALLS);
}

static uint32_t value_of(const struct world *world, uint64_t op, uint32_t rank, uint64_t i) {
    const uint64_t which = call_of(world, op) == FIXED ? 0 : op;
    return (uint32_t)mixed(world->seed + mixed(which * MOST_RANKS + rank) + i);
}

// Whether memory has the result of an op.
static void check_result(const struct world *world, uint64_t op, const uint8_t *result) {
    const uint64_t count = world->counts[call_of(world, op)];
    for (uint64_t i = 0; i < count; i++) {
        uint32_t sum = 0, found;
        for (uint32_t r = 0; r < world->size; r++) {
            sum += value_of(world, op, r, i);
        }
        memcpy(&found, result + 4 * i, 4);
        assert(found == sum);
    }
}

// --- messages

static struct pmesh_message laid_out(const char *const parts[]) {
    struct pmesh_message message = {0};
    for (; message.count < PMESH_PARTS && parts[message.count]; message.count++) {
        message.parts[message.count] = (const uint8_t *)parts[message.count];
        message.nbytes[message.count] = (uint32_t)strlen(parts[message.count]);
    }
    return message;
}

static uint8_t *say_bytes(uint8_t *to, uint64_t value, int nbytes) {
    for (int i = 0; i < nbytes; i++) {
        to[i] = (uint8_t)(value >> 8 * (nbytes - 1 - i));
    }
    return to + nbytes;
}

// As MessagePack has it: 0 to 127, or a byte that says how many follow.
static uint8_t *say_number(uint8_t *to, uint64_t number) {
    if (number < 128) {
        return say_bytes(to, number, 1);
    }
    if (number < 256) {
        return say_bytes(to, 0xcc00 + number, 2);
    }
    if (number < 65536) {
        return say_bytes(to, 0xcd0000 + number, 3);
    }
    return number >> 32 ? say_bytes(say_bytes(to, 0xcf, 1), number, 8)
                        : say_bytes(say_bytes(to, 0xce, 1), number, 4);
}

// Write a message with its length; return the latter.
static uint32_t say(uint8_t *to, const char *const parts[], uint64_t number, uint64_t other) {
    uint8_t *at = to + 4;
    for (int i = 0; i < PMESH_PARTS && parts[i]; i++) {
        at = i ? say_number(at, i == 1 ? number : other) : at;
        memcpy(at, parts[i], strlen(parts[i]));
        at += strlen(parts[i]);
    }
    say_bytes(to, (uint64_t)(at - to) - 4, 4);
    return (uint32_t)(at - to);
}

// How long the message at the head is with its length; 0 if it is not whole.
static uint32_t whole_message(const uint8_t *bytes, uint64_t nbytes) {
    const uint64_t length = nbytes < 4 ? 0 : 4 + pmesh_get(bytes, 4);
    return length <= nbytes ? (uint32_t)length : 0;
}

static uint64_t number_in(const uint8_t *at) {
    return at[0] < 128 ? at[0] : pmesh_get(at + 1, 1 << (at[0] - 0xcc));
}

// --- ranks

static void connect_ranks(struct world *world, uint32_t a, uint32_t b, struct random *random) {
    static const uint8_t KEY[PMESH_KEY_BYTES] = "sixteen bytes ..";
    const int narrow = 4096;
    int ends[2];
    const int failed = socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    assert(!failed);
    for (int i = 0; i < 2; i++) {
        fcntl(ends[i], F_SETFL, O_NONBLOCK);
    }
    if (below(random, 2)) {
        setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &narrow, sizeof narrow);
    }
    world->ranks[a].out[b] = new_lane(ends[0], KEY);
    world->ranks[b].in[a] = new_lane(ends[1], KEY);
}

// Each rank sends all of its values to each other one, in records of PIECE_BYTES. What comes from
// the first is added to its own values, and then what comes from the second.
static void plan_sum(struct rank *rank, uint32_t call) {
    struct pmesh_plan *plan = &rank->plans[call];
    struct pmesh_record *record = rank->records[call];
    const uint64_t nbytes = 4 * rank->world->counts[call];
    const uint32_t peers = rank->world->size - 1;
    const uint32_t pieces = nbytes ? (uint32_t)((nbytes + PIECE_BYTES - 1) / PIECE_BYTES) : 1;
    for (uint32_t t = 0; t < 2 * peers; t++) {
        rank->tracks[call][t] = (struct pmesh_track){t * pieces, (t + 1) * pieces};
        for (uint64_t at = 0, i = 0; i < pieces; i++, at += PIECE_BYTES, record++) {
            const uint64_t left = nbytes - at;
            *record = (struct pmesh_record){
                .offset = at, .nbytes = left < PIECE_BYTES ? left : PIECE_BYTES, .other = at};
            if (t < peers && nbytes) {
                record->region = t ? PMESH_SCRATCH : PMESH_RESULT;
                record->then = t ? PMESH_ADD_TO_RESULT : PMESH_ADD_SOURCE;
                record->finishes = t == peers - 1;
                record->need_begin = t ? (uint32_t)i : 0;
                record->need_end = t ? (uint32_t)i + 1 : 0;
            } else if (t < peers) {
                record->region = PMESH_RESULT;
            }
        }
    }
    rank->copies[call] = (struct pmesh_copy){.nbytes = nbytes};
    *plan = (struct pmesh_plan){.records = rank->records[call],
                                .needs = rank->needs,
                                .copies = &rank->copies[call],
                                .tracks = rank->tracks[call],
                                .record_count = 2 * peers * pieces,
                                .need_count = peers > 1 ? MOST_PIECES : 0,
                                .copy_count = !peers,
                                .receiving = peers,
                                .sending = peers,
                                .size = peers + 1,
                                .two_threads = call == 3};
}

static void add_call(struct rank *rank, uint32_t i) {
    const uint64_t nbytes = 4 * rank->world->counts[i];
    struct pmesh_call *call = &rank->calls->calls[i];
    plan_sum(rank, i);
    rank->ops[i] = (struct pmesh_op){
        .plan = &rank->plans[i],
        .lanes = rank->lanes,
        .regions = {rank->arena + ARENA_BYTES, rank->own[0], rank->scratch},
        .region_bytes = {nbytes, nbytes, nbytes},
        .seal = (pmesh_function)toy_seal,
        .open = (pmesh_function)toy_open,
        .roster = 1,
        .fingerprint = i,
        .dtype = PMESH_INT32,
        .reduction = PMESH_SUM,
    };
    *call = (struct pmesh_call){.op = &rank->ops[i],
                                .request = laid_out(REQUESTS[i]),
                                .reply = laid_out(nbytes ? DONE : MET),
                                .source = rank->arena + ARENA_BYTES,
                                .arena = rank->arena,
                                .arena_bytes = ARENA_BYTES,
                                .itemsize = 4,
                                .says_step = i == 0};
    call->says_place = call->request.count == PMESH_PARTS && i > 0;
    if (i == 2 || i == 3) {
        call->lending = laid_out(LENT);
    }
}

static void new_rank(struct world *world, uint32_t r) {
    struct rank *rank = &world->ranks[r];
    int ends[2];
    const int failed = socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
    assert(!failed && ends[0] < MOST_DESCRIPTORS);
    rank->session = ends[0];
    rank->trainer = ends[1];
    read_bytes[ends[0]] = 0;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    rank->world = world;
    rank->index = r;
    rank->roster = 1;
    rank->ended = rank->done = world->first - 1;
    rank->random.state = mixed(world->seed + 2 * r);
    rank->whims.state = mixed(world->seed + 2 * r + 1);
    for (uint32_t i = 0; i < MOST_PIECES; i++) {
        rank->needs[i] = (struct pmesh_need){.track = 0, .number = i + 1};
    }
    for (uint32_t p = 0, peer = 0; p + 1 < world->size; p++, peer++) {
        peer += peer == r;
        rank->lanes[p] = &rank->in[peer];
        rank->lanes[world->size - 1 + p] = &rank->out[peer];
    }
    // The values of call FIXED lie behind the arena's end.
    rank->arena = exactly(ARENA_BYTES + 4 * world->counts[FIXED]);
    for (uint64_t i = 0; i < world->counts[FIXED]; i++) {
        const uint32_t value = (uint32_t)mixed(world->seed + mixed(r) + i);
        memcpy(rank->arena + ARENA_BYTES + 4 * i, &value, 4);
    }
    rank->scratch = exactly(MOST_PIECES * PIECE_BYTES);
    rank->own[0] = exactly(MOST_PIECES * PIECE_BYTES);
    rank->own[1] = exactly(MOST_PIECES * PIECE_BYTES);
    rank->calls = calloc(1, sizeof *rank->calls);
    assert(rank->calls);
    rank->calls->drop = laid_out(DROP);
    rank->calls->runner = pmesh_runner_new();
    rank->calls->session = rank->session;
    rank->calls->call_count = CALLS;
    rank->calls->slot_count = SLOTS;
    rank->calls->limit = rank->calls->trusted_until_us = UINT64_MAX;
    rank->calls->most_wait_s = 1e-3 * MOST_WAIT_MS;
    for (uint32_t i = 0; i < SLOTS; i++) {
        rank->slots[i] = i < PMESH_MOST_SLOTS ? exactly(MOST_PIECES * PIECE_BYTES)
                                              : world->shared[i - PMESH_MOST_SLOTS];
        rank->calls->slots[i] = (struct pmesh_slot){.memory = rank->slots[i],
                                                    .nbytes = MOST_PIECES * PIECE_BYTES,
                                                    .number = FIRST_SLOT + i,
                                                    .shared = i >= PMESH_MOST_SLOTS};
    }
    for (uint32_t i = 0; i < CALLS; i++) {
        add_call(rank, i);
    }
    rank->calls->next = world->first;
    rank->server = pmesh_server_new(rank->calls);
    assert(rank->calls->runner && rank->server);
}

static struct world *new_world(uint64_t seed, uint32_t size) {
    static const uint64_t FIRST[] = {1, 100, 230, 65500, 4294967270};
    struct world *world = calloc(1, sizeof *world);
    assert(world);
    struct random random = {mixed(seed)};
    world->seed = seed;
    world->size = size;
    world->roster = 1;
    world->first = FIRST[below(&random, 5)];
    world->last = world->first + OPS - 1;
    pthread_mutex_init(&world->lock, NULL);
    pthread_cond_init(&world->changed, NULL);
    for (uint32_t i = 1; i < CALLS; i++) { // the first one has none
        const uint64_t most = below(&random, 3) ? 300 : MOST_PIECES * PIECE_BYTES / 4;
        world->counts[i] = 1 + below(&random, most);
    }
    for (uint32_t a = 0; a < size; a++) {
        for (uint32_t b = 0; b < size; b++) {
            if (a != b) {
                connect_ranks(world, a, b, &random);
            }
        }
    }
    for (uint32_t i = 0; i < PMESH_MOST_SLOTS; i++) {
        world->shared[i] = exactly(MOST_PIECES * PIECE_BYTES);
    }
    for (uint32_t r = 0; r < size; r++) {
        new_rank(world, r);
    }
    return world;
}

static void let_ranks_meet(struct world *world) {
    const uint32_t size = world->size;
    for (uint32_t i = 0; i < 2 * size; i++) {
        world->places[i].rank = i % size;
    }
    for (uint32_t i = 0; i < CALLS; i++) {
        const bool shares = world->counts[i] && mixed(world->seed + i) % 2;
        const uint32_t end = shares ? size + 1 : 2 * size; // only rank 0 is given it
        world->folds[i] = (struct pmesh_fold){4 * world->counts[i], 0, size, size, end};
        const struct pmesh_combining op = {.folds = &world->folds[i],
                                           .places = world->places,
                                           .fold_count = world->counts[i] ? 1 : 0,
                                           .place_count = 2 * size,
                                           .ranks = size,
                                           .dtype = PMESH_INT32,
                                           .reduction = PMESH_SUM};
        struct pmesh_meeting *meeting = pmesh_meeting_new(&op, shares, false);
        assert(meeting);
        for (uint32_t r = 0; r < size; r++) {
            world->ranks[r].calls->calls[i].meeting = meeting;
            world->ranks[r].calls->calls[i].rank = r;
        }
    }
}

static void free_world(struct world *world) {
    for (uint32_t i = 0; i < CALLS; i++) {
        struct pmesh_meeting *meeting = world->ranks[0].calls->calls[i].meeting;
        if (meeting) { // no server is there
            pmesh_meeting_free(meeting);
        }
    }
    for (uint32_t r = 0; r < world->size; r++) {
        struct rank *rank = &world->ranks[r];
        pmesh_server_free(rank->server);
        pmesh_runner_free(rank->calls->runner);
        for (uint32_t t = 0; t < 2 * (world->size - 1); t++) {
            close(rank->lanes[t]->fd);
            free(rank->lanes[t]->in);
            free(rank->lanes[t]->out);
        }
        for (uint32_t i = 0; i < PMESH_MOST_SLOTS; i++) {
            free(rank->slots[i]);
        }
        close(rank->session);
        close(rank->trainer);
        free(rank->arena);
        free(rank->scratch);
        free(rank->own[0]);
        free(rank->own[1]);
        free(rank->calls);
    }
    for (uint32_t i = 0; i < PMESH_MOST_SLOTS; i++) {
        free(world->shared[i]);
    }
    pthread_cond_destroy(&world->changed);
    pthread_mutex_destroy(&world->lock);
    free(world);
}

// --- the trainers

static void send_all(int fd, const uint8_t *bytes, uint64_t nbytes) {
    for (uint64_t sent = 0; sent < nbytes;) {
        const ssize_t count = send(fd, bytes + sent, nbytes - sent, MSG_NOSIGNAL);
        assert(count > 0);
        sent += (uint64_t)count;
    }
}

// Send what was said, in any pieces.
static void send_said(struct rank *rank) {
    while (rank->sent < rank->said) {
        const uint64_t left = rank->said - rank->sent;
        const uint64_t piece = below(&rank->whims, 2) ? left : 1 + below(&rank->whims, left);
        send_all(rank->trainer, rank->stream + rank->sent, piece);
        rank->sent += piece;
        if (piece < left && below(&rank->whims, 2)) {
            poll(NULL, 0, 1);
        }
    }
}

static void say_next(struct rank *rank, const char *const parts[], uint64_t number,
                     uint64_t other) {
    assert(rank->said + 64 < STREAM_BYTES);
    rank->said += say(rank->stream + rank->said, parts, number, other);
}

static uint64_t step_of(uint64_t op) {
    return mixed(op) >> (op % 64);
}

// Of the last two ops, each may have its values in one half of the arena.
static void request(struct rank *rank, uint64_t op) {
    const struct world *world = rank->world;
    const uint32_t call = call_of(world, op);
    const uint64_t count = world->counts[call], half = ARENA_BYTES / 4 / 2;
    const uint64_t at =
        4 * (op % 2 * half + (below(&rank->whims, 4) ? below(&rank->whims, half - count)
                              : op % 2               ? half - count
                                                     : 0));
    for (uint64_t i = 0; call != FIXED && i < count; i++) {
        const uint32_t value = value_of(world, op, rank->index, i);
        memcpy(rank->arena + at + 4 * i, &value, 4);
    }
    say_next(rank, REQUESTS[call], op, call ? at : step_of(op));
}

static void read_all(int fd, uint8_t *to, uint64_t nbytes) {
    for (uint64_t got = 0; got < nbytes;) {
        struct pollfd readable = {.fd = fd, .events = POLLIN};
        const int ready = poll(&readable, 1, HANGS_MS);
        assert(ready == 1);
        const ssize_t count = recv(fd, to + got, nbytes - got, 0);
        assert(count > 0);
        got += (uint64_t)count;
    }
}

// The next reply is that of the next op, whose values are right.
static void read_reply(struct rank *rank) {
    const struct world *world = rank->world;
    const uint64_t op = ++rank->done;
    const uint32_t call = call_of(world, op);
    uint8_t reply[64], expected[64];
    read_all(rank->trainer, reply, 4);
    const uint32_t nbytes = 4 + (uint32_t)pmesh_get(reply, 4);
    assert(nbytes <= sizeof reply);
    read_all(rank->trainer, reply + 4, nbytes - 4);
    rank->results[op % 2] = NULL;
    if (!world->counts[call]) {
        assert(nbytes == say(expected, MET, op, 0) && !memcmp(reply, expected, nbytes));
        return;
    }
    for (uint64_t slot = 0; slot < SLOTS + 2; slot++) {
        const uint8_t *memory = slot < SLOTS ? rank->slots[slot] : rank->own[slot - SLOTS];
        if (nbytes == say(expected, DONE, op, FIRST_SLOT + slot) &&
            !memcmp(reply, expected, nbytes)) {
            check_result(world, op, memory);
            rank->results[op % 2] = memory;
            return;
        }
        if (slot < SLOTS && nbytes == say(expected, LENT, op, FIRST_SLOT + slot) &&
            !memcmp(reply, expected, nbytes)) {
            assert((call == 2 || call == 3) && !rank->keeps[slot]);
            check_result(world, op, memory);
            rank->keeps[slot] = op;
            return;
        }
    }
    assert(!"a reply that is none");
}

static void drop_some(struct rank *rank) {
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        if (rank->keeps[slot] && below(&rank->whims, 4) == 0) {
            check_result(rank->world, rank->keeps[slot], rank->slots[slot]);
            rank->keeps[slot] = 0;
            say_next(rank, DROP, FIRST_SLOT + slot, 0);
        }
    }
}

// The request of an op says that the trainer needs the result of the one before the last no more.
static void *train(void *argument) {
    struct rank *rank = argument;
    const struct world *world = rank->world;
    for (uint64_t op = world->first; op <= world->last; op++) {
        while (rank->done + 2 < op) {
            send_said(rank);
            read_reply(rank);
        }
        if (rank->results[op % 2]) {
            check_result(world, op - 2, rank->results[op % 2]);
        }
        if (below(&rank->whims, 30) == 0) {
            poll(NULL, 0, below(&rank->whims, 3) ? 3 : LATE_MS);
        }
        drop_some(rank);
        request(rank, op);
        drop_some(rank);
        if (below(&rank->whims, 3) || op == world->last) {
            send_said(rank);
            while (rank->done < op && below(&rank->whims, 3)) {
                read_reply(rank);
            }
        }
    }
    while (rank->done < world->last) {
        read_reply(rank);
    }
    // A part of a request is the last that it says.
    rank->said += below(&rank->whims, say(rank->stream + rank->said, REQUESTS[1], rank->done, 0));
    send_said(rank);
    shutdown(rank->trainer, SHUT_WR);
    return NULL;
}

// --- what Python does

// Whether some rank has stopped its op, so that this one must, too.
static bool must_stop(const struct rank *rank) {
    return rank->world->roster != rank->roster;
}

static uint64_t result_bytes(const struct rank *rank, uint64_t op) {
    return 4 * rank->world->counts[call_of(rank->world, op)];
}

// Note that an op has ended, with its result in a slot or elsewhere.
static void note_end(struct rank *rank, uint64_t op, uint32_t slot, const uint8_t *result) {
    assert(op == rank->ended + 1 && op <= rank->world->last);
    rank->ended = op;
    rank->result = result;
    if (result_bytes(rank, op) && slot < SLOTS) {
        assert(!rank->is_lent[slot] && (!rank->used_by[slot] || rank->used_by[slot] + 2 <= op));
        rank->used_by[slot] = op;
    }
}

static void drop(struct rank *rank, uint64_t number) {
    assert(number >= FIRST_SLOT && number < FIRST_SLOT + SLOTS);
    assert(rank->is_lent[number - FIRST_SLOT]);
    rank->is_lent[number - FIRST_SLOT] = false;
}

static void take_log(struct rank *rank) {
    struct pmesh_ended_op into[PMESH_LOGGED_OPS];
    const uint64_t count = pmesh_take_ended(rank->calls, into);
    assert(rank->logged + count <= PMESH_LOGGED_OPS);
    memcpy(rank->log + rank->logged, into, count * sizeof *into);
    rank->logged += count;
}

static void follow_op(struct rank *rank, uint64_t op, const struct pmesh_ended_op *ended) {
    const struct pmesh_persistent *calls = rank->calls;
    const struct pmesh_call *call = &calls->calls[ended->call];
    assert(ended->number == op && ended->call == call_of(rank->world, op));
    assert(ended->step == (ended->call ? 0 : step_of(op)));
    assert(op < calls->limit && ended->slot < SLOTS);
    assert(!result_bytes(rank, op) || calls->slots[ended->slot].shared == shares(call));
    assert(ended->began_s <= ended->ended_s && ended->receiving_s >= 0);
    note_end(rank, op, ended->slot, rank->slots[ended->slot]);
    rank->world->together += call->meeting != NULL;
    if (calls->may_lend && call->lending.count) {
        uint32_t own = 0;
        rank->is_lent[ended->slot] = true;
        for (uint32_t i = 0; i < SLOTS; i++) {
            own += calls->slots[i].shared == calls->slots[ended->slot].shared && !rank->is_lent[i];
        }
        assert(own >= PMESH_OWN_SLOTS);
        rank->world->lent += 1;
    }
}

// Go through what the server has answered: each request once, in order, and nothing else. What it
// has not answered is there, as it came.
static void follow(struct rank *rank) {
    const struct pmesh_persistent *calls = rank->calls;
    const uint64_t end = read_bytes[rank->session] - calls->unread_bytes;
    uint64_t ended = 0;
    assert(!memcmp(rank->stream + end, calls->unread, calls->unread_bytes));
    while (rank->followed < end) {
        const uint8_t *message = rank->stream + rank->followed;
        const uint32_t nbytes = whole_message(message, end - rank->followed);
        assert(nbytes);
        if (message[4] == 'd') {
            drop(rank, number_in(message + 4 + strlen(DROP[0])));
        } else {
            assert(ended < rank->logged);
            follow_op(rank, number_in(message + 4 + strlen("op ")), &rank->log[ended++]);
        }
        rank->followed += nbytes;
    }
    assert(ended == rank->logged && calls->next == rank->ended + 1);
    rank->world->served += ended;
    rank->logged = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        assert(rank->is_lent[i] == calls->slots[i].lent);
    }
}

// Let the server serve for a while, or until it stops by itself; return whether it has.
static bool serve_for_a_while(struct rank *rank) {
    struct pmesh_persistent *calls = rank->calls;
    struct pollfd stopped = {.fd = pmesh_server_fd(rank->server), .events = POLLIN};
    const bool is_trusted_at_all = below(&rank->random, 8);
    bool is_ready = false;
    calls->next = rank->ended + 1;
    calls->limit = calls->next + (below(&rank->random, 4) ? UINT32_MAX : below(&rank->random, 4));
    calls->may_lend = (uint32_t)below(&rank->random, 3) > 0;
    for (uint32_t i = 0; i < SLOTS; i++) { // as `PersistentCalls.serve` does
        struct pmesh_slot *slot = &calls->slots[i];
        const bool is_kept = rank->result == rank->slots[i] && slot->free_at < calls->next + 1;
        slot->free_at = is_kept ? calls->next + 1 : slot->free_at;
        slot->lent = rank->is_lent[i];
    }
    atomic_store(&calls->trusted_until_us, is_trusted_at_all ? UINT64_MAX : 0);
    pmesh_serve(rank->server);
    for (uint64_t left = below(&rank->random, 12); left && !is_ready && !must_stop(rank); left--) {
        is_ready = poll(&stopped, 1, (int)below(&rank->random, 3)) == 1;
        if (below(&rank->random, 4) == 0) {
            take_log(rank);
        }
        if (is_trusted_at_all && below(&rank->random, 6) == 0) { // until just now
            const uint64_t now_us = (uint64_t)(1e6 * seconds(ELAPSED));
            atomic_store(&calls->trusted_until_us, now_us + below(&rank->random, 1000));
        }
    }
    pmesh_recall(rank->server);
    take_log(rank);
    assert(is_trusted_at_all || (!rank->logged && calls->why != PMESH_BEGUN));
    follow(rank);
    assert(calls->why != PMESH_UNANSWERED && !(is_ready && calls->why == PMESH_RECALLED));
    assert(calls->why != PMESH_BEGUN || calls->next < calls->limit);
    return is_ready;
}

// Wait for what has begun; stop it if another rank has stopped, or if this one is to. Returns
// whether it has ended well.
static bool finish(struct rank *rank, int32_t state) {
    struct pmesh_runner *runner = rank->calls->runner;
    struct world *world = rank->world;
    if (state != PMESH_OVER && state != PMESH_RUNS) {
        state = state == PMESH_AWAITS || below(&rank->random, 2) ? pmesh_advance(runner) : state;
    }
    if (state != PMESH_OVER) {
        struct pollfd ended = {.fd = pmesh_runner_fd(runner), .events = POLLIN};
        const bool runs = state == PMESH_RUNS || pmesh_hand_over(runner);
        assert(runs);
        for (int left = HANGS_MS; poll(&ended, 1, 1) == 0; left--) {
            assert(left > 0);
            if (below(&rank->random, 40) == 0 && atomic_fetch_sub(&world->stops_left, 1) > 0) {
                uint64_t roster = rank->roster;
                atomic_compare_exchange_strong(&world->roster, &roster, roster + 1);
            }
            if (must_stop(rank)) {
                pmesh_stop(runner);
            }
        }
    }
    const int32_t status = pmesh_end(runner);
    assert(status == PMESH_DONE || (status == PMESH_STOPPED && must_stop(rank)));
    return status == PMESH_DONE;
}

// Where Python has the result of an op: in a slot, or in memory of its own, whose numbers follow.
static uint32_t slot_for(struct rank *rank, uint64_t op) {
    for (uint32_t i = 0; i < PMESH_MOST_SLOTS && below(&rank->random, 4); i++) {
        struct pmesh_slot *slot = &rank->calls->slots[i];
        if (!slot->lent && slot->free_at <= op) {
            slot->free_at = op + 2;
            return i;
        }
    }
    return SLOTS + op % 2;
}

static uint8_t *memory_of(struct rank *rank, uint32_t slot) {
    return slot < SLOTS ? rank->slots[slot] : rank->own[slot - SLOTS];
}

static void meet(struct world *world) {
    pthread_mutex_lock(&world->lock);
    const uint64_t meeting = world->meetings;
    if (++world->met == world->size) {
        world->met = 0;
        world->meetings++;
        pthread_cond_broadcast(&world->changed);
    }
    while (meeting == world->meetings) {
        pthread_cond_wait(&world->changed, &world->lock);
    }
    pthread_mutex_unlock(&world->lock);
}

static int32_t begin_here(struct rank *rank, uint64_t op, uint32_t slot) {
    const struct world *world = rank->world;
    const uint32_t call = call_of(world, op);
    struct pmesh_op *begun = &rank->ops[call];
    if (rank->calls->calls[call].says_place) {
        const uint8_t *number = rank->unread + 4 + strlen("op ");
        const uint8_t *at = number + (number[0] < 128 ? 1 : 1 + (1 << (number[0] - 0xcc)));
        begun->regions[PMESH_SOURCE] = rank->arena + number_in(at + strlen(" sums from "));
    }
    begun->regions[PMESH_RESULT] = memory_of(rank, slot);
    begun->number = op;
    begun->completed = (int64_t)op - 1;
    return pmesh_begin(rank->calls->runner, begun);
}

// Note and answer an op that this rank has run, or has the result of.
static void end_here(struct rank *rank, uint64_t op, uint32_t slot) {
    uint8_t reply[64];
    note_end(rank, op, slot, memory_of(rank, slot));
    send_all(rank->session, reply,
             say(reply, result_bytes(rank, op) ? DONE : MET, op, FIRST_SLOT + slot));
}

// Some rank has stopped: all meet, and those that lack the last op take its result from one that
// has it, which has kept it. Returns whether this one did; its result would lie in this slot.
static bool recover(struct rank *rank, uint32_t slot) {
    struct world *world = rank->world;
    const struct rank *most = rank;
    meet(world);
    for (uint32_t r = 0; r < world->size; r++) {
        most = world->ranks[r].ended > most->ended ? &world->ranks[r] : most;
    }
    const uint64_t op = most->ended;
    assert(rank->ended == op || rank->ended + 1 == op);
    if (most->result) {
        check_result(world, op, most->result);
    }
    if (most != rank) {
        assert(slot < SLOTS + 2);
        memcpy(memory_of(rank, slot), most->result, result_bytes(rank, op));
    }
    meet(world);
    rank->roster++;
    for (uint32_t i = 0; i < CALLS; i++) {
        rank->ops[i].roster = rank->roster;
    }
    if (most != rank) {
        end_here(rank, op, slot);
    }
    return most != rank;
}

// Run the next op, or go on with it if the server has begun it.
static void run_here(struct rank *rank, bool has_begun) {
    const struct pmesh_persistent *calls = rank->calls;
    const uint64_t op = rank->ended + 1;
    const uint32_t slot = has_begun && result_bytes(rank, op) ? calls->slot : slot_for(rank, op);
    int32_t state;
    if (has_begun) {
        assert(calls->next == op && calls->call == call_of(rank->world, op));
        rank->calls->slots[calls->slot].free_at = op + 2;
        state = calls->state;
    } else {
        state = begin_here(rank, op, slot);
    }
    while (!finish(rank, state)) {
        if (recover(rank, slot)) {
            return;
        }
        state = begin_here(rank, op, slot);
    }
    end_here(rank, op, slot);
}

// Handle what the server has left, and what belongs to it; return false at the connection's end.
static bool handle_unread(struct rank *rank, bool has_begun) {
    while (rank->unread_bytes) {
        const uint32_t nbytes = whole_message(rank->unread, rank->unread_bytes);
        if (nbytes) {
            if (rank->unread[4] == 'd') {
                drop(rank, number_in(rank->unread + 4 + strlen(DROP[0])));
                for (uint32_t i = 0; i < SLOTS; i++) {
                    rank->calls->slots[i].lent = rank->is_lent[i];
                }
            } else {
                run_here(rank, has_begun);
                has_begun = false;
            }
            rank->followed += nbytes;
            rank->unread_bytes -= nbytes;
            memmove(rank->unread, rank->unread + nbytes, rank->unread_bytes);
            continue;
        }
        assert(!has_begun);
        struct pollfd readable = {.fd = rank->session, .events = POLLIN};
        if (poll(&readable, 1, 1) == 1) {
            const ssize_t count =
                counted_recv(rank->session, rank->unread + rank->unread_bytes,
                             PMESH_UNREAD_BYTES - rank->unread_bytes, MSG_DONTWAIT);
            if (count <= 0) {
                return false;
            }
            rank->unread_bytes += (uint32_t)count;
        } else if (must_stop(rank)) {
            recover(rank, UINT32_MAX);
        }
    }
    return true;
}

// Take what the server has left.
static void take_unread(struct rank *rank) {
    struct pmesh_persistent *calls = rank->calls;
    memcpy(rank->unread, calls->unread, calls->unread_bytes);
    rank->unread_bytes = calls->unread_bytes;
    calls->unread_bytes = 0;
}

// The trainer has said all, and the last of it is a part of a request.
static void serve_to_the_end(struct rank *rank) {
    struct pollfd stopped = {.fd = pmesh_server_fd(rank->server), .events = POLLIN};
    rank->calls->next = rank->ended + 1;
    rank->calls->limit = rank->calls->trusted_until_us = UINT64_MAX;
    pmesh_serve(rank->server);
    const int ready = poll(&stopped, 1, HANGS_MS);
    assert(ready == 1);
    pmesh_recall(rank->server);
    follow(rank);
    assert(rank->calls->why == PMESH_OTHER);
}

static void *act_as_python(void *argument) {
    struct rank *rank = argument;
    struct world *world = rank->world;
    bool is_open = true;
    while (rank->ended < world->last || must_stop(rank)) {
        if (must_stop(rank)) {
            recover(rank, UINT32_MAX);
            continue;
        }
        serve_for_a_while(rank);
        take_unread(rank);
        const bool has_begun = rank->calls->why == PMESH_BEGUN;
        world->begun += has_begun;
        is_open = handle_unread(rank, has_begun);
    }
    world->done++;
    while (world->done < world->size) {
        if (must_stop(rank)) {
            recover(rank, UINT32_MAX);
        }
        poll(NULL, 0, 1);
    }
    if (is_open) {
        serve_to_the_end(rank);
    }
    return NULL;
}

static void ranks_answer_their_trainers(uint64_t seed, uint64_t sums[5]) {
    struct world *world = new_world(seed, (uint32_t)(2 + seed % 2));
    pthread_t threads[2 * MOST_RANKS];
    if ((seed + 1) / 4 % 2) {
        let_ranks_meet(world);
    }
    world->stops_left = (int)(seed % 4);
    for (uint32_t r = 0; r < world->size; r++) {
        int failed = pthread_create(&threads[2 * r], NULL, train, &world->ranks[r]);
        failed |= pthread_create(&threads[2 * r + 1], NULL, act_as_python, &world->ranks[r]);
        assert(!failed);
    }
    for (uint32_t i = 0; i < 2 * world->size; i++) {
        pthread_join(threads[i], NULL);
    }
    for (uint32_t r = 0; r < world->size; r++) {
        const struct rank *rank = &world->ranks[r];
        assert(rank->followed + rank->calls->unread_bytes + rank->unread_bytes == rank->said);
        for (uint32_t p = 0; p < world->size - 1; p++) { // O2
            assert(rank->lanes[p]->peer_completed < (int64_t)world->last);
        }
    }
    sums[0] += world->served;
    sums[1] += world->begun;
    sums[2] += world->lent;
    sums[3] += world->roster - 1;
    sums[4] += world->together;
    free_world(world);
}

// --- one rank

// The next op is one of this call.
static uint64_t ask(struct rank *rank, uint32_t call) {
    uint64_t op = rank->calls->next;
    while (call_of(rank->world, op) != call) {
        op++;
    }
    rank->calls->next = op;
    request(rank, op);
    send_said(rank);
    return op;
}

static void serve_until_it_stops(struct rank *rank, int32_t why) {
    struct pollfd stopped = {.fd = pmesh_server_fd(rank->server), .events = POLLIN};
    pmesh_serve(rank->server);
    const int ready = poll(&stopped, 1, HANGS_MS);
    assert(ready == 1);
    pmesh_recall(rank->server);
    assert(rank->calls->why == why);
}

static void a_server_with_a_full_log_leaves_the_next_op(void) {
    struct world *world = new_world(1, 1);
    struct rank *rank = &world->ranks[0];
    struct pmesh_persistent *calls = rank->calls;
    struct pmesh_ended_op ended[PMESH_LOGGED_OPS];
    calls->ended = PMESH_LOGGED_OPS - 1;
    for (uint64_t op = world->first; op < world->first + 2; op++) {
        request(rank, op);
    }
    send_said(rank);
    serve_until_it_stops(rank, PMESH_OTHER);
    assert(calls->next == world->first + 1 && calls->unread_bytes);
    assert(pmesh_take_ended(calls, ended) == PMESH_LOGGED_OPS);
    assert(ended[PMESH_LOGGED_OPS - 1].number == world->first);
    pmesh_serve(rank->server);
    read_reply(rank);
    read_reply(rank);
    pmesh_recall(rank->server);
    assert(calls->next == world->first + 2 && !calls->unread_bytes);
    assert(pmesh_take_ended(calls, ended) == 1 && ended[0].number == world->first + 1);
    free_world(world);
}

// Each byte is read before the next one is sent.
static void send_slowly(struct rank *rank) {
    struct pollfd stopped = {.fd = pmesh_server_fd(rank->server), .events = POLLIN};
    while (rank->sent < rank->said) {
        send_all(rank->trainer, rank->stream + rank->sent++, 1);
        while (read_bytes[rank->session] < rank->sent) {
            assert(poll(&stopped, 1, 0) == 0);
            sched_yield();
        }
    }
}

static void messages_may_arrive_byte_by_byte(void) {
    struct world *world = new_world(1, 1);
    struct rank *rank = &world->ranks[0];
    struct pmesh_persistent *calls = rank->calls;
    calls->may_lend = 1;
    calls->next = 200; // in two bytes
    while (call_of(world, calls->next) != 2) {
        calls->next++;
    }
    rank->done = calls->next - 1;
    request(rank, calls->next);
    pmesh_serve(rank->server);
    pmesh_recall(rank->server);
    wasted_polls = 0;
    pmesh_serve(rank->server);
    send_slowly(rank);
    read_reply(rank);
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        if (rank->keeps[slot]) {
            say_next(rank, DROP, FIRST_SLOT + slot, 0);
        }
    }
    send_slowly(rank);
    assert(!wasted_polls);
    pmesh_recall(rank->server);
    assert(calls->why == PMESH_RECALLED && calls->ended == 1 && !calls->unread_bytes);
    for (uint64_t slot = 0; slot < SLOTS; slot++) {
        assert(!calls->slots[slot].lent);
    }
    free_world(world);
}

static void an_op_whose_reply_the_trainer_does_not_take_has_ended(void) {
    struct world *world = new_world(1, 1);
    struct rank *rank = &world->ranks[0];
    while (send(rank->session, "stuck", 5, MSG_DONTWAIT) == 5) {
    }
    const uint64_t op = ask(rank, 1);
    serve_until_it_stops(rank, PMESH_UNANSWERED);
    assert(rank->calls->ended == 1 && rank->calls->next == op + 1 && !rank->calls->unread_bytes);
    free_world(world);
}

static void check_left(struct rank *rank, uint64_t op, uint32_t call, int32_t state) {
    const struct pmesh_persistent *calls = rank->calls;
    assert(calls->why == PMESH_BEGUN && calls->state == state);
    assert(calls->next == op && calls->call == call && calls->ended == 0);
    assert(calls->unread_bytes == rank->said &&
           !memcmp(calls->unread, rank->stream, calls->unread_bytes));
    pmesh_stop(calls->runner);
    assert(pmesh_end(calls->runner) == PMESH_STOPPED);
}

// The other processes of this machine may keep one of several recalls long, but not each.
static void a_recall_does_not_wait_for_a_rank_that_is_late(void) {
    for (uint32_t call = 0; call < CALLS; call++) {
        double shortest_s = 1;
        for (int i = 0; i < 5; i++) {
            struct world *world = new_world(1, 2);
            struct rank *rank = &world->ranks[0];
            struct pollfd sent = {.fd = world->ranks[1].in[0].fd, .events = POLLIN};
            const uint64_t op = ask(rank, call);
            pmesh_serve(rank->server);
            const int ready = poll(&sent, 1, HANGS_MS);
            assert(ready == 1);
            const double began_s = seconds(AWAKE);
            pmesh_recall(rank->server);
            const double took_s = seconds(AWAKE) - began_s;
            shortest_s = took_s < shortest_s ? took_s : shortest_s;
            check_left(rank, op, call, call == 3 ? PMESH_RUNS : PMESH_AWAITS);
            free_world(world);
        }
        assert(shortest_s < 1e-3 * MOST_WAIT_MS / 4);
    }
}

static void an_op_that_does_not_end_soon_is_left_as_it_is(void) {
    for (int is_full = 0; is_full < 2; is_full++) {
        struct world *world = new_world(1, 2);
        struct rank *rank = &world->ranks[0];
        while (is_full && send(rank->out[1].fd, "full", 4, MSG_DONTWAIT) > 0) {
        }
        const uint64_t op = ask(rank, 1);
        const double began_s = seconds(AWAKE);
        serve_until_it_stops(rank, PMESH_BEGUN);
        assert(seconds(AWAKE) - began_s >= 1e-3 * MOST_WAIT_MS);
        // PMESH_AWAITS would say that it can send no more before something arrives.
        check_left(rank, op, 1, is_full ? PMESH_BUSY : PMESH_AWAITS);
        free_world(world);
    }
}

static void an_op_that_fails_is_left_and_not_answered(void) {
    struct world *world = new_world(1, 2);
    struct rank *rank = &world->ranks[0];
    shutdown(world->ranks[1].out[0].fd, SHUT_WR);
    ask(rank, 1);
    serve_until_it_stops(rank, PMESH_BEGUN);
    assert(rank->calls->state == PMESH_OVER && rank->calls->ended == 0);
    assert(pmesh_end(rank->calls->runner) == PMESH_ENDED);
    free_world(world);
}

static void a_server_that_finds_no_room_is_none(void) {
    struct pmesh_persistent *calls = calloc(1, sizeof *calls);
    assert(calls);
    for (pipes_left = 0; pipes_left < 2; pipes_left += 1) {
        const int refused = pipes_left;
        assert(!pmesh_server_new(calls));
        pipes_left = refused;
    }
    pipes_left = -1;
    threads_left = 0;
    assert(!pmesh_server_new(calls));
    threads_left = -1;
    struct pmesh_server *server = pmesh_server_new(calls);
    assert(server);
    pmesh_recall(server); // it does not serve
    pmesh_serve(server);
    pmesh_server_free(server); // it serves
    free(calls);
}

// The request stays as it came, until both ranks are there.
static void servers_may_be_recalled_from_where_they_meet(void) {
    for (uint32_t call = 0; call < CALLS; call++) {
        struct world *world = new_world(1, 2);
        struct rank *ranks = world->ranks;
        const struct pmesh_persistent *calls = ranks[0].calls;
        let_ranks_meet(world);
        ranks[0].done = ask(&ranks[0], call) - 1;
        for (int i = 0; i < RECALLS; i++) {
            pmesh_serve(ranks[0].server);
            while (read_bytes[ranks[0].session] < ranks[0].said) {
                sched_yield();
            }
            for (int left = i % 20; left; left--) {
                sched_yield();
            }
            pmesh_recall(ranks[0].server);
            assert(calls->ended == 0 && calls->next == ranks[0].done + 1);
            assert(calls->why == PMESH_OTHER || calls->why == PMESH_RECALLED);
            assert(calls->unread_bytes == ranks[0].said &&
                   !memcmp(calls->unread, ranks[0].stream, calls->unread_bytes));
        }
        ranks[1].done = ask(&ranks[1], call) - 1;
        for (uint32_t r = 0; r < 2; r++) {
            pmesh_serve(ranks[r].server);
        }
        for (uint32_t r = 0; r < 2; r++) {
            read_reply(&ranks[r]);
            pmesh_recall(ranks[r].server);
            assert(ranks[r].calls->ended == 1 && !ranks[r].calls->unread_bytes);
        }
        free_world(world);
    }
}

static void ranks_do_not_meet_in_another_op_nor_with_too_little_memory(void) {
    enum { LESS_SOURCE = PMESH_SOURCE, LESS_RESULT = PMESH_RESULT, OTHER_OP, WAYS };
    for (int way = 0; way < WAYS; way++) {
        struct world *world = new_world(1, 2);
        struct rank *ranks = world->ranks;
        let_ranks_meet(world);
        ranks[1].calls->next = ask(&ranks[0], 1) + (way == OTHER_OP);
        if (way != OTHER_OP) {
            ranks[1].ops[1].region_bytes[way] -= 4;
        }
        ask(&ranks[1], 1);
        struct pollfd stopped[2];
        for (uint32_t r = 0; r < 2; r++) {
            stopped[r] = (struct pollfd){.fd = pmesh_server_fd(ranks[r].server), .events = POLLIN};
            pmesh_serve(ranks[r].server);
        }
        const int ready = poll(stopped, 2, HANGS_MS); // another number stops only who comes last
        assert(ready > 0);
        for (uint32_t r = 0; r < 2; r++) {
            pmesh_recall(ranks[r].server);
            assert(!ranks[r].calls->ended && ranks[r].calls->unread_bytes == ranks[r].said);
        }
        free_world(world);
    }
}

// Whether it is shared or not.
static void a_result_lies_where_there_is_room_for_it(void) {
    enum { LARGE = 3 };
    for (uint32_t call = 0; call < 2 * CALLS; call++) {
        struct world *world = new_world(1, 1);
        struct rank *rank = &world->ranks[0];
        const struct pmesh_op *op = &rank->ops[call % CALLS];
        if (call >= CALLS) {
            let_ranks_meet(world);
        }
        for (uint32_t i = 0; i < SLOTS && op->region_bytes[PMESH_RESULT]; i++) {
            rank->calls->slots[i].nbytes =
                op->region_bytes[PMESH_RESULT] - (i % PMESH_MOST_SLOTS != LARGE);
        }
        rank->done = ask(rank, call % CALLS) - 1;
        pmesh_serve(rank->server);
        read_reply(rank);
        pmesh_recall(rank->server);
        assert(rank->calls->ended == 1);
        assert(!op->region_bytes[PMESH_RESULT] ||
               rank->calls->log[0].slot % PMESH_MOST_SLOTS == LARGE);
        free_world(world);
    }
}

int main(int count, char **arguments) {
    const uint64_t first = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    const uint64_t seeds = count > 2 ? strtoull(arguments[2], NULL, 10) : 20;
    uint64_t sums[5] = {0};
    alarm(HANGS_S);
    a_server_with_a_full_log_leaves_the_next_op();
    messages_may_arrive_byte_by_byte();
    an_op_whose_reply_the_trainer_does_not_take_has_ended();
    a_recall_does_not_wait_for_a_rank_that_is_late();
    an_op_that_does_not_end_soon_is_left_as_it_is();
    an_op_that_fails_is_left_and_not_answered();
    a_server_that_finds_no_room_is_none();
    servers_may_be_recalled_from_where_they_meet();
    ranks_do_not_meet_in_another_op_nor_with_too_little_memory();
    a_result_lies_where_there_is_room_for_it();
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed); // the last one if it fails
        alarm(HANGS_S);
        ranks_answer_their_trainers(seed, sums);
    }
    printf("%llu ops answered, %llu begun, %llu results lent, %llu stops, %llu met\n",
           (unsigned long long)sums[0], (unsigned long long)sums[1], (unsigned long long)sums[2],
           (unsigned long long)sums[3], (unsigned long long)sums[4]);
    return 0;
}
