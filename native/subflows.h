// A lane over several connections: `pmesh/net/lanes/subflows.py` does the same, and says more.
#ifndef PMESH_SUBFLOWS_H
#define PMESH_SUBFLOWS_H

#include "windows.h"

#include <poll.h>

enum { PMESH_SUBFLOW_POLLS = PMESH_MOST_SUBFLOWS + 1 };

// The connections of one end of a lane. Python owns their sockets, and says when one is closed; the
// rest is guarded by a lock, so that any thread may call any function but `pmesh_subflows_free`.
// None of them waits for the network.
struct pmesh_subflows;

// A connection that was lost here, and whose socket is to be closed.
struct pmesh_lost_subflow {
    uint32_t index;
    bool ended; // by the peer, not by the network
};

// How fast data came on a connection while this end waited in the middle of a record.
struct pmesh_pace {
    double seconds;
    uint64_t nbytes;
    uint32_t index, unused;
};

// Returns NULL without memory or without a pipe. The lane outlives it.
PMESH_API struct pmesh_subflows *pmesh_subflows_new(struct pmesh_lane *lane, bool sending,
                                                    int32_t aead, pmesh_function seal,
                                                    pmesh_function open);
PMESH_API void pmesh_subflows_free(struct pmesh_subflows *subflows);
// A descriptor that is readable while a wait for the connections is to end.
PMESH_API int pmesh_subflows_wake_fd(const struct pmesh_subflows *subflows);
// Add a connection; its keys and its counter are those of acknowledgements. False: there is no
// room.
PMESH_API bool pmesh_subflows_add(struct pmesh_subflows *subflows, uint32_t index, int fd,
                                  const uint8_t key[PMESH_KEY_BYTES], uint64_t records,
                                  double bytes_per_s, double round_trip_s);
// Forget a connection; nothing is written to its socket or read from it afterwards.
PMESH_API void pmesh_subflows_drop(struct pmesh_subflows *subflows, uint32_t index);
// Return one that was lost, and forget that; false if there is none.
PMESH_API bool pmesh_subflows_next_lost(struct pmesh_subflows *subflows,
                                        struct pmesh_lost_subflow *lost);
// Write and acknowledge what is possible. `outside` of a call, also wake the call that waits.
// Returns whether anything was written or acknowledged by the peer.
PMESH_API bool pmesh_subflows_pump(struct pmesh_subflows *subflows, bool outside);

enum pmesh_subflows_state {
    PMESH_SUBFLOWS_HAVE_ROOM = 1, // one more record may be put
    PMESH_SUBFLOWS_HAVE_UNSENT = 2,
    PMESH_SUBFLOWS_ARE_EMPTY = 4, // all has been acknowledged
    PMESH_SUBFLOWS_OWE = 8,       // an acknowledgement
    PMESH_SUBFLOWS_HAVE_FIRST = 16,
};
PMESH_API uint32_t pmesh_subflows_state(struct pmesh_subflows *subflows);
// Whether this connection has something to write.
PMESH_API bool pmesh_subflows_has_to_write(struct pmesh_subflows *subflows, uint32_t index);
// Where a record of so many bytes is to be sealed; NULL without memory. Then put it.
PMESH_API uint8_t *pmesh_subflows_take(struct pmesh_subflows *subflows, uint64_t nbytes);
PMESH_API void pmesh_subflows_put(struct pmesh_subflows *subflows, uint8_t *record);
// Read until the next record is there, whole; return NULL if it is not yet. `waited`: so did the
// call before, of the same op.
PMESH_API uint8_t *pmesh_subflows_read(struct pmesh_subflows *subflows, bool waited,
                                       uint64_t *nbytes);
// It has been opened, and its memory may be reused.
PMESH_API void pmesh_subflows_opened(struct pmesh_subflows *subflows);
// Return what was measured of a connection, and forget it; false if there is none.
PMESH_API bool pmesh_subflows_next_pace(struct pmesh_subflows *subflows, struct pmesh_pace *pace);
// Write down what a wait is for, at most PMESH_SUBFLOW_POLLS.
nfds_t pmesh_subflows_polled(struct pmesh_subflows *subflows, struct pollfd polled[]);

#endif
