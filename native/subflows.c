#include "subflows.h"
#include "records.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL // macOS; Python ignores the signal in its processes
#define MSG_NOSIGNAL 0
#endif

enum {
    ACK_RECORD_BYTES = PMESH_OVERHEAD_BYTES + PMESH_ACK_BODY_BYTES,
    FRAME_HEADER_BYTES = PMESH_NUMBER_BYTES + PMESH_HEADER_BYTES,
    LEAST_PACED_BYTES = 32 * 1024,       // less is too little to tell
    MOST_AT_ONCE = PMESH_WINDOW_RECORDS, // that are read in one call: a peer may send without end
};

// One connection; acknowledgements travel in the direction opposite to data.
struct subflow {
    uint32_t index;
    int fd;
    int32_t asked;               // SO_RCVLOWAT as it was set last
    uint32_t ack_begin, ack_end; // unsent, or what has come
    uint64_t acks;               // sealed or opened so far
    uint64_t bytes_read, filled; // `filled` of the header and the frame together
    uint64_t read_before;        // the wait that is measured
    bool is_paced;
    double looked_at; // when all acknowledgements that had come were read
    struct pmesh_frame *frame;
    uint8_t key[PMESH_KEY_BYTES];
    uint8_t ack[ACK_RECORD_BYTES];
    uint8_t header[FRAME_HEADER_BYTES];
};

struct pmesh_subflows {
    pthread_mutex_t lock;
    struct pmesh_lane *lane;
    struct pmesh_cipher cipher;
    bool sending, is_woken;
    bool waits, all_flow; // a wait for a record has begun, in the middle of one on all
    double waits_since;
    int wake[2]; // a pipe
    uint32_t count, lost_count, pace_count;
    struct pmesh_pool pool;
    struct pmesh_sends sends;
    struct pmesh_receives receives;
    struct subflow subflows[PMESH_MOST_SUBFLOWS]; // in the order of those of the window
    struct pmesh_lost_subflow lost[PMESH_MOST_SUBFLOWS];
    struct pmesh_pace paces[PMESH_MOST_SUBFLOWS];
};

// Who looks for acknowledgements less often does not know when they came.
static const double LATE_S = 0.0025;

enum outcome { READY, NOT_READY, WHOLE, LOST };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// --- the connections

static void forget(struct pmesh_subflows *subflows, uint32_t place) {
    if (subflows->subflows[place].frame) {
        pmesh_give_frame(&subflows->pool, subflows->subflows[place].frame);
    }
    if (subflows->sending) {
        pmesh_sends_drop(&subflows->sends, place);
    } else {
        pmesh_receives_drop(&subflows->receives, place);
    }
    subflows->count--;
    memmove(&subflows->subflows[place], &subflows->subflows[place + 1],
            (subflows->count - place) * sizeof *subflows->subflows);
}

static enum outcome lose(struct pmesh_subflows *subflows, uint32_t place, bool ended) {
    subflows->lost[subflows->lost_count++] =
        (struct pmesh_lost_subflow){subflows->subflows[place].index, ended};
    forget(subflows, place);
    return LOST;
}

// After a call that has failed with `errno`.
static enum outcome refused(struct pmesh_subflows *subflows, uint32_t place) {
    const bool ended = errno == ECONNRESET || errno == EPIPE || errno == ECONNABORTED;
    return pmesh_would_block(errno) ? NOT_READY : lose(subflows, place, ended);
}

struct pmesh_subflows *pmesh_subflows_new(struct pmesh_lane *lane, bool sending, int32_t aead,
                                          pmesh_function seal, pmesh_function open) {
    struct pmesh_subflows *subflows = calloc(1, sizeof *subflows);
    if (!subflows || pipe(subflows->wake)) {
        free(subflows);
        return NULL;
    }
    for (int i = 0; i < 2; i++) {
        fcntl(subflows->wake[i], F_SETFD, FD_CLOEXEC);
        fcntl(subflows->wake[i], F_SETFL, O_NONBLOCK);
    }
    pthread_mutex_init(&subflows->lock, NULL);
    subflows->lane = lane;
    subflows->cipher = (struct pmesh_cipher){seal, open, aead};
    subflows->sending = sending;
    pmesh_sends_begin(&subflows->sends, &subflows->pool);
    pmesh_receives_begin(&subflows->receives, &subflows->pool);
    return subflows;
}

void pmesh_subflows_free(struct pmesh_subflows *subflows) {
    while (subflows->count) {
        forget(subflows, subflows->count - 1);
    }
    pmesh_sends_end(&subflows->sends);
    pmesh_receives_end(&subflows->receives);
    pmesh_empty_pool(&subflows->pool);
    close(subflows->wake[0]);
    close(subflows->wake[1]);
    pthread_mutex_destroy(&subflows->lock);
    free(subflows);
}

int pmesh_subflows_wake_fd(const struct pmesh_subflows *subflows) {
    return subflows->wake[0];
}

bool pmesh_subflows_add(struct pmesh_subflows *subflows, uint32_t index, int fd,
                        const uint8_t key[PMESH_KEY_BYTES], uint64_t records, double bytes_per_s,
                        double round_trip_s) {
    pthread_mutex_lock(&subflows->lock);
    const bool has_room = subflows->count + subflows->lost_count < PMESH_MOST_SUBFLOWS;
    if (has_room) {
        struct subflow *subflow = &subflows->subflows[subflows->count++];
        *subflow = (struct subflow){.index = index, .fd = fd, .asked = 1, .acks = records};
        memcpy(subflow->key, key, PMESH_KEY_BYTES);
        if (subflows->sending) {
            pmesh_sends_add(&subflows->sends, index, bytes_per_s, round_trip_s, now());
        } else {
            pmesh_receives_add(&subflows->receives);
        }
    }
    pthread_mutex_unlock(&subflows->lock);
    return has_room;
}

void pmesh_subflows_drop(struct pmesh_subflows *subflows, uint32_t index) {
    pthread_mutex_lock(&subflows->lock);
    for (uint32_t i = 0; i < subflows->count; i++) {
        if (subflows->subflows[i].index == index) {
            forget(subflows, i);
            break;
        }
    }
    pthread_mutex_unlock(&subflows->lock);
}

bool pmesh_subflows_next_lost(struct pmesh_subflows *subflows, struct pmesh_lost_subflow *lost) {
    pthread_mutex_lock(&subflows->lock);
    const bool has = subflows->lost_count;
    if (has) {
        *lost = subflows->lost[--subflows->lost_count];
    }
    pthread_mutex_unlock(&subflows->lock);
    return has;
}

// --- what goes out

static enum outcome write_some(struct pmesh_subflows *subflows, uint32_t place, bool *moved,
                               double at) {
    while (true) {
        uint64_t nbytes;
        const uint8_t *part = pmesh_sends_next_part(&subflows->sends, place, &nbytes);
        if (!nbytes) {
            return READY;
        }
        const ssize_t count =
            send(subflows->subflows[place].fd, part, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0) {
            return refused(subflows, place);
        }
        subflows->lane->bytes_sent += (uint64_t)count;
        pmesh_sends_wrote(&subflows->sends, place, (uint64_t)count, at);
        *moved = true;
    }
}

static bool take_ack_untrusted(struct pmesh_subflows *subflows, uint32_t place, double at,
                               bool is_late) {
    struct subflow *subflow = &subflows->subflows[place];
    uint8_t body[PMESH_ACK_BODY_BYTES];
    if (!pmesh_open_untrusted(&subflows->cipher, subflow->key, ++subflow->acks, subflow->ack, body,
                              sizeof body)) {
        return false;
    }
    const struct pmesh_ack ack = {pmesh_get(body, 8), pmesh_get(body + 8, 8), body[16]};
    return pmesh_sends_acknowledge_untrusted(&subflows->sends, place, &ack, at, is_late);
}

static enum outcome read_acks(struct pmesh_subflows *subflows, uint32_t place, bool *moved,
                              double at) {
    const bool is_late = at - subflows->subflows[place].looked_at > LATE_S;
    subflows->subflows[place].looked_at = at;
    for (int left = MOST_AT_ONCE; left; left--) {
        struct subflow *subflow = &subflows->subflows[place];
        const ssize_t count = recv(subflow->fd, subflow->ack + subflow->ack_end,
                                   ACK_RECORD_BYTES - subflow->ack_end, MSG_DONTWAIT);
        if (count <= 0) {
            return count ? refused(subflows, place) : lose(subflows, place, true);
        }
        subflow->ack_end += (uint32_t)count;
        if (subflow->ack_end == ACK_RECORD_BYTES) {
            subflow->ack_end = 0;
            if (!take_ack_untrusted(subflows, place, at, is_late)) {
                return lose(subflows, place, true);
            }
            *moved = true;
        }
    }
    return READY;
}

static void seal_ack(struct pmesh_subflows *subflows, uint32_t place, bool waiting) {
    struct subflow *subflow = &subflows->subflows[place];
    const struct pmesh_ack ack = pmesh_receives_acknowledge(&subflows->receives, place, waiting);
    uint8_t body[PMESH_ACK_BODY_BYTES];
    pmesh_put(body, ack.received, 8);
    pmesh_put(body + 8, ack.wanted, 8);
    body[16] = ack.waiting;
    memset(subflow->ack, 0, PMESH_HEADER_BYTES);
    pmesh_put(subflow->ack, PMESH_ACK_BODY_BYTES, 4);
    pmesh_put(subflow->ack + 32, UINT64_MAX, 8); // `completed` is -1
    pmesh_seal(&subflows->cipher, subflow->key, ++subflow->acks, subflow->ack, body, sizeof body);
    subflow->ack_begin = 0;
    subflow->ack_end = ACK_RECORD_BYTES;
}

static enum outcome write_ack(struct pmesh_subflows *subflows, uint32_t place, bool waiting,
                              bool force) {
    struct subflow *subflow = &subflows->subflows[place];
    if (subflow->ack_begin == subflow->ack_end &&
        (pmesh_receives_is_due(&subflows->receives, place, waiting) ||
         (force && pmesh_receives_owes(&subflows->receives, place)))) {
        seal_ack(subflows, place, waiting);
    }
    if (subflow->ack_begin == subflow->ack_end) {
        return READY;
    }
    const ssize_t count = send(subflow->fd, subflow->ack + subflow->ack_begin,
                               subflow->ack_end - subflow->ack_begin, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
        return refused(subflows, place);
    }
    subflow->ack_begin += (uint32_t)count;
    return READY;
}

static void set_wake(struct pmesh_subflows *subflows, bool wakes) {
    uint8_t byte = 0;
    if (wakes && !subflows->is_woken) {
        subflows->is_woken = write(subflows->wake[1], &byte, 1) == 1;
    } else if (!wakes && subflows->is_woken) {
        subflows->is_woken = read(subflows->wake[0], &byte, 1) != 1;
    }
}

// One that is lost by it makes place for the next.
static void read_all_acks(struct pmesh_subflows *subflows, bool *moved, double at) {
    for (uint32_t i = 0; i < subflows->count; i += read_acks(subflows, i, moved, at) != LOST) {
    }
}

static bool pump_locked(struct pmesh_subflows *subflows, bool outside) {
    const double at = now();
    bool moved = false;
    if (subflows->sending) {
        read_all_acks(subflows, &moved, at);
        pmesh_sends_relieve(&subflows->sends, at);
        for (uint32_t i = 0; i < subflows->count;
             i += write_some(subflows, i, &moved, at) != LOST) {
        }
    } else {
        for (uint32_t i = 0; i < subflows->count;
             i += write_ack(subflows, i, false, outside) != LOST) {
        }
    }
    set_wake(subflows, outside);
    return moved;
}

bool pmesh_subflows_pump(struct pmesh_subflows *subflows, bool outside) {
    pthread_mutex_lock(&subflows->lock);
    const bool moved = pump_locked(subflows, outside);
    pthread_mutex_unlock(&subflows->lock);
    return moved;
}

uint32_t pmesh_subflows_state(struct pmesh_subflows *subflows) {
    pthread_mutex_lock(&subflows->lock);
    uint32_t state = 0;
    state |= pmesh_sends_has_room(&subflows->sends) ? PMESH_SUBFLOWS_HAVE_ROOM : 0;
    state |= pmesh_sends_has_unsent(&subflows->sends) ? PMESH_SUBFLOWS_HAVE_UNSENT : 0;
    state |= pmesh_sends_is_empty(&subflows->sends) ? PMESH_SUBFLOWS_ARE_EMPTY : 0;
    state |= pmesh_receives_first(&subflows->receives) ? PMESH_SUBFLOWS_HAVE_FIRST : 0;
    for (uint32_t i = 0; i < subflows->receives.count; i++) {
        state |= pmesh_receives_owes(&subflows->receives, i) ? PMESH_SUBFLOWS_OWE : 0;
    }
    pthread_mutex_unlock(&subflows->lock);
    return state;
}

bool pmesh_subflows_has_to_write(struct pmesh_subflows *subflows, uint32_t index) {
    bool has = false;
    pthread_mutex_lock(&subflows->lock);
    for (uint32_t i = 0; i < subflows->sends.count; i++) {
        has |=
            subflows->subflows[i].index == index && pmesh_sends_has_to_write(&subflows->sends, i);
    }
    pthread_mutex_unlock(&subflows->lock);
    return has;
}

static struct pmesh_frame *frame_of(uint8_t *record) {
    return (struct pmesh_frame *)(void *)(record - PMESH_NUMBER_BYTES -
                                          offsetof(struct pmesh_frame, bytes));
}

uint8_t *pmesh_subflows_take(struct pmesh_subflows *subflows, uint64_t nbytes) {
    pthread_mutex_lock(&subflows->lock);
    struct pmesh_frame *frame = pmesh_take_frame(&subflows->pool, PMESH_NUMBER_BYTES + nbytes);
    if (frame) {
        pmesh_put(frame->bytes, subflows->sends.next, PMESH_NUMBER_BYTES);
    }
    pthread_mutex_unlock(&subflows->lock);
    return frame ? frame->bytes + PMESH_NUMBER_BYTES : NULL;
}

void pmesh_subflows_put(struct pmesh_subflows *subflows, uint8_t *record) {
    bool moved = false;
    pthread_mutex_lock(&subflows->lock);
    read_all_acks(subflows, &moved, now()); // so that it goes where really least is under way
    pmesh_sends_put(&subflows->sends, frame_of(record));
    pthread_mutex_unlock(&subflows->lock);
}

// --- what comes in

// Make the socket readable only once the rest is there, or enough for a wakeup.
static void ask_for_rest(const struct pmesh_subflows *subflows, struct subflow *subflow) {
    const uint64_t whole = subflow->frame ? subflow->frame->nbytes : FRAME_HEADER_BYTES;
    const uint64_t rest = whole - subflow->filled;
    const int most = subflows->lane->wake_up_bytes;
    const int asked = rest < (uint64_t)most ? (int)rest : most;
    if (asked != subflow->asked) {
        // It may fail after a reset; then the next read says so.
        (void)setsockopt(subflow->fd, SOL_SOCKET, SO_RCVLOWAT, &asked, sizeof asked);
        subflow->asked = asked;
    }
}

// The header is whole: take a frame for the rest. Returns false if it is impossible.
static bool begin_frame_untrusted(struct pmesh_subflows *subflows, struct subflow *subflow) {
    const uint64_t body_bytes = pmesh_get(subflow->header + PMESH_NUMBER_BYTES, 4);
    if (body_bytes > PMESH_MAX_BODY_BYTES) {
        return false;
    }
    subflow->frame = pmesh_take_frame(&subflows->pool, PMESH_FRAME_OVERHEAD_BYTES + body_bytes);
    if (!subflow->frame) {
        return false;
    }
    memcpy(subflow->frame->bytes, subflow->header, FRAME_HEADER_BYTES);
    return true;
}

// Receive once; WHOLE if that ends a record.
static enum outcome read_once(struct pmesh_subflows *subflows, uint32_t place) {
    struct subflow *subflow = &subflows->subflows[place];
    struct pmesh_frame *frame = subflow->frame;
    uint8_t *into = frame ? frame->bytes : subflow->header;
    const uint64_t whole = frame ? frame->nbytes : FRAME_HEADER_BYTES;
    const ssize_t count =
        recv(subflow->fd, into + subflow->filled, whole - subflow->filled, MSG_DONTWAIT);
    if (count <= 0) {
        return count ? refused(subflows, place) : lose(subflows, place, true);
    }
    subflow->filled += (uint64_t)count;
    subflow->bytes_read += (uint64_t)count;
    subflows->lane->bytes_received += (uint64_t)count;
    pmesh_receives_read(&subflows->receives, place, (uint64_t)count);
    if (!frame && subflow->filled == whole) {
        return begin_frame_untrusted(subflows, subflow) ? READY : lose(subflows, place, true);
    }
    if (!frame || subflow->filled < whole) {
        return READY;
    }
    if (!pmesh_receives_arrived_untrusted(&subflows->receives, place, frame)) {
        return lose(subflows, place, true);
    }
    subflow->frame = NULL;
    subflow->filled = 0;
    return WHOLE;
}

// Read one record; WHOLE if all of it is there.
static enum outcome read_record(struct pmesh_subflows *subflows, uint32_t place) {
    enum outcome read = READY;
    while (read == READY) {
        read = read_once(subflows, place);
    }
    if (read == LOST) {
        return LOST;
    }
    if (read == NOT_READY) {
        ask_for_rest(subflows, &subflows->subflows[place]);
    }
    return write_ack(subflows, place, read == NOT_READY, false) == LOST ? LOST : read;
}

static void begin_wait(struct pmesh_subflows *subflows, double read_at) {
    subflows->waits = true;
    subflows->waits_since = read_at;
    subflows->all_flow = subflows->count;
    for (uint32_t i = 0; i < subflows->count; i++) {
        struct subflow *subflow = &subflows->subflows[i];
        subflows->all_flow &= !!subflow->frame;
        subflow->read_before = subflow->bytes_read;
        subflow->is_paced = true;
    }
}

// A record has come: note how fast, if all that came meanwhile was on its way already.
static void end_wait(struct pmesh_subflows *subflows) {
    uint64_t came = 0;
    for (uint32_t i = 0; i < subflows->count; i++) {
        const struct subflow *subflow = &subflows->subflows[i];
        came += subflow->is_paced ? subflow->bytes_read - subflow->read_before : 0;
    }
    const bool tells = subflows->waits && subflows->all_flow && came >= LEAST_PACED_BYTES;
    const double seconds = tells ? now() - subflows->waits_since : 0;
    subflows->pace_count = tells ? 0 : subflows->pace_count;
    for (uint32_t i = 0; i < subflows->count; i++) {
        struct subflow *subflow = &subflows->subflows[i];
        if (tells && subflow->is_paced) {
            subflows->paces[subflows->pace_count++] = (struct pmesh_pace){
                .seconds = seconds,
                .nbytes = subflow->bytes_read - subflow->read_before,
                .index = subflow->index,
            };
        }
        subflow->is_paced = false;
    }
    subflows->waits = false;
}

// Read what is there of all, until it holds the next record. Returns whether it may hold more.
static bool read_all(struct pmesh_subflows *subflows) {
    bool more = false;
    for (uint32_t i = 0; i < subflows->count;) {
        const enum outcome read = read_record(subflows, i);
        more |= read == WHOLE;
        i += read != LOST;
    }
    return more;
}

uint8_t *pmesh_subflows_read(struct pmesh_subflows *subflows, bool waited, uint64_t *nbytes) {
    pthread_mutex_lock(&subflows->lock);
    struct pmesh_frame *first = pmesh_receives_first(&subflows->receives);
    double read_at = 0;
    set_wake(subflows, false);
    subflows->waits &= waited;
    bool more = true;
    for (int left = MOST_AT_ONCE; !first && more && left; left--) {
        read_at = now();
        more = read_all(subflows);
        first = pmesh_receives_first(&subflows->receives);
    }
    set_wake(subflows, !first && more); // the rest may be less than makes a socket readable
    if (first) {
        end_wait(subflows);
    } else if (!subflows->waits) {
        begin_wait(subflows, read_at);
    }
    *nbytes = first ? first->nbytes - PMESH_NUMBER_BYTES : 0;
    pthread_mutex_unlock(&subflows->lock);
    return first ? first->bytes + PMESH_NUMBER_BYTES : NULL;
}

void pmesh_subflows_opened(struct pmesh_subflows *subflows) {
    pthread_mutex_lock(&subflows->lock);
    pmesh_receives_opened(&subflows->receives);
    pthread_mutex_unlock(&subflows->lock);
}

bool pmesh_subflows_next_pace(struct pmesh_subflows *subflows, struct pmesh_pace *pace) {
    pthread_mutex_lock(&subflows->lock);
    const bool has = subflows->pace_count;
    if (has) {
        *pace = subflows->paces[--subflows->pace_count];
    }
    pthread_mutex_unlock(&subflows->lock);
    return has;
}

nfds_t pmesh_subflows_polled(struct pmesh_subflows *subflows, struct pollfd polled[]) {
    nfds_t count = 0;
    pthread_mutex_lock(&subflows->lock);
    polled[count++] = (struct pollfd){.fd = subflows->wake[0], .events = POLLIN};
    for (uint32_t i = 0; i < subflows->count; i++) {
        const bool writes = subflows->sending && pmesh_sends_has_to_write(&subflows->sends, i);
        const short events = (short)(writes ? POLLIN | POLLOUT : POLLIN);
        polled[count++] = (struct pollfd){.fd = subflows->subflows[i].fd, .events = events};
    }
    pthread_mutex_unlock(&subflows->lock);
    return count;
}
