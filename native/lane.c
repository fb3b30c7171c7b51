// The records of one lane: sealed and sent, received and opened. `pmesh/net/lanes/lane.py` does the
// same in Python, and says more. No function here waits.
#include "records.h"
#include "subflows.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#ifndef MSG_NOSIGNAL // macOS; Python ignores the signal in its processes
#define MSG_NOSIGNAL 0
#endif

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// --- the header: big endian, as `pmesh.core.wire.records` packs it

struct header {
    uint64_t body_bytes, roster, op, segment, fingerprint;
    int64_t completed;
};

static void write_header(uint8_t *to, const struct header *header) {
    pmesh_put(to, header->body_bytes, 4);
    pmesh_put(to + 4, header->roster, 8);
    pmesh_put(to + 12, header->op, 8);
    pmesh_put(to + 20, header->segment, 4);
    pmesh_put(to + 24, header->fingerprint, 8);
    pmesh_put(to + 32, (uint64_t)header->completed, 8);
}

static struct header read_header_untrusted(const uint8_t *from) {
    return (struct header){
        .body_bytes = pmesh_get(from, 4),
        .roster = pmesh_get(from + 4, 8),
        .op = pmesh_get(from + 12, 8),
        .segment = pmesh_get(from + 20, 4),
        .fingerprint = pmesh_get(from + 24, 8),
        .completed = (int64_t)pmesh_get(from + 32, 8),
    };
}

// The number of a record is its nonce, of 16 bytes.
static void write_nonce(uint8_t nonce[16], uint64_t number) {
    memset(nonce, 0, 8);
    pmesh_put(nonce + 8, number, 8);
}

// Note why the op can't go on. If both of its threads fail, the first one is heard.
static enum pmesh_progress broke(struct pmesh_op *op, uint32_t track, enum pmesh_status status,
                                 uint64_t detail) {
    if (!atomic_exchange(&op->has_failed, true)) {
        op->failure = (int32_t)status;
        op->track = track;
        op->detail = detail;
    }
    return PMESH_BROKE;
}

bool pmesh_would_block(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

// --- the AEAD

void pmesh_seal(const struct pmesh_cipher *cipher, const uint8_t key[PMESH_KEY_BYTES],
                uint64_t number, uint8_t *record, const uint8_t *body, uint64_t nbytes) {
    uint8_t nonce[16], *to = record + PMESH_HEADER_BYTES;
    write_nonce(nonce, number);
    if (cipher->aead == PMESH_LIBAEGIS) {
        ((pmesh_aegis_seal)cipher->seal)(to, PMESH_TAG_BYTES, body, nbytes, record,
                                         PMESH_HEADER_BYTES, nonce, key);
    } else {
        ((pmesh_sodium_seal)cipher->seal)(to, NULL, body, nbytes, record, PMESH_HEADER_BYTES, NULL,
                                          nonce, key);
    }
}

bool pmesh_open_untrusted(const struct pmesh_cipher *cipher, const uint8_t key[PMESH_KEY_BYTES],
                          uint64_t number, const uint8_t *record, uint8_t *body, uint64_t nbytes) {
    const uint8_t *from = record + PMESH_HEADER_BYTES;
    uint8_t nonce[16];
    write_nonce(nonce, number);
    if (cipher->aead == PMESH_LIBAEGIS) {
        return !((pmesh_aegis_open)cipher->open)(body, from, nbytes + PMESH_TAG_BYTES,
                                                 PMESH_TAG_BYTES, record, PMESH_HEADER_BYTES, nonce,
                                                 key);
    }
    return !((pmesh_sodium_open)cipher->open)(body, NULL, NULL, from, nbytes + PMESH_TAG_BYTES,
                                              record, PMESH_HEADER_BYTES, nonce, key);
}

static struct pmesh_cipher cipher_of(const struct pmesh_op *op) {
    return (struct pmesh_cipher){op->seal, op->open, op->aead};
}

// --- out

bool pmesh_may_seal(const struct pmesh_lane *lane) {
    return lane->subflows ? pmesh_subflows_state(lane->subflows) & PMESH_SUBFLOWS_HAVE_ROOM
                          : lane->unsent_begin == lane->unsent_end;
}

bool pmesh_has_unsent(const struct pmesh_lane *lane) {
    return lane->subflows ? pmesh_subflows_state(lane->subflows) & PMESH_SUBFLOWS_HAVE_UNSENT
                          : lane->unsent_begin != lane->unsent_end;
}

bool pmesh_seal_record(struct pmesh_op *op, uint32_t track, const struct pmesh_record *record,
                       uint32_t segment) {
    struct pmesh_lane *lane = op->lanes[track];
    const uint64_t nbytes = PMESH_OVERHEAD_BYTES + record->nbytes;
    const struct pmesh_cipher cipher = cipher_of(op);
    const struct header header = {
        .body_bytes = record->nbytes,
        .roster = op->roster,
        .op = op->number,
        .segment = segment,
        .fingerprint = op->fingerprint,
        .completed = op->completed,
    };
    uint8_t *to = lane->subflows ? pmesh_subflows_take(lane->subflows, nbytes) : lane->out;
    if (!to) {
        broke(op, track, PMESH_FAILED, ENOMEM);
        return false;
    }
    write_header(to, &header);
    pmesh_seal(&cipher, lane->seal_key, ++lane->sealed, to,
               op->regions[record->region] + record->offset, record->nbytes);
    if (lane->subflows) {
        pmesh_subflows_put(lane->subflows, to);
    } else {
        lane->unsent_begin = 0;
        lane->unsent_end = nbytes;
    }
    return true;
}

enum pmesh_progress pmesh_flush(struct pmesh_op *op, uint32_t track) {
    struct pmesh_lane *lane = op->lanes[track];
    const uint64_t unsent = lane->unsent_end - lane->unsent_begin;
    if (lane->subflows) {
        return pmesh_subflows_pump(lane->subflows, false) ? PMESH_MOVED : PMESH_WAITS;
    }
    if (!unsent) {
        return PMESH_MOVED;
    }
    const ssize_t sent =
        send(lane->fd, lane->out + lane->unsent_begin, unsent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        return pmesh_would_block(errno) ? PMESH_WAITS
                                        : broke(op, track, PMESH_FAILED, (uint64_t)errno);
    }
    lane->unsent_begin += (uint64_t)sent;
    lane->bytes_sent += (uint64_t)sent;
    return PMESH_MOVED;
}

// --- in

static void ask_for(struct pmesh_lane *lane, uint64_t nbytes) {
    const int most = lane->wake_up_bytes;
    const int asked = nbytes < (uint64_t)most ? (int)nbytes : most;
    if (asked != lane->asked) {
        // It may fail after a reset; then the next read says so.
        (void)setsockopt(lane->fd, SOL_SOCKET, SO_RCVLOWAT, &asked, sizeof asked);
        lane->asked = asked;
    }
}

// Read until `in` holds `enough`, at most `limit`. PMESH_LANDED means that it does.
static enum pmesh_progress fill(struct pmesh_op *op, uint32_t track, uint64_t enough,
                                uint64_t limit) {
    struct pmesh_lane *lane = op->lanes[track];
    if (lane->filled >= enough) {
        return PMESH_LANDED;
    }
    const ssize_t count =
        recv(lane->fd, lane->in + lane->filled, limit - lane->filled, MSG_DONTWAIT);
    if (count < 0 && pmesh_would_block(errno)) {
        ask_for(lane, enough - lane->filled);
        return PMESH_WAITS;
    }
    if (count <= 0) {
        return count ? broke(op, track, PMESH_FAILED, (uint64_t)errno)
                     : broke(op, track, PMESH_ENDED, 0);
    }
    lane->filled += (uint64_t)count;
    lane->bytes_received += (uint64_t)count;
    return lane->filled >= enough ? PMESH_LANDED : PMESH_MOVED;
}

// Make `in` the next record of a lane of several connections, once it is there, whole.
static enum pmesh_progress fill_from_subflows(struct pmesh_lane *lane,
                                              struct pmesh_waiting *waiting) {
    lane->in = pmesh_subflows_read(lane->subflows, waiting->waited, &lane->filled);
    waiting->waited = !lane->in;
    return lane->in ? PMESH_LANDED : PMESH_WAITS;
}

// Open the record that `in` begins with; what came after it moves to the front.
static bool open_untrusted(const struct pmesh_op *op, struct pmesh_lane *lane, uint64_t body_bytes,
                           uint8_t *into) {
    const struct pmesh_cipher cipher = cipher_of(op);
    const uint64_t end = PMESH_OVERHEAD_BYTES + body_bytes;
    if (!pmesh_open_untrusted(&cipher, lane->open_key, ++lane->opened, lane->in, into,
                              body_bytes)) {
        return false;
    }
    lane->filled -= end;
    if (lane->subflows) {
        pmesh_subflows_opened(lane->subflows);
    } else {
        memmove(lane->in, lane->in + end, (size_t)lane->filled);
    }
    return true;
}

// Drop a record that comes too late (V4); any other that is not the expected one breaks the lane,
// or shows that the peer called something else.
static enum pmesh_progress refuse(struct pmesh_op *op, uint32_t track,
                                  const struct header *header) {
    struct pmesh_lane *lane = op->lanes[track];
    const bool same_call = header->op == op->number && header->fingerprint == op->fingerprint;
    if (header->roster == op->roster && same_call) {
        return broke(op, track, PMESH_OUT_OF_PLACE, 0);
    }
    const uint64_t end = PMESH_OVERHEAD_BYTES + header->body_bytes;
    const enum pmesh_progress filled = fill(op, track, end, end);
    if (filled != PMESH_LANDED) {
        return filled;
    }
    if (!open_untrusted(op, lane, header->body_bytes, lane->in + PMESH_HEADER_BYTES)) {
        return broke(op, track, PMESH_FORGED, 0);
    }
    if (header->roster == op->roster) {
        // The lower op has ended at one end, without its record being read here or sent there.
        return broke(op, track, PMESH_DIFFERS, header->op < op->number ? header->op : op->number);
    }
    lane->dropped++;
    return PMESH_MOVED;
}

static void note_pace(struct pmesh_lane *lane, struct pmesh_waiting *waiting, uint64_t end) {
    const uint64_t came = end - waiting->paced_from;
    if (waiting->since > 0 && came >= 32 * 1024) { // less is too little to tell
        lane->paced_bytes += came;
        lane->paced_s += now() - waiting->since;
    }
    waiting->since = 0;
}

// Read the body of the expected record, whose header is there, and open it into its place.
static enum pmesh_progress receive_body(struct pmesh_op *op, uint32_t track,
                                        const struct pmesh_record *record, int64_t completed,
                                        struct pmesh_waiting *waiting) {
    struct pmesh_lane *lane = op->lanes[track];
    const uint64_t end = PMESH_OVERHEAD_BYTES + record->nbytes;
    // Before the read: this thread may lose its core after it, and then much would come at once.
    const double began = waiting->since > 0 ? waiting->since : now();
    const enum pmesh_progress filled = fill(op, track, end, end);
    if (filled == PMESH_WAITS && waiting->since <= 0) { // all that was there is read
        waiting->since = began;
        waiting->paced_from = lane->filled;
    }
    if (filled != PMESH_LANDED) {
        return filled;
    }
    note_pace(lane, waiting, end);
    if (!open_untrusted(op, lane, record->nbytes, op->regions[record->region] + record->offset)) {
        return broke(op, track, PMESH_FORGED, 0);
    }
    lane->peer_completed = completed;
    return PMESH_LANDED;
}

enum pmesh_progress pmesh_receive(struct pmesh_op *op, uint32_t track,
                                  const struct pmesh_record *record, uint32_t segment,
                                  struct pmesh_waiting *waiting) {
    struct pmesh_lane *lane = op->lanes[track];
    const enum pmesh_progress filled =
        lane->subflows ? fill_from_subflows(lane, waiting)
                       : fill(op, track, PMESH_HEADER_BYTES, PMESH_OVERHEAD_BYTES + record->nbytes);
    if (filled != PMESH_LANDED) {
        return filled;
    }
    const struct header header = read_header_untrusted(lane->in);
    if (header.body_bytes > PMESH_MAX_BODY_BYTES) {
        return broke(op, track, PMESH_TOO_LARGE, header.body_bytes);
    }
    if (header.roster > op->roster) {
        waiting->held = true; // V4: it stays here until a call expects it
        return PMESH_WAITS;
    }
    const bool expected = header.body_bytes == record->nbytes && header.roster == op->roster &&
                          header.op == op->number && header.segment == segment &&
                          header.fingerprint == op->fingerprint;
    return expected ? receive_body(op, track, record, header.completed, waiting)
                    : refuse(op, track, &header);
}
