// Many ranks in one process, each with its own runner: all-reduces over a ring, and random records
// from any rank to any and works of codecs, which need each other as they do in plans. Some ops are
// stopped, at any point; the next one, of a higher roster, then uses the same lanes. A plain loop
// does what the ranks do, and the memory must be equal. Some ranks have their sources folded, and
// some lanes several connections, which come and go meanwhile.
//
// Run: ranks [FIRST_SEED [COUNT]]
#include "toy.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

// --- threads that lose the processor where it matters: between two steps of who sleeps

static void stumble(void) {
    static _Thread_local uint64_t steps;
    for (uint64_t left = mixed(++steps) % 16 ? 0 : 1 + mixed(steps) % 8; left; left--) {
        sched_yield();
    }
}

#undef atomic_store
#undef atomic_fetch_add
#define atomic_store(object, value)                                                                \
    (stumble(), atomic_store_explicit(object, value, memory_order_seq_cst))
#define atomic_fetch_add(object, value)                                                            \
    (stumble(), atomic_fetch_add_explicit(object, value, memory_order_seq_cst))
#include "../executor.c"
#include "../kernels.h"
#include "../subflows.h"
#undef atomic_store
#undef atomic_fetch_add

enum {
    MOST_RANKS = 5,
    HOPS = 2 * (MOST_RANKS - 1), // the queues of works come after the lanes
    DECODINGS,                   // by the side that sends
    DECODINGS_OF_SCRATCH,
    TRACKS,
    MOST_CELLS = 20, // pieces of each region; a record moves one
    MOST_TOUCHES = 12,
    MOST_RECORDS = 80, // of a track
    MOST_NEEDS = 4096,
    LARGEST_PIECE = 64 * 1024, // values: kernels take long under TSan
    SLICE = 64 * 1024,         // bytes that are folded at once
    HANGS_MS = 60 * 1000,      // a wake-up was lost
    MOST_CABLES = 4096,
};

// A source that is the sum of the values of two.
struct halves {
    struct pmesh_place places[3];
    struct pmesh_fold fold;
    uint8_t *sources[2], *results[1];
    uint64_t nbytes[2];
    struct pmesh_combining op;
};

// What the records of one rank have done to a piece of its memory.
struct cell {
    bool written;
    struct pmesh_need writer;
    struct pmesh_need touches[MOST_TOUCHES]; // the last writer, and who has read since
    uint32_t touch_count;
};

struct rank {
    struct pmesh_runner *runner;
    struct cell cells[PMESH_REGIONS][MOST_CELLS];
    struct pmesh_record records[TRACKS][MOST_RECORDS];
    uint32_t counts[TRACKS];
    struct pmesh_need needs[MOST_NEEDS];
    struct pmesh_copy copies[MOST_CELLS];
    struct pmesh_work works[TRACKS - HOPS][MOST_RECORDS];
    struct pmesh_track tracks[TRACKS];
    struct pmesh_coding coding;
    struct pmesh_lane *lanes[TRACKS];
    struct pmesh_plan plan;
    struct pmesh_op op;
    struct halves halves;          // of its source, if `op` has a fold
    uint8_t *model[PMESH_REGIONS]; // what the plain loop does
    uint8_t *residual, *model_residual;
    int64_t model_clipped;
    int32_t state;  // `enum pmesh_state`
    bool under_way; // in threads
};

// One connection of a lane of several; an end that is closed is -1.
struct cable {
    struct pmesh_lane *lanes[2]; // of the sender and of the receiver
    uint32_t index;              // in both
    int ends[2];
};

struct world {
    struct cable cables[MOST_CABLES];
    uint32_t cable_count;
    _Atomic bool op_is_over;
    struct random random;
    uint32_t size, cells;
    uint64_t offsets[MOST_CELLS + 1]; // in each region
    bool copied[MOST_CELLS];          // from the source to the result, at each rank
    bool reduces, means, codes;
    int32_t codec;
    uint64_t roster, number;
    struct rank ranks[MOST_RANKS];
    struct pmesh_lane to[MOST_RANKS][MOST_RANKS], from[MOST_RANKS][MOST_RANKS]; // [here][there]
};

// --- the lanes

static void tcp_pair(int ends[2]) {
    const int yes = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t nbytes = sizeof here;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    int failed = bind(listener, (struct sockaddr *)&here, sizeof here) || listen(listener, 1);
    failed |= getsockname(listener, (struct sockaddr *)&here, &nbytes);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    failed |= connect(ends[0], (struct sockaddr *)&here, sizeof here);
    ends[1] = accept(listener, NULL, NULL);
    setsockopt(ends[0], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes); // as `Lane` does
    assert(!failed && ends[1] >= 0);
    close(listener);
}

static void make_several(struct world *world, struct pmesh_lane *out, struct pmesh_lane *in);

static void connect_ranks(struct world *world, uint32_t a, uint32_t b) {
    const int narrow = 4096;
    uint8_t key[PMESH_KEY_BYTES];
    int ends[2];
    if (below(&world->random, 2)) {
        tcp_pair(ends);
    } else {
        const int failed = socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
        assert(!failed);
        if (below(&world->random, 2)) { // records in many pieces
            setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &narrow, sizeof narrow);
        }
    }
    for (int i = 0; i < 2; i++) {
        fcntl(ends[i], F_SETFL, O_NONBLOCK);
    }
    for (int i = 0; i < PMESH_KEY_BYTES; i++) {
        key[i] = (uint8_t)below(&world->random, 256);
    }
    world->to[a][b] = new_lane(ends[0], key);
    world->from[b][a] = new_lane(ends[1], key);
    if (below(&world->random, 3) == 0) {
        make_several(world, &world->to[a][b], &world->from[b][a]);
    }
}

static void unplug(struct cable *cable, int end) {
    if (cable->ends[end] >= 0) {
        pmesh_subflows_drop(cable->lanes[end]->subflows, cable->index);
        close(cable->ends[end]);
        cable->ends[end] = -1;
    }
}

// Returns false if an end has too many, of which it has yet to notice that some are lost.
static bool add_cable(struct world *world, struct pmesh_lane *out, struct pmesh_lane *in) {
    const uint32_t index = world->cable_count++;
    struct cable *cable = &world->cables[index];
    *cable = (struct cable){.lanes = {out, in}, .index = index};
    const int failed = socketpair(AF_UNIX, SOCK_STREAM, 0, cable->ends);
    assert(!failed);
    bool added = true;
    for (int i = 0; i < 2; i++) {
        // Acknowledgements have a key of their own, which both ends know.
        added &= pmesh_subflows_add(cable->lanes[i]->subflows, index, cable->ends[i], out->seal_key,
                                    0, 1e6 * (1 + index % 3), 0.001);
    }
    for (int i = 0; i < 2 && !added; i++) {
        unplug(cable, i);
    }
    return added;
}

static void make_several(struct world *world, struct pmesh_lane *out, struct pmesh_lane *in) {
    struct pmesh_lane *lanes[2] = {out, in};
    for (int i = 0; i < 2; i++) {
        lanes[i]->subflows = pmesh_subflows_new(lanes[i], !i, PMESH_LIBSODIUM,
                                                (pmesh_function)toy_seal, (pmesh_function)toy_open);
        assert(lanes[i]->subflows);
        free(lanes[i]->in);
        lanes[i]->in = NULL;
    }
    for (uint64_t left = 1 + below(&world->random, 3); left; left--) {
        const bool added = add_cable(world, out, in);
        assert(added);
    }
}

// Do what Python does beside the calls: pump, close what was lost, and let paths come and go.
static void *tend(void *argument) {
    struct world *world = argument;
    struct random random = {mixed(world->roster + 3 * world->number)};
    const bool changes = below(&random, 2);
    while (!world->op_is_over) {
        const uint32_t count = world->cable_count;
        for (uint32_t i = 0; i < count; i++) {
            struct cable *cable = &world->cables[i];
            for (int end = 0; end < 2; end++) {
                struct pmesh_lost_subflow lost;
                pmesh_subflows_pump(cable->lanes[end]->subflows, below(&random, 2));
                while (pmesh_subflows_next_lost(cable->lanes[end]->subflows, &lost)) {
                    unplug(&world->cables[lost.index], end);
                }
            }
            if (changes && below(&random, 50) == 0 && cable->ends[0] >= 0 && cable->ends[1] >= 0 &&
                world->cable_count < MOST_CABLES) {
                if (add_cable(world, cable->lanes[0], cable->lanes[1])) {
                    unplug(cable, (int)below(&random, 2));
                }
            }
        }
        poll(NULL, 0, 1);
    }
    return NULL;
}

static uint32_t track_from(uint32_t here, uint32_t there) {
    return there < here ? there : there - 1;
}

static uint32_t track_to(const struct world *world, uint32_t here, uint32_t there) {
    return world->size - 1 + track_from(here, there);
}

static struct pmesh_lane *lane_of(struct world *world, const struct rank *rank, uint32_t track) {
    const uint32_t here = (uint32_t)(rank - world->ranks), peers = world->size - 1;
    const uint32_t peer = track % peers, there = peer < here ? peer : peer + 1;
    return track < peers ? &world->from[here][there] : &world->to[here][there];
}

static struct world *new_world(uint64_t seed) {
    struct world *world = calloc(1, sizeof *world);
    assert(world);
    world->random.state = mixed(seed);
    world->size = (uint32_t)(1 + below(&world->random, MOST_RANKS));
    for (uint32_t a = 0; a < world->size; a++) {
        world->ranks[a].runner = pmesh_runner_new();
        assert(world->ranks[a].runner);
        for (uint32_t b = 0; b < world->size; b++) {
            if (a != b) {
                connect_ranks(world, a, b);
            }
        }
    }
    return world;
}

static void free_world(struct world *world) {
    for (uint32_t i = 0; i < world->cable_count; i++) {
        unplug(&world->cables[i], 0);
        unplug(&world->cables[i], 1);
    }
    for (uint32_t a = 0; a < world->size; a++) {
        pmesh_runner_free(world->ranks[a].runner);
        for (uint32_t t = 0; t < 2 * (world->size - 1); t++) {
            struct pmesh_lane *lane = lane_of(world, &world->ranks[a], t);
            close(lane->fd);
            free(lane->out);
            if (lane->subflows) {
                pmesh_subflows_free(lane->subflows);
            } else {
                free(lane->in);
            }
        }
    }
    free(world);
}

// --- the memory

static uint64_t any_size(struct world *world) {
    switch (below(&world->random, 16)) {
    case 0:
    case 1: return 0;
    case 2: return below(&world->random, PMESH_MAX_BODY_BYTES + 1);
    case 3:
    case 4: return below(&world->random, 64 * 1024);
    default: return below(&world->random, 2000);
    }
}

// Small whole numbers, so that floats are exact and no NaN.
static void fill_randomly(struct world *world, uint8_t *memory, uint64_t nbytes) {
    for (uint64_t i = 0; i < nbytes; i += 8) {
        const uint64_t bits = below(&world->random, UINT64_MAX);
        const uint32_t wholes[2] = {bits & 0xffff, bits >> 32};
        const float numbers[2] = {(float)wholes[0], (float)(wholes[1] & 0xffff)};
        toy_copy(memory + i, world->means ? (const void *)numbers : wholes, nbytes - i);
    }
}

static void new_coding(struct world *world, struct rank *rank) {
    const uint64_t nbytes = world->offsets[world->cells];
    const bool adds = below(&world->random, 2), keeps = below(&world->random, 2);
    uint8_t *residual = exactly(nbytes);
    rank->model_residual = exactly(nbytes);
    rank->model_clipped = 0;
    fill_randomly(world, residual, nbytes);
    memcpy(rank->model_residual, residual, nbytes);
    rank->residual = residual;
    rank->coding = (struct pmesh_coding){
        .residual = adds ? residual : NULL,
        .residual_out = keeps ? residual : NULL,
        .bounce = exactly(ROOM),
        .bounce_bytes = ROOM,
        .draw = below(&world->random, UINT64_MAX),
        .block = 256,
        .codec = world->codec,
    };
    for (int i = 0; i < 2; i++) {
        const float divisor = (float)(1 + below(&world->random, world->size));
        rank->coding.terms[i] = (struct pmesh_terms){1 / divisor, divisor, divisor * divisor};
    }
}

static void new_memory(struct world *world, uint32_t cells, uint64_t same_size) {
    const uint64_t unit = world->reduces || world->codes ? 4 : 1;
    world->cells = cells;
    for (uint32_t i = 0; i < cells; i++) {
        const uint64_t nbytes = same_size ? same_size : any_size(world);
        world->offsets[i + 1] = world->offsets[i] + nbytes / unit * unit;
    }
    for (uint32_t r = 0; r < world->size; r++) {
        struct rank *rank = &world->ranks[r];
        const uint64_t nbytes = world->offsets[cells];
        memset(rank->cells, 0, sizeof rank->cells);
        memset(rank->counts, 0, sizeof rank->counts);
        memset(&rank->plan, 0, sizeof rank->plan);
        for (int i = 0; i < PMESH_REGIONS; i++) {
            rank->op.regions[i] = exactly(nbytes);
            rank->op.region_bytes[i] = nbytes;
            rank->model[i] = exactly(nbytes);
            fill_randomly(world, rank->model[i], nbytes);
            memcpy(rank->op.regions[i], rank->model[i], nbytes);
        }
        new_coding(world, rank);
    }
}

static void free_memory(struct world *world) {
    for (uint32_t r = 0; r < world->size; r++) {
        free(world->ranks[r].residual);
        free(world->ranks[r].model_residual);
        free(world->ranks[r].coding.bounce);
        for (int i = 0; i < PMESH_REGIONS; i++) {
            free(world->ranks[r].op.regions[i]);
            free(world->ranks[r].model[i]);
        }
    }
}

// --- plans

static void need(struct rank *rank, struct pmesh_need event) {
    assert(rank->plan.need_count < MOST_NEEDS);
    rank->needs[rank->plan.need_count++] = event;
}

static void touch(struct cell *cell, struct pmesh_need event) {
    assert(cell->touch_count < MOST_TOUCHES);
    cell->touches[cell->touch_count++] = event;
}

static void read_cell(struct rank *rank, struct cell *cell, struct pmesh_need event) {
    if (cell->written) {
        need(rank, cell->writer);
    }
    touch(cell, event);
}

static void write_cell(struct rank *rank, struct cell *cell, struct pmesh_need event) {
    for (uint32_t i = 0; i < cell->touch_count; i++) {
        need(rank, cell->touches[i]);
    }
    cell->written = true;
    cell->writer = event;
    cell->touch_count = 0;
    touch(cell, event);
}

static bool is_full(const struct rank *rank, uint32_t region, uint32_t cell) {
    return rank->cells[region][cell].touch_count == MOST_TOUCHES;
}

static struct pmesh_need next_event(const struct rank *rank, uint32_t track) {
    return (struct pmesh_need){.track = track, .number = rank->counts[track] + 1};
}

static void append(struct rank *rank, uint32_t track, struct pmesh_record record) {
    record.need_end = rank->plan.need_count;
    assert(rank->counts[track] < MOST_RECORDS);
    rank->records[track][rank->counts[track]++] = record;
}

static void plain_add(const struct world *world, uint8_t *into, const uint8_t *other,
                      uint64_t nbytes, bool finishes) {
    for (uint64_t i = 0; i < nbytes; i += 4) {
        uint32_t wholes[2];
        float numbers[2];
        memcpy(&wholes[0], into + i, 4);
        memcpy(&wholes[1], other + i, 4);
        memcpy(numbers, wholes, sizeof numbers);
        numbers[0] += numbers[1];
        wholes[0] += wholes[1];
        numbers[0] /= finishes ? (float)world->size : 1;
        memcpy(into + i, world->means ? (void *)numbers : wholes, 4);
    }
}

struct move {
    uint32_t from, to, cell;
    uint8_t region_from, region_to, then, finishes;
};

static void plain_move(struct world *world, const struct move *move) {
    const struct rank *from = &world->ranks[move->from], *to = &world->ranks[move->to];
    const uint64_t at = world->offsets[move->cell], nbytes = world->offsets[move->cell + 1] - at;
    uint8_t *landed = to->model[move->region_to] + at, *result = to->model[PMESH_RESULT] + at;
    memcpy(landed, from->model[move->region_from] + at, nbytes);
    if (move->then == PMESH_ADD_SOURCE) {
        plain_add(world, landed, to->model[PMESH_SOURCE] + at, nbytes, move->finishes);
    } else if (move->then == PMESH_ADD_TO_RESULT) {
        plain_add(world, result, landed, nbytes, move->finishes);
    }
}

// Let one rank send a cell to another. Both then need whatever used that memory before.
static void plan_move(struct world *world, const struct move *move) {
    struct rank *from = &world->ranks[move->from], *to = &world->ranks[move->to];
    const uint32_t track_out = track_to(world, move->from, move->to);
    const uint32_t track_in = track_from(move->to, move->from);
    const uint64_t at = world->offsets[move->cell], nbytes = world->offsets[move->cell + 1] - at;
    struct pmesh_record send = {.offset = at, .nbytes = nbytes, .region = move->region_from};
    struct pmesh_record receive = {.offset = at,
                                   .nbytes = nbytes,
                                   .other = at,
                                   .region = move->region_to,
                                   .then = move->then,
                                   .finishes = move->finishes};
    send.need_begin = from->plan.need_count;
    if (move->region_from != PMESH_SOURCE) {
        read_cell(from, &from->cells[move->region_from][move->cell], next_event(from, track_out));
    }
    append(from, track_out, send);
    const struct pmesh_need landed = next_event(to, track_in);
    receive.need_begin = to->plan.need_count;
    write_cell(to, &to->cells[move->region_to][move->cell], landed);
    if (move->then == PMESH_ADD_TO_RESULT) {
        write_cell(to, &to->cells[PMESH_RESULT][move->cell], landed);
    }
    append(to, track_in, receive);
    plain_move(world, move);
}

static void plan_ring(struct world *world) {
    const uint32_t size = world->size, pieces = world->cells / size;
    for (uint32_t step = 0; step < 2 * (size - 1); step++) {
        for (uint32_t r = 0; r < size; r++) {
            const bool adds = step < size - 1;
            const uint32_t chunk = (r + 2 * size - step) % size;
            struct move move = {.from = r, .to = (r + 1) % size, .region_to = PMESH_RESULT};
            move.region_from = step ? PMESH_RESULT : PMESH_SOURCE;
            move.then = adds ? PMESH_ADD_SOURCE : PMESH_KEEP;
            move.finishes = step == size - 2;
            for (uint32_t i = 0; i < pieces; i++) {
                move.cell = chunk * pieces + i;
                plan_move(world, &move);
            }
        }
    }
}

static void plain_hop(struct rank *rank, const struct pmesh_work *work) {
    const struct pmesh_coding *coding = &rank->coding;
    const struct pmesh_terms *terms = &coding->terms[work->divides];
    const uint64_t begin = 4 * work->begin;
    const struct pmesh_hop hop = {
        .incoming =
            work->arrived == PMESH_FIRST_HOP ? NULL : rank->model[PMESH_SCRATCH] + work->arrived,
        .outgoing = rank->model[work->region] + work->offset,
        .wire_bytes = work->nbytes,
        .own = rank->model[PMESH_SOURCE] + begin,
        .residual = coding->residual ? rank->model_residual + begin : NULL,
        .residual_out = coding->residual_out ? rank->model_residual + begin : NULL,
        .count = work->count,
        .counter = mixed(coding->draw | work->begin / 256),
        .own_scale = terms->own_scale,
        .divisor = terms->divisor,
        .residual_factor = terms->residual_factor,
    };
    switch (coding->codec) {
    case PMESH_CODEC_FP16: rank->model_clipped += pmesh_hop_fp16(&hop); break;
    case PMESH_CODEC_BF16: rank->model_clipped += pmesh_hop_bf16(&hop); break;
    case PMESH_CODEC_INT8: rank->model_clipped += pmesh_hop_int8(&hop); break;
    default: rank->model_clipped += pmesh_hop_int8_stochastic(&hop); break;
    }
}

static void plain_decode(struct rank *rank, const struct pmesh_work *work) {
    uint8_t *values = rank->model[PMESH_RESULT] + 4 * work->begin, *wire = exactly(work->nbytes);
    memcpy(wire, rank->model[work->region] + work->offset, work->nbytes);
    switch (rank->coding.codec) {
    case PMESH_CODEC_FP16: pmesh_decode_fp16(wire, work->nbytes, values, work->count); break;
    case PMESH_CODEC_BF16: pmesh_decode_bf16(wire, work->nbytes, values, work->count); break;
    default: pmesh_decode_int8(wire, work->nbytes, values, work->count); break;
    }
    free(wire);
}

// A hop, or a decoding, of some values of a cell; encoded, they are in the cell, too.
static void plan_work(struct world *world, struct rank *rank, uint32_t cell, bool decodes) {
    const uint64_t at = world->offsets[cell], nbytes = world->offsets[cell + 1] - at;
    const bool scratch = below(&world->random, 2), other = scratch && below(&world->random, 2);
    const uint32_t queue = !decodes ? HOPS : other ? DECODINGS_OF_SCRATCH : DECODINGS;
    const struct pmesh_need done = next_event(rank, queue);
    struct pmesh_work work = {.begin = at / 4, .offset = at, .arrived = PMESH_FIRST_HOP};
    work.count = below(&world->random, nbytes / 4 + 1) % LARGEST_PIECE;
    while (pmesh_wire_bytes(world->codec, work.count) > nbytes) {
        work.count /= 2;
    }
    work.nbytes = pmesh_wire_bytes(world->codec, work.count);
    work.region = scratch ? PMESH_SCRATCH : PMESH_RESULT;
    work.decodes = decodes;
    work.divides = (uint8_t)below(&world->random, 2);
    work.need_begin = rank->plan.need_count;
    if (decodes) {
        if (work.region == PMESH_SCRATCH) {
            read_cell(rank, &rank->cells[PMESH_SCRATCH][cell], done);
        }
        write_cell(rank, &rank->cells[PMESH_RESULT][cell], done);
        plain_decode(rank, &work);
    } else {
        if (work.region == PMESH_RESULT && below(&world->random, 2)) {
            work.arrived = at;
            read_cell(rank, &rank->cells[PMESH_SCRATCH][cell], done);
        }
        write_cell(rank, &rank->cells[work.region][cell], done);
        plain_hop(rank, &work);
    }
    work.need_end = rank->plan.need_count;
    rank->works[queue - HOPS][rank->counts[queue]++] = work;
}

static void plan_any_work(struct world *world) {
    struct rank *rank = &world->ranks[below(&world->random, world->size)];
    const uint32_t cell = (uint32_t)below(&world->random, world->cells);
    const bool decodes = below(&world->random, 2);
    if (!world->copied[cell] && !is_full(rank, PMESH_RESULT, cell) &&
        !is_full(rank, PMESH_SCRATCH, cell)) {
        plan_work(world, rank, cell, decodes);
    }
}

static void plan_random_moves(struct world *world) {
    for (uint64_t left = below(&world->random, MOST_RECORDS); left; left--) {
        if (world->codes && below(&world->random, 2)) {
            plan_any_work(world);
        }
        if (world->size == 1) {
            continue;
        }
        struct move move = {.from = (uint32_t)below(&world->random, world->size)};
        const uint32_t further = (uint32_t)below(&world->random, world->size - 1);
        move.to = (move.from + 1 + further) % world->size;
        move.cell = (uint32_t)below(&world->random, world->cells);
        move.region_from = (uint8_t)below(&world->random, PMESH_REGIONS);
        move.region_to = (uint8_t)(1 + below(&world->random, PMESH_REGIONS - 1));
        move.then = world->reduces ? (uint8_t)below(&world->random, 3) : PMESH_KEEP;
        if (move.then == PMESH_ADD_TO_RESULT) {
            move.region_to = PMESH_SCRATCH;
        }
        move.finishes = (uint8_t)below(&world->random, 2);
        if (!world->copied[move.cell] &&
            !is_full(&world->ranks[move.from], move.region_from, move.cell)) {
            plan_move(world, &move);
        }
    }
}

// A value goes to and fro, so the two threads of a rank wait for each other all the time.
static void plan_pings(struct world *world) {
    struct move move = {.to = world->size - 1, .region_to = PMESH_RESULT};
    for (int i = 0; i < MOST_RECORDS && world->size > 1; i++) {
        plan_move(world, &move);
        move = (struct move){.from = move.to,
                             .to = move.from,
                             .region_from = PMESH_RESULT,
                             .region_to = PMESH_RESULT};
    }
    for (uint32_t r = 0; r < world->size; r++) {
        world->ranks[r].plan.two_threads = 1;
    }
}

static void plan_copies(struct world *world) {
    for (uint32_t i = 0; i < world->cells; i++) {
        const uint64_t at = world->offsets[i], nbytes = world->offsets[i + 1] - at;
        world->copied[i] = below(&world->random, 4) == 0;
        for (uint32_t r = 0; r < world->size && world->copied[i]; r++) {
            struct rank *rank = &world->ranks[r];
            rank->copies[rank->plan.copy_count++] =
                (struct pmesh_copy){.source = at, .result = at, .nbytes = nbytes};
            memcpy(rank->model[PMESH_RESULT] + at, rank->model[PMESH_SOURCE] + at, nbytes);
        }
    }
}

static void *copy_exactly(const void *from, uint64_t nbytes) {
    void *copied = exactly(nbytes);
    memcpy(copied, from, nbytes);
    return copied;
}

// Only tracks that have records: a lane that no plan uses keeps what it has left to send.
static uint32_t number_tracks(struct world *world, struct rank *rank, uint32_t numbers[]) {
    struct pmesh_plan *plan = &rank->plan;
    uint32_t used = 0;
    for (uint32_t t = 0; t < 2 * (world->size - 1); t++) {
        numbers[t] = used;
        if (rank->counts[t]) {
            rank->lanes[used++] = lane_of(world, rank, t);
            plan->receiving += t < world->size - 1;
        }
    }
    plan->sending = used - plan->receiving;
    for (uint32_t t = HOPS; t < TRACKS && world->codes; t++) {
        numbers[t] = used++;
        plan->computing++;
    }
    for (uint32_t i = 0; i < plan->need_count; i++) {
        rank->needs[i].track = numbers[rank->needs[i].track];
    }
    return used;
}

static void lay_out(struct world *world, struct rank *rank) {
    struct pmesh_plan *plan = &rank->plan;
    struct pmesh_record *records = exactly(sizeof rank->records);
    uint32_t numbers[TRACKS];
    const uint32_t tracks = number_tracks(world, rank, numbers);
    for (uint32_t t = 0; t < 2 * (world->size - 1); t++) {
        const uint32_t begin = plan->record_count, count = rank->counts[t];
        memcpy(records + begin, rank->records[t], count * sizeof *records);
        plan->record_count += count;
        if (count) {
            rank->tracks[numbers[t]] = (struct pmesh_track){.begin = begin, .end = begin + count};
        }
    }
    struct pmesh_work *works = exactly(sizeof rank->works);
    for (uint32_t t = HOPS; t < TRACKS && world->codes; t++) {
        const uint32_t begin = plan->work_count, count = rank->counts[t];
        memcpy(works + begin, rank->works[t - HOPS], count * sizeof *works);
        plan->work_count += count;
        rank->tracks[numbers[t]] = (struct pmesh_track){.begin = begin, .end = begin + count};
    }
    plan->works = copy_exactly(works, plan->work_count * sizeof *works);
    plan->records = copy_exactly(records, plan->record_count * sizeof *records);
    plan->needs = copy_exactly(rank->needs, plan->need_count * sizeof *rank->needs);
    plan->copies = copy_exactly(rank->copies, plan->copy_count * sizeof *rank->copies);
    plan->tracks = copy_exactly(rank->tracks, tracks * sizeof *rank->tracks);
    plan->size = world->size;
    plan->added_twice = (uint8_t)below(&world->random, 2);
    plan->two_threads |= (uint8_t)below(&world->random, 2);
    free(records);
    free(works);
}

static void free_plan(const struct pmesh_plan *plan) {
    free((void *)plan->records);
    free((void *)plan->needs);
    free((void *)plan->copies);
    free((void *)plan->works);
    free((void *)plan->tracks);
}

// A plan whose source is made elsewhere, or not as a whole, is refused.
static void check_who_makes_source(struct rank *rank) {
    struct pmesh_combining *op = rank->op.fold, right = *op;
    assert(pmesh_makes_source(op, &rank->op));
    op->fold_count = 0;
    assert(!pmesh_makes_source(op, &rank->op));
    *op = right;
    op->folded = NULL;
    assert(!pmesh_makes_source(op, &rank->op));
    *op = right;
    rank->op.region_bytes[PMESH_SOURCE]++;
    assert(!pmesh_makes_source(op, &rank->op) && !pmesh_plan_fits(&rank->op));
    rank->op.region_bytes[PMESH_SOURCE]--;
    rank->halves.results[0] = rank->op.regions[PMESH_RESULT];
    assert(!pmesh_makes_source(op, &rank->op));
    rank->halves.results[0] = rank->op.regions[PMESH_SOURCE];
    rank->halves.places[0].rank = 2;
    assert(!pmesh_makes_source(op, &rank->op));
    rank->halves.places[0].rank = 0;
}

// Take the source apart: whoever runs the plan has to fold it.
static void halve_source(struct world *world, struct rank *rank) {
    struct halves *halves = &rank->halves;
    const uint64_t nbytes = rank->op.region_bytes[PMESH_SOURCE];
    *halves = (struct halves){.fold = {nbytes, 0, 2, 2, 3}, .nbytes = {nbytes, nbytes}};
    halves->places[1].rank = 1;
    halves->results[0] = rank->op.regions[PMESH_SOURCE];
    for (int i = 0; i < 2; i++) {
        halves->sources[i] = exactly(nbytes);
    }
    for (uint64_t i = 0; i < nbytes; i++) {
        halves->sources[0][i] = (uint8_t)(mixed(world->number + i) & 0xff);
        halves->sources[1][i] = (uint8_t)(halves->results[0][i] - halves->sources[0][i]);
    }
    memset(halves->results[0], 0xee, nbytes);
    halves->op = (struct pmesh_combining){
        .folds = &halves->fold,
        .places = halves->places,
        .sources = (const uint8_t *const *)halves->sources,
        .source_bytes = halves->nbytes,
        .results = halves->results,
        .result_bytes = halves->nbytes,
        .fold_count = 1,
        .place_count = 3,
        .ranks = 2,
        .dtype = PMESH_UINT8,
        .reduction = PMESH_SUM,
        .folded = calloc(nbytes / SLICE + 1, 1),
    };
    assert(halves->op.folded);
    rank->op.fold = &halves->op;
    check_who_makes_source(rank);
}

// What no record has read is folded now, so that the whole source can be checked.
static void end_fold(struct rank *rank) {
    if (rank->op.fold) {
        pmesh_fold(rank->op.fold, 0, rank->op.region_bytes[PMESH_SOURCE]);
        free(rank->halves.sources[0]);
        free(rank->halves.sources[1]);
        free(rank->halves.op.folded);
    }
}

// --- running them

static void set_op(struct world *world, struct rank *rank) {
    struct pmesh_op *op = &rank->op;
    op->plan = &rank->plan;
    op->lanes = rank->lanes;
    op->coding = world->codes ? &rank->coding : NULL;
    op->aead = below(&world->random, 2) ? PMESH_LIBAEGIS : PMESH_LIBSODIUM;
    op->seal = op->aead ? (pmesh_function)toy_aegis_seal : (pmesh_function)toy_seal;
    op->open = op->aead ? (pmesh_function)toy_aegis_open : (pmesh_function)toy_open;
    op->roster = world->roster;
    op->number = world->number;
    op->fingerprint = mixed(world->number);
    op->completed = (int64_t)world->number - 1;
    op->dtype = !world->reduces ? -1 : world->means ? PMESH_FLOAT32 : PMESH_INT32;
    op->reduction = world->means ? PMESH_MEAN : PMESH_SUM;
    op->fold = NULL;
    if (!world->codes && below(&world->random, 2)) {
        halve_source(world, rank);
    }
}

// Another thread stops all ranks, while they begin, run and end.
static void *stop_all(void *argument) {
    struct world *world = argument;
    struct random random = {mixed(world->roster + world->number)};
    for (uint32_t i = 0; i < 2 * world->size; i++) {
        for (uint64_t left = below(&random, 30); left; left--) {
            sched_yield();
        }
        pmesh_stop(world->ranks[below(&random, world->size)].runner);
    }
    return NULL;
}

static void end_op(struct rank *rank, bool stopped) {
    struct pollfd ended = {.fd = pmesh_runner_fd(rank->runner), .events = POLLIN};
    if (rank->under_way) {
        const int ready = poll(&ended, 1, HANGS_MS);
        assert(ready == 1);
    }
    const int32_t status = pmesh_end(rank->runner);
    assert(status == PMESH_DONE || (stopped && status == PMESH_STOPPED));
    assert(!rank->op.has_failed && poll(&ended, 1, 0) == 0);
}

static bool has_arrived(const struct rank *rank) {
    struct pollfd polled[TRACKS * PMESH_SUBFLOW_POLLS];
    nfds_t count = 0;
    for (uint32_t t = 0; t < rank->plan.receiving; t++) {
        if (rank->lanes[t]->subflows) {
            count += pmesh_subflows_polled(rank->lanes[t]->subflows, &polled[count]);
        } else {
            polled[count++] = (struct pollfd){.fd = rank->lanes[t]->fd, .events = POLLIN};
        }
    }
    return poll(polled, count, 1) > 0;
}

// Ranks that only await what arrives may go on here, as in Python's event loop; others in threads.
static void go_on(struct world *world, bool here) {
    const time_t late = time(NULL) + HANGS_MS / 1000;
    bool all_over = false;
    while (!all_over) {
        all_over = true;
        for (uint32_t r = 0; r < world->size; r++) {
            struct rank *rank = &world->ranks[r];
            if (rank->state == PMESH_AWAITS && here) {
                if (below(&world->random, 2)) {
                    rank->state = pmesh_wait(rank->runner, 1);
                } else if (has_arrived(rank)) {
                    rank->state = pmesh_advance(rank->runner);
                }
                all_over &= rank->state == PMESH_OVER;
            } else if (rank->state != PMESH_OVER) {
                rank->under_way = pmesh_hand_over(rank->runner);
                rank->state = PMESH_OVER;
                assert(rank->under_way);
            }
        }
        assert(time(NULL) < late);
    }
}

static void run_op(struct world *world, bool stopped) {
    const bool here = !stopped && below(&world->random, 2);
    pthread_t stopper, tender;
    for (uint32_t r = 0; r < world->size; r++) {
        set_op(world, &world->ranks[r]);
    }
    world->op_is_over = false;
    int failed = pthread_create(&tender, NULL, tend, world);
    if (stopped) {
        failed |= pthread_create(&stopper, NULL, stop_all, world);
    }
    assert(!failed);
    for (uint32_t r = 0; r < world->size; r++) {
        struct rank *rank = &world->ranks[r];
        rank->under_way = false;
        rank->state = pmesh_begin(rank->runner, &rank->op);
    }
    go_on(world, here);
    if (stopped) {
        pthread_join(stopper, NULL);
    }
    for (uint32_t r = 0; r < world->size && stopped; r++) {
        pmesh_stop(world->ranks[r].runner); // the others may wait for one that was stopped
    }
    for (uint32_t r = 0; r < world->size; r++) {
        end_op(&world->ranks[r], stopped);
        end_fold(&world->ranks[r]);
    }
    world->op_is_over = true;
    pthread_join(tender, NULL);
}

static void check_memory(const struct world *world) {
    for (uint32_t r = 0; r < world->size; r++) {
        const struct rank *rank = &world->ranks[r];
        for (int i = 0; i < PMESH_REGIONS; i++) {
            assert(!memcmp(rank->op.regions[i], rank->model[i], rank->op.region_bytes[i]));
        }
        assert(!memcmp(rank->residual, rank->model_residual, world->offsets[world->cells]));
        assert(rank->coding.clipped == rank->model_clipped);
    }
}

// All ranks have the sum of all sources; `plain_move` has it from the same plan.
static void check_sums(const struct world *world) {
    const uint64_t count = world->offsets[world->cells] / 4;
    for (uint64_t i = 0; i < count && world->size > 1; i++) {
        uint32_t sum = 0;
        for (uint32_t r = 0; r < world->size; r++) {
            sum += ((const uint32_t *)(const void *)world->ranks[r].op.regions[PMESH_SOURCE])[i];
        }
        for (uint32_t r = 0; r < world->size; r++) {
            assert(sum == ((uint32_t *)(void *)world->ranks[r].op.regions[PMESH_RESULT])[i]);
        }
    }
}

// Nothing is under way, and each record was opened once, the late ones too.
static void check_lanes(const struct world *world) {
    for (uint32_t a = 0; a < world->size; a++) {
        for (uint32_t b = 0; b < world->size; b++) {
            const struct pmesh_lane *out = &world->to[a][b], *in = &world->from[b][a];
            const bool used = a != b && world->ranks[a].counts[track_to(world, a, b)];
            assert(!used || out->unsent_begin == out->unsent_end);
            assert(!used || (out->sealed == in->opened && in->filled == 0));
            assert(!used || in->peer_completed == (int64_t)world->number - 1);
            assert(out->bytes_sent >= in->bytes_received);
        }
    }
}

static void one_op(struct world *world, bool stopped) {
    const uint64_t kind = below(&world->random, 5);
    const bool ring = kind < 2;
    world->codes = kind > 2 && below(&world->random, 2);
    // Not both: what is decoded may be a NaN, and which NaN a sum is depends on the compiler.
    world->reduces = ring || (!world->codes && below(&world->random, 2));
    world->means = (world->reduces || world->codes) && below(&world->random, 3) == 0;
    world->codec = (int32_t)below(&world->random, PMESH_CODECS);
    memset(world->copied, 0, sizeof world->copied);
    if (ring) {
        const uint32_t pieces = (uint32_t)(1 + below(&world->random, MOST_CELLS / MOST_RANKS));
        new_memory(world, pieces * world->size, any_size(world));
        plan_ring(world);
    } else if (kind == 2) {
        new_memory(world, 1, 8);
        plan_pings(world);
    } else {
        new_memory(world, (uint32_t)(1 + below(&world->random, MOST_CELLS)), 0);
        plan_copies(world);
        plan_random_moves(world);
    }
    for (uint32_t r = 0; r < world->size; r++) {
        lay_out(world, &world->ranks[r]);
    }
    run_op(world, stopped);
    if (!stopped) {
        check_memory(world);
        check_lanes(world);
        if (ring && !world->means) {
            check_sums(world);
        }
    }
    for (uint32_t r = 0; r < world->size; r++) {
        free_plan(&world->ranks[r].plan);
    }
    free_memory(world);
}

int main(int count, char **arguments) {
    const uint64_t first = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    const uint64_t seeds = count > 2 ? strtoull(arguments[2], NULL, 10) : 20;
    uint64_t dropped = 0, stops = 0;
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        fprintf(stderr, "seed %llu\n", (unsigned long long)seed); // the last one if it fails
        struct world *world = new_world(seed);
        for (int i = 0; i < 6; i++) {
            const bool stopped = below(&world->random, 2) && i < 5;
            world->number++;
            one_op(world, stopped);
            stops += stopped;
            world->roster += stopped;
        }
        for (uint32_t r = 0; r < world->size * MOST_RANKS; r++) {
            dropped += world->from[r / MOST_RANKS][r % MOST_RANKS].dropped;
        }
        free_world(world);
    }
    printf("%llu stops, %llu late records dropped\n", (unsigned long long)stops,
           (unsigned long long)dropped);
    return 0;
}
