// Fuzzes a lane of several connections: a peer sends any bytes over them, which arrive in any
// pieces, and paths come and go. No byte makes the library leave its memory or keep more than a
// window, and what it hands on is in order, each record once.
#include "toy.h"

#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>

// --- a network that brings the fuzzer's bytes, and takes some

enum { STEPS = 64 };

static struct {
    const uint8_t *bytes;
    uint64_t left;
} network;

static uint8_t next_byte(void) {
    if (!network.left) {
        return 0;
    }
    network.left--;
    return *network.bytes++;
}

// A small piece, all that is left, nothing yet, or the end.
static ssize_t fuzzed_recv(uint8_t *to, size_t nbytes) {
    const uint8_t piece = next_byte();
    errno = EAGAIN;
    if (!network.left || piece < 8) {
        return piece == 1 ? 0 : -1;
    }
    size_t count = piece > 200 ? nbytes : piece;
    count = count < nbytes ? count : nbytes;
    memset(to, 0, count);
    for (size_t i = 0; i < count && i < 64; i++) { // the rest of a long one says nothing
        to[i] = next_byte();
    }
    return (ssize_t)count;
}

// All of it is there: ASan looks.
static void check_readable(const uint8_t *bytes, uint64_t nbytes) {
    static volatile uint8_t sum;
    for (uint64_t i = 0; i < nbytes; i++) {
        sum = (uint8_t)(sum + bytes[i]);
    }
}

static ssize_t fuzzed_send(const uint8_t *from, size_t nbytes) {
    check_readable(from, nbytes);
    const uint8_t piece = next_byte();
    errno = piece == 1 ? EPIPE : EAGAIN;
    return piece < 8 ? -1 : piece < nbytes ? piece : (ssize_t)nbytes;
}

#define recv(fd, to, nbytes, flags) fuzzed_recv(to, nbytes)
#define send(fd, from, nbytes, flags) fuzzed_send(from, nbytes)
#define setsockopt(fd, level, name, value, nbytes) 0
#include "../subflows.c"
#undef recv
#undef send
#undef setsockopt

// Each record that is kept lies in its place, and nothing that came before is there once more.
static uint64_t kept_bytes(const struct pmesh_receives *receives) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < PMESH_FRAMES_KEPT; i++) {
        const struct pmesh_frame *frame = receives->frames[i];
        if (frame) {
            const uint64_t number = pmesh_get(frame->bytes, PMESH_NUMBER_BYTES);
            assert(number >= receives->opened && number % PMESH_FRAMES_KEPT == i);
            bytes += frame->nbytes;
        }
    }
    return bytes;
}

static void check_window(const struct pmesh_subflows *subflows) {
    const struct pmesh_sends *sends = &subflows->sends;
    const uint64_t largest = PMESH_MOST_SUBFLOWS * (uint64_t)PMESH_MAX_FRAME_BYTES;
    assert(sends->wanted <= sends->next && sends->next - sends->wanted <= PMESH_WINDOW_RECORDS);
    assert(kept_bytes(&subflows->receives) <= PMESH_WINDOW_BYTES + largest);
    assert(subflows->receives.opened <= subflows->receives.lacks);
    assert(subflows->count + subflows->lost_count <= PMESH_MOST_SUBFLOWS);
}

static void put_one(struct pmesh_subflows *subflows) {
    const uint64_t nbytes = PMESH_OVERHEAD_BYTES + next_byte() * (uint64_t)next_byte();
    uint8_t *record = pmesh_subflows_take(subflows, nbytes);
    assert(record);
    memset(record, 0, nbytes);
    pmesh_subflows_put(subflows, record);
}

static void read_one(struct pmesh_subflows *subflows) {
    uint64_t nbytes = 0;
    const uint64_t number = subflows->receives.opened;
    const uint8_t *record = pmesh_subflows_read(subflows, next_byte() & 1, &nbytes);
    if (record) {
        assert(pmesh_get(record - PMESH_NUMBER_BYTES, PMESH_NUMBER_BYTES) == number);
        assert(nbytes == PMESH_OVERHEAD_BYTES + pmesh_get(record, 4));
        check_readable(record, nbytes);
        pmesh_subflows_opened(subflows);
        assert(subflows->receives.opened == number + 1);
    }
}

static void step(struct pmesh_subflows *subflows, uint32_t index) {
    static const uint8_t KEY[PMESH_KEY_BYTES];
    struct pmesh_lost_subflow lost;
    struct pmesh_pace pace;
    switch (next_byte() % 8) {
    case 0: pmesh_subflows_add(subflows, index, -1, KEY, 0, 1000.0 * next_byte(), 0.001); break;
    case 1: pmesh_subflows_drop(subflows, next_byte()); break;
    case 2: pmesh_subflows_pump(subflows, next_byte() & 1); break;
    case 3:
        while (pmesh_subflows_next_lost(subflows, &lost)) {
            assert(lost.index <= index);
        }
        break;
    case 4: pmesh_subflows_next_pace(subflows, &pace); break;
    default:
        if (!subflows->sending) {
            read_one(subflows);
        } else if (pmesh_subflows_state(subflows) & PMESH_SUBFLOWS_HAVE_ROOM) {
            put_one(subflows);
        }
        break;
    }
}

// The first byte says which end it is, and how many connections there are at first.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t nbytes) {
    static const uint8_t KEY[PMESH_KEY_BYTES];
    struct pmesh_lane lane = {.wake_up_bytes = 32768};
    network.bytes = data;
    network.left = nbytes;
    const uint8_t first = next_byte();
    struct pmesh_subflows *subflows =
        pmesh_subflows_new(&lane, first & 1, PMESH_LIBSODIUM, (pmesh_function)toy_seal,
                           (pmesh_function)guessable_open);
    assert(subflows);
    for (uint32_t i = 0; i < 1U + first / 2 % 3; i++) {
        pmesh_subflows_add(subflows, i, -1, KEY, 0, 1e6, 0);
    }
    for (uint32_t i = 0; i < STEPS && network.left; i++) {
        step(subflows, 3 + i);
        check_window(subflows);
    }
    pmesh_subflows_free(subflows);
    return 0;
}
