// The two windows of a lane over several connections: `pmesh/core/wire/subflows.py` does the same,
// and says more. No function here waits, reads a clock or knows a socket.
#ifndef PMESH_WINDOWS_H
#define PMESH_WINDOWS_H

#include "pmesh.h"

enum {
    PMESH_MOST_SUBFLOWS = 16,
    PMESH_NUMBER_BYTES = 8,
    PMESH_FRAME_OVERHEAD_BYTES = PMESH_NUMBER_BYTES + PMESH_OVERHEAD_BYTES,
    PMESH_MAX_FRAME_BYTES = PMESH_FRAME_OVERHEAD_BYTES + PMESH_MAX_BODY_BYTES,
    PMESH_WINDOW_RECORDS = 256,
    PMESH_WINDOW_BYTES = 16 * 1024 * 1024,
    PMESH_ACK_BODY_BYTES = 17,
    PMESH_FRAMES_TO_REUSE = 64,
    // In order and not opened, or early: at most a window, then what one reading of all brings.
    PMESH_FRAMES_KEPT = 4 * PMESH_WINDOW_RECORDS,
};

// A sealed record with its number in front. Its last user gives it back.
struct pmesh_frame {
    uint64_t nbytes, room;
    uint32_t users, unused;
    uint8_t bytes[];
};

// Frames that nobody uses; the one that was given last is still in the cache, and taken first.
struct pmesh_pool {
    struct pmesh_frame *frames[PMESH_FRAMES_TO_REUSE];
    uint64_t bytes;
    uint32_t count;
};

// Returns a frame with one user; NULL if there is no memory.
struct pmesh_frame *pmesh_take_frame(struct pmesh_pool *pool, uint64_t nbytes);
void pmesh_give_frame(struct pmesh_pool *pool, struct pmesh_frame *frame);
void pmesh_empty_pool(struct pmesh_pool *pool);

struct pmesh_ack {
    uint64_t received, wanted;
    bool waiting;
};

// --- the sender's side

enum pmesh_queued { PMESH_NOT_QUEUED, PMESH_QUEUED, PMESH_QUEUED_COPY };

// A connection as the sender knows it.
struct pmesh_send_subflow {
    double bytes_per_s, round_trip_s, busy_at, heard_at;
    double since; // if it is measured at the moment
    uint64_t mark, least;
    uint64_t sent, received;
    struct pmesh_frame *current; // of which `written` bytes are
    uint64_t current_number, written;
    uint64_t queued; // bytes of the queue
    uint32_t index, queue_count;
    bool is_measured, is_silent, measures;
    uint8_t queue[PMESH_WINDOW_RECORDS]; // `enum pmesh_queued` of each record that is kept
};

// A record from its sealing until it is acknowledged.
struct pmesh_sealed {
    struct pmesh_frame *frame;
    int64_t subflow; // the index of its connection; -1 while there is none
    uint64_t end;    // where in the bytes of that it ends, once it has begun
    bool has_begun, copied;
};

struct pmesh_sends {
    struct pmesh_pool *pool;
    uint64_t window_bytes, window_records;
    uint64_t kept_bytes, wanted, next, homeless;
    double relieved_at;
    uint32_t count;
    struct pmesh_send_subflow subflows[PMESH_MOST_SUBFLOWS];
    struct pmesh_sealed kept[PMESH_WINDOW_RECORDS];
};

void pmesh_sends_begin(struct pmesh_sends *sends, struct pmesh_pool *pool);
void pmesh_sends_end(struct pmesh_sends *sends);
bool pmesh_sends_has_room(const struct pmesh_sends *sends);
bool pmesh_sends_has_unsent(const struct pmesh_sends *sends);
bool pmesh_sends_is_empty(const struct pmesh_sends *sends);
// A connection more; there are fewer than PMESH_MOST_SUBFLOWS.
void pmesh_sends_add(struct pmesh_sends *sends, uint32_t index, double bytes_per_s,
                     double round_trip_s, double now);
// The connection at this place is lost; those after it move up.
void pmesh_sends_drop(struct pmesh_sends *sends, uint32_t place);
// Send a frame, whose user the window becomes; there is room.
void pmesh_sends_put(struct pmesh_sends *sends, struct pmesh_frame *frame);
bool pmesh_sends_has_to_write(const struct pmesh_sends *sends, uint32_t place);
// What this connection writes next; no bytes if nothing.
const uint8_t *pmesh_sends_next_part(struct pmesh_sends *sends, uint32_t place, uint64_t *nbytes);
void pmesh_sends_wrote(struct pmesh_sends *sends, uint32_t place, uint64_t count, double now);
// Returns false if it claims what has not been sent. `is_late`: it may have come long before.
bool pmesh_sends_acknowledge_untrusted(struct pmesh_sends *sends, uint32_t place,
                                       const struct pmesh_ack *ack, double now, bool is_late);
void pmesh_sends_relieve(struct pmesh_sends *sends, double now);

// --- the receiver's side

struct pmesh_receive_subflow {
    uint64_t nbytes, acknowledged, told;
    uint32_t records, unused;
};

struct pmesh_receives {
    struct pmesh_pool *pool;
    uint64_t window_bytes, window_records;
    uint64_t early_bytes, opened, lacks, grown;
    uint32_t count;
    struct pmesh_receive_subflow subflows[PMESH_MOST_SUBFLOWS];
    struct pmesh_frame *frames[PMESH_FRAMES_KEPT];
};

void pmesh_receives_begin(struct pmesh_receives *receives, struct pmesh_pool *pool);
void pmesh_receives_end(struct pmesh_receives *receives);
void pmesh_receives_add(struct pmesh_receives *receives);
void pmesh_receives_drop(struct pmesh_receives *receives, uint32_t place);
// The record that is opened next; NULL until it is there.
struct pmesh_frame *pmesh_receives_first(const struct pmesh_receives *receives);
void pmesh_receives_opened(struct pmesh_receives *receives);
void pmesh_receives_read(struct pmesh_receives *receives, uint32_t place, uint64_t nbytes);
// Keep a whole record, or give it back if it is here already. Returns false, and leaves it to the
// caller, if it is beyond the window.
bool pmesh_receives_arrived_untrusted(struct pmesh_receives *receives, uint32_t place,
                                      struct pmesh_frame *frame);
bool pmesh_receives_owes(const struct pmesh_receives *receives, uint32_t place);
bool pmesh_receives_is_due(const struct pmesh_receives *receives, uint32_t place, bool waiting);
struct pmesh_ack pmesh_receives_acknowledge(struct pmesh_receives *receives, uint32_t place,
                                            bool waiting);

#endif
