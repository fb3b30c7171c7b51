// Fuzzes what parses records: a peer sends any bytes, which arrive in any pieces. What the library
// makes of them must be what a plain loop over the whole stream makes of them.
#include "toy.h"

#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>

// --- a network that brings the fuzzer's bytes

enum { PIECES = 8, MOST_EXPECTED = 4 };

static struct {
    const uint8_t *bytes, *pieces;
    uint64_t left, calls;
    bool closes;
} network;

static ssize_t fuzzed_recv(uint8_t *to, size_t nbytes) {
    const uint8_t piece = network.pieces[network.calls % PIECES];
    errno = EAGAIN;
    if ((network.calls++ % 2 && piece & 1) || (!network.left && !network.closes)) {
        return -1;
    }
    size_t count = piece / 2 == 127 ? nbytes : (size_t)piece / 2 + 1;
    count = count < nbytes ? count : nbytes;
    count = count < network.left ? count : network.left;
    memcpy(to, network.bytes, count);
    network.bytes += count;
    network.left -= count;
    return (ssize_t)count;
}

#define recv(fd, to, nbytes, flags) fuzzed_recv(to, nbytes)
#define setsockopt(fd, level, name, value, nbytes) 0
#include "../lane.c"
#undef recv
#undef setsockopt

static bool guess_is_right(const uint8_t *record, uint64_t body_bytes) {
    return !(record[PMESH_HEADER_BYTES + body_bytes] & 1);
}

// --- what must come out

enum { HELD = 100, MISSING }; // beside `enum pmesh_status`

struct outcome {
    int32_t status;
    uint32_t landed;
    uint64_t dropped, detail;
    int64_t completed;
};

struct stream {
    const uint8_t *bytes;
    uint64_t left;
    bool closes;
};

static int32_t end_of(const struct stream *stream) {
    return stream->closes ? PMESH_ENDED : MISSING;
}

// What one record at the front of the stream is. PMESH_STOPPED: it was dropped.
static int32_t judge(const struct pmesh_op *op, const struct stream *stream, uint64_t nbytes,
                     uint32_t segment, struct outcome *outcome) {
    const uint8_t *bytes = stream->bytes;
    if (stream->left < PMESH_HEADER_BYTES) {
        return end_of(stream);
    }
    const uint64_t body = pmesh_get(bytes, 4), roster = pmesh_get(bytes + 4, 8),
                   number = pmesh_get(bytes + 12, 8);
    const bool same_call = number == op->number && pmesh_get(bytes + 24, 8) == op->fingerprint;
    outcome->detail = body;
    if (body > PMESH_MAX_BODY_BYTES) {
        return PMESH_TOO_LARGE;
    }
    outcome->detail = 0;
    if (roster > op->roster) {
        return HELD;
    }
    const bool in_place = body == nbytes && pmesh_get(bytes + 20, 4) == segment;
    if (roster == op->roster && same_call && !in_place) {
        return PMESH_OUT_OF_PLACE;
    }
    if (stream->left < PMESH_OVERHEAD_BYTES + body) {
        return end_of(stream);
    }
    if (!guess_is_right(bytes, body)) {
        return PMESH_FORGED;
    }
    if (roster < op->roster) {
        return PMESH_STOPPED;
    }
    if (!same_call) {
        outcome->detail = number < op->number ? number : op->number;
        return PMESH_DIFFERS;
    }
    outcome->completed = (int64_t)pmesh_get(bytes + 32, 8);
    return PMESH_DONE;
}

static struct outcome plain(const struct pmesh_op *op, struct stream stream,
                            const struct pmesh_record *records, uint32_t count, uint8_t *into) {
    struct outcome outcome = {.completed = -1};
    while (outcome.landed < count) {
        const struct pmesh_record *record = &records[outcome.landed];
        outcome.status = judge(op, &stream, record->nbytes, outcome.landed, &outcome);
        if (outcome.status == PMESH_DONE) {
            memcpy(into + record->offset, stream.bytes + PMESH_HEADER_BYTES, record->nbytes);
            outcome.landed++;
        } else if (outcome.status == PMESH_STOPPED) {
            outcome.dropped++;
        } else {
            break;
        }
        const uint64_t end = PMESH_OVERHEAD_BYTES + pmesh_get(stream.bytes, 4);
        stream.bytes += end;
        stream.left -= end;
    }
    return outcome;
}

// --- what the library makes of it

static struct outcome received(struct pmesh_op *op, const struct pmesh_record *records,
                               uint32_t count) {
    struct pmesh_lane *lane = op->lanes[0];
    struct pmesh_waiting waiting = {0};
    struct outcome outcome = {0};
    while (outcome.landed < count && !outcome.status) {
        const struct pmesh_record *record = &records[outcome.landed];
        switch (pmesh_receive(op, 0, record, outcome.landed, &waiting)) {
        case PMESH_LANDED: outcome.landed++; break;
        case PMESH_MOVED: break;
        case PMESH_WAITS:
            if (waiting.held) {
                outcome.status = HELD;
            } else if (!network.left && !network.closes) {
                outcome.status = MISSING;
            }
            break;
        default: outcome.status = op->failure; break;
        }
        assert(lane->filled <= ROOM);
    }
    outcome.dropped = lane->dropped;
    outcome.detail = op->detail;
    outcome.completed = lane->peer_completed;
    return outcome;
}

static uint32_t expected_records(struct pmesh_record records[], const uint8_t *sizes,
                                 uint8_t count) {
    uint64_t offset = 0;
    for (uint32_t i = 0; i < count; i++) {
        records[i] = (struct pmesh_record){.offset = offset, .nbytes = sizes[i]};
        records[i].region = PMESH_RESULT;
        offset += sizes[i];
    }
    return (uint32_t)offset;
}

// The first bytes say what is expected and in which pieces the rest arrives.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    static uint8_t *in;
    struct pmesh_record records[MOST_EXPECTED];
    if (nbytes < 1 + MOST_EXPECTED + PIECES) {
        return 0;
    }
    in = in ? in : exactly(ROOM);
    const uint8_t count = data[0] % MOST_EXPECTED + 1;
    const uint32_t whole = expected_records(records, data + 1, count);
    const uint8_t *rest = data + 1 + MOST_EXPECTED + PIECES;
    const struct stream stream = {rest, nbytes - (size_t)(rest - data), data[0] & 128};
    struct pmesh_lane lane = {
        .in = in, .peer_completed = -1, .fd = -1, .wake_up_bytes = 32768, .asked = 1};
    struct pmesh_lane *lanes[] = {&lane};
    struct pmesh_op op = {
        .lanes = lanes, .open = (pmesh_function)guessable_open, .roster = 7, .number = 5};
    uint8_t *result = op.regions[PMESH_RESULT] = exactly(whole), *model = exactly(whole);
    op.fingerprint = 0x0102030405060708U;
    network.bytes = stream.bytes;
    network.left = stream.left;
    network.closes = stream.closes;
    network.pieces = data + 1 + MOST_EXPECTED;
    network.calls = 0;

    const struct outcome ours = received(&op, records, count);
    const struct outcome right = plain(&op, stream, records, count, model);
    assert(ours.status == right.status && ours.landed == right.landed);
    assert(ours.dropped == right.dropped && ours.completed == right.completed);
    assert(ours.detail == right.detail);
    const uint64_t arrived = ours.landed < count ? records[ours.landed].offset : whole;
    assert(!memcmp(result, model, arrived));
    free(result);
    free(model);
    return 0;
}
