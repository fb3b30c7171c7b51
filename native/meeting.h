// Ops of the ranks of one agent, whose calls the library answers: persistent.c. If their job has
// others elsewhere, rank 0 of those here exchanges with them what all here have folded.
#ifndef PMESH_MEETING_H
#define PMESH_MEETING_H

#include "combine.h"

enum { PMESH_MOST_SLOTS = 5 };

// What a rank brings to an op, for as long as `pmesh_meet` runs.
struct pmesh_part {
    uint32_t rank, slot_count;
    uint64_t number; // of the op
    const uint8_t *source;
    uint8_t *result; // or where `pmesh_meet` has put it, if it is shared
    uint64_t source_bytes, result_bytes;
    uint8_t *slots[PMESH_MOST_SLOTS]; // where a shared result may lie, for this rank
    const _Atomic bool *recalled;     // whether to wait for the others no longer
    // Whether the op may end now. Every rank's agent is the same, so anyone may say it for all.
    bool (*may_end)(void *);
    // Of rank 0, if there are ranks elsewhere: exchanges what lies in `result`, and returns where
    // what all ranks get lies then, or NULL if it does not. There may be no such bytes.
    const uint8_t *(*exchange)(void *);
    uint64_t exchanged_bytes;
    void *of;
};

// Where the threads of all ranks meet, each for its own rank, whenever these make one call.
struct pmesh_meeting;

// NULL if there is no memory. The op says how many ranks there are and what is done; its memory is
// that of the parts. What it points to stays until the meeting is freed. A result that is shared is
// written once, as that of rank 0, into a slot that all ranks have. If the job has ranks elsewhere,
// the op writes what rank 0 exchanges.
PMESH_API struct pmesh_meeting *pmesh_meeting_new(const struct pmesh_combining *op, bool shares,
                                                  bool has_others);
// No thread is there any more.
PMESH_API void pmesh_meeting_free(struct pmesh_meeting *meeting);
// Wait until all ranks have come, and do the op with them. Returns whether it has been done: the
// same for all of them. If not, it counts for none, and whoever was recalled has left.
bool pmesh_meet(struct pmesh_meeting *meeting, struct pmesh_part *part);
// Whether its result is shared.
bool pmesh_meeting_shares(const struct pmesh_meeting *meeting);
// Let those look that wait for others: one of them is recalled.
void pmesh_meeting_wake(struct pmesh_meeting *meeting);
// Whether somebody who waits for the exchange is recalled: then it has to end, if not well.
bool pmesh_meeting_is_pressed(const struct pmesh_meeting *meeting);

#endif
