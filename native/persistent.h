// Calls that a trainer repeats, answered without the interpreter: pmesh/net/lanes/persistent.py.
#ifndef PMESH_PERSISTENT_H
#define PMESH_PERSISTENT_H

#include "meeting.h"
#include "pmesh.h"

enum {
    PMESH_MOST_CALLS = 32,
    PMESH_OWN_SLOTS = 3, // that are not lent: of a result that others may ask for, of one that the
                         // trainer reads, and of the next one
    PMESH_LOGGED_OPS = 1024,
    PMESH_UNREAD_BYTES = 4096,
    PMESH_PARTS = 3, // of a message with two numbers
    PMESH_MOST_PARTS = 4,
};

// A message of a session, cut where its numbers stand: it has one number less than parts.
struct pmesh_message {
    const uint8_t *parts[PMESH_MOST_PARTS];
    uint32_t nbytes[PMESH_MOST_PARTS];
    uint32_t count;
};

// One call, and its op, of which the number, `completed`, the source and the result change each
// time. Python owns all that it points to, and changes none of it while a thread serves.
struct pmesh_call {
    struct pmesh_op *op;
    // Where the ranks of this agent meet, and as which of them; or NULL if there is one only.
    struct pmesh_meeting *meeting;
    // Where these values are folded that the op exchanges with ranks elsewhere; or NULL.
    uint8_t *folded;
    // What the trainer sends for op N: N, perhaps where its values begin in the arena, and perhaps
    // its step, of which Python only wants to know.
    struct pmesh_message request;
    // What it gets: N, and if there are three parts, the number of the result's arena.
    struct pmesh_message reply;
    // The same if the arena is lent: the trainer keeps the result until it drops it. Without parts
    // if it does not want to.
    struct pmesh_message lending;
    // What the op reads if its request does not say where that lies in the arena.
    uint8_t *source;
    uint8_t *arena;
    uint64_t arena_bytes, itemsize;
    uint32_t says_place, says_step, rank;
};

// An arena for results, of any of the calls.
struct pmesh_slot {
    uint8_t *memory;
    uint64_t nbytes;
    uint64_t number;  // in the session's messages
    uint64_t free_at; // the first op that may write to it: O2, and the trainer has read it
    uint32_t lent;
    uint32_t shared; // whether other ranks have it, too, for the results that a meeting shares
};

// An op that has ended well.
struct pmesh_ended_op {
    double began_s, ended_s; // of a clock that stops while the machine sleeps
    double receiving_s;      // for how long its lanes have waited in the middle of records
    uint64_t number, step;
    uint32_t call, slot;
};

// Why a thread serves no longer.
enum pmesh_why {
    PMESH_RECALLED,
    PMESH_OTHER,      // something else has come, or the connection has ended
    PMESH_BEGUN,      // the op `next` of `call` has begun, and not ended soon, or not well
    PMESH_UNANSWERED, // the trainer does not take the reply to the last op
};

// The state of one trainer's calls. While a thread serves, Python writes `trusted_until_us`, and
// touches nothing else.
struct pmesh_persistent {
    struct pmesh_call calls[PMESH_MOST_CALLS];
    struct pmesh_slot slots[2 * PMESH_MOST_SLOTS]; // its own, and shared ones
    struct pmesh_message drop;   // what says that an arena is lent no longer: its number
    struct pmesh_runner *runner; // of all these ops
    uint64_t next, limit;        // the number of the next op; the first that is not served
    double most_wait_s;          // for other ranks; then Python goes on
    // V8: no op ends after this, on a clock that runs while the machine sleeps.
    _Atomic uint64_t trusted_until_us;
    _Atomic uint64_t ended, noted; // ops, and of these the ones that Python has read
    struct pmesh_ended_op log[PMESH_LOGGED_OPS];
    uint32_t call_count, slot_count;
    uint32_t may_lend;     // whether arenas may be lent
    int32_t session;       // the trainer's connection, whose reads do not block
    int32_t why, state;    // `enum pmesh_why`; `enum pmesh_state` of a begun op
    uint32_t call, slot;   // of an op that has begun
    uint64_t step;         // that its request says
    uint32_t unread_bytes; // what has come and is Python's to read
    uint8_t unread[PMESH_UNREAD_BYTES];
};

struct pmesh_server;

// A thread that serves one trainer; NULL if the system has no room for it.
PMESH_API struct pmesh_server *pmesh_server_new(struct pmesh_persistent *calls);
// End the thread.
PMESH_API void pmesh_server_free(struct pmesh_server *server);
// A descriptor that is readable once the thread serves no longer.
PMESH_API int pmesh_server_fd(const struct pmesh_server *server);
// Let the thread serve, until something comes that Python must handle. `pmesh_recall` follows.
PMESH_API void pmesh_serve(struct pmesh_server *server);
// Make the thread serve no longer, within about a millisecond; then the state is Python's.
PMESH_API void pmesh_recall(struct pmesh_server *server);
// Copy the ops that have ended since the last time, of which there are at most PMESH_LOGGED_OPS;
// return how many. Python may call it at any time.
PMESH_API uint64_t pmesh_take_ended(struct pmesh_persistent *calls, struct pmesh_ended_op *into);
// Sizes and offsets of the structs, for the test that compares them with Python's.
PMESH_API const uint32_t *pmesh_persistent_layout(void);

#endif
