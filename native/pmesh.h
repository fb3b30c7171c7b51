// What Python lays out for the library, and what it calls. `pmesh/native/layout.py` has the same
// structs; a test compares their sizes and offsets with `pmesh_layout`.
#ifndef PMESH_H
#define PMESH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// One higher with each change that Python must know of; pmesh/native/__init__.py has the same.
#define PMESH_ABI 10

#define PMESH_API __attribute__((visibility("default")))

enum {
    PMESH_HEADER_BYTES = 40,
    PMESH_TAG_BYTES = 32,
    PMESH_OVERHEAD_BYTES = PMESH_HEADER_BYTES + PMESH_TAG_BYTES,
    PMESH_KEY_BYTES = 16,
    PMESH_MAX_BODY_BYTES = 1024 * 1024,
};

// The two functions of an AEAD, as libsodium declares them, and as libaegis does.
typedef int (*pmesh_sodium_seal)(uint8_t *to, unsigned long long *to_bytes, const uint8_t *body,
                                 unsigned long long body_bytes, const uint8_t *header,
                                 unsigned long long header_bytes, const uint8_t *unused,
                                 const uint8_t *nonce, const uint8_t *key);
typedef int (*pmesh_sodium_open)(uint8_t *body, unsigned long long *body_bytes, uint8_t *unused,
                                 const uint8_t *from, unsigned long long from_bytes,
                                 const uint8_t *header, unsigned long long header_bytes,
                                 const uint8_t *nonce, const uint8_t *key);
typedef int (*pmesh_aegis_seal)(uint8_t *to, size_t tag_bytes, const uint8_t *body,
                                size_t body_bytes, const uint8_t *header, size_t header_bytes,
                                const uint8_t *nonce, const uint8_t *key);
typedef int (*pmesh_aegis_open)(uint8_t *body, const uint8_t *from, size_t from_bytes,
                                size_t tag_bytes, const uint8_t *header, size_t header_bytes,
                                const uint8_t *nonce, const uint8_t *key);
typedef void (*pmesh_function)(void);

enum pmesh_aead { PMESH_LIBSODIUM, PMESH_LIBAEGIS };

struct pmesh_subflows;

// One end of a lane. Python owns it and its buffers, and does not touch it while an op runs, except
// that it may read the two counters of traffic.
struct pmesh_lane {
    _Atomic uint64_t bytes_sent, bytes_received;
    uint64_t sealed, opened; // records so far: the nonce of the next is one more
    uint8_t *out;            // of PMESH_OVERHEAD_BYTES + PMESH_MAX_BODY_BYTES, as `in`
    uint8_t *in;
    uint64_t unsent_begin, unsent_end; // in `out`
    uint64_t filled;                   // bytes of `in` that have arrived
    uint64_t dropped;                  // records of a lower roster (V4)
    int64_t peer_completed;            // what the last record said (O2)
    uint64_t paced_bytes;              // what came while this end waited in a record
    double paced_s;                    // how long that took
    struct pmesh_subflows *subflows;   // of a lane of several connections, which uses no `out`, and
                                       // whose `in` is one of their records; else NULL
    int32_t fd;
    int32_t wake_up_bytes; // a wait for more than this ends when this is there
    int32_t asked;         // SO_RCVLOWAT as it was set last
    uint8_t seal_key[PMESH_KEY_BYTES], open_key[PMESH_KEY_BYTES];
};

enum pmesh_region { PMESH_SOURCE, PMESH_RESULT, PMESH_SCRATCH, PMESH_REGIONS };
enum pmesh_then { PMESH_KEEP, PMESH_ADD_SOURCE, PMESH_ADD_TO_RESULT };

// One record to send or to receive: `pmesh.core.ops.plan.Send` and `Receive`.
struct pmesh_record {
    uint64_t offset, nbytes, other;
    uint32_t need_begin, need_end; // in the plan's needs
    uint8_t region, then, finishes, unused[5];
};

// Wait until a track has done so many records.
struct pmesh_need {
    uint32_t track, number;
};

struct pmesh_copy {
    uint64_t source, result, nbytes;
};

// What a codec does to a part of the tensor: `pmesh.core.ops.plan.Work`. Encoded bytes lie in the
// result or in the scratch. A hop writes them there; a decoding reads them, and writes the values
// into the result.
struct pmesh_work {
    uint64_t begin, count; // values of the source and of the result
    uint64_t offset, nbytes;
    uint64_t arrived; // where in the scratch a hop finds what has arrived, or PMESH_FIRST_HOP
    uint32_t need_begin, need_end;
    uint8_t region, decodes, divides, unused[5];
};
#define PMESH_FIRST_HOP UINT64_MAX

// The records of one lane, or a queue of works, in order.
struct pmesh_track {
    uint32_t begin, end; // in the plan's records or works
};

// A plan laid out flat. Tracks that receive come first, then those that send, then those of works:
// first hops; then decodings of what was sent, maybe where it lies; then those of the scratch.
struct pmesh_plan {
    const struct pmesh_record *records;
    const struct pmesh_need *needs;
    const struct pmesh_copy *copies;
    const struct pmesh_work *works;
    const struct pmesh_track *tracks;
    uint32_t record_count, need_count, copy_count, work_count;
    uint32_t receiving, sending, computing; // tracks
    uint32_t size;                          // the ranks, by which a mean is divided
    uint8_t added_twice, two_threads;
    uint8_t computes_much; // too much for the thread that calls pmesh_begin
    uint8_t unused[5];
};

enum pmesh_codec {
    PMESH_CODEC_FP16,
    PMESH_CODEC_BF16,
    PMESH_CODEC_INT8,
    PMESH_CODEC_INT8_STOCHASTIC,
    PMESH_CODECS,
};

// The factors of a hop: see `struct pmesh_hop`.
struct pmesh_terms {
    float own_scale, divisor, residual_factor;
};

// How one run of a plan encodes. Python owns it and its memory.
struct pmesh_coding {
    const uint8_t *residual; // as many floats as the source has; NULL for zeros
    uint8_t *residual_out;   // as many, written; NULL for no feedback
    uint8_t *bounce;         // for a piece that is decoded in the result, by the side that sends
    uint64_t bounce_bytes;
    uint64_t draw, block;        // `pmesh.core.ops.coded.draw_key`
    int64_t clipped;             // finite values so far; only the side that receives writes it
    struct pmesh_terms terms[2]; // of a hop, and of one that divides
    int32_t codec;               // `enum pmesh_codec`
};

enum pmesh_status {
    PMESH_DONE,
    PMESH_STOPPED,
    PMESH_INVALID,   // the plan does not fit its memory
    PMESH_NO_THREAD, // the system has none left
    PMESH_DIFFERS,   // the peer called something else
    PMESH_ENDED,     // the peer closed the connection
    PMESH_FAILED,    // the system refused: see `error`
    PMESH_TOO_LARGE, // a header claims more than is allowed
    PMESH_OUT_OF_PLACE,
    PMESH_FORGED,
};

struct pmesh_combining;

// One run of a plan.
struct pmesh_op {
    const struct pmesh_plan *plan;
    struct pmesh_lane *const *lanes; // one for each track
    uint8_t *regions[PMESH_REGIONS];
    uint64_t region_bytes[PMESH_REGIONS];
    struct pmesh_coding *coding;  // NULL for a plan without works
    struct pmesh_combining *fold; // makes the source, part by part as it is read; or NULL
    pmesh_function seal, open;    // of the library that `aead` names
    uint64_t roster, number, fingerprint;
    int64_t completed;
    int32_t dtype, reduction; // `enum pmesh_dtype`, or -1; `enum pmesh_reduction`
    int32_t aead;
    // Why it failed, if it has; read it after `pmesh_end`:
    int32_t failure; // `enum pmesh_status`
    uint32_t track;  // where
    uint64_t detail; // an errno; the bytes that a header claims; or the
                     // first op in which the two ranks differ
    _Atomic bool has_failed;
};

// In the order of `pmesh.core.wire.trainer.WireDtype` and of `reductions.REDUCTIONS`.
enum pmesh_dtype {
    PMESH_COMPLEX128,
    PMESH_FLOAT64,
    PMESH_COMPLEX64,
    PMESH_FLOAT32,
    PMESH_INT64,
    PMESH_UINT64,
    PMESH_INT32,
    PMESH_UINT32,
    PMESH_INT16,
    PMESH_UINT16,
    PMESH_INT8,
    PMESH_UINT8,
    PMESH_BOOL,
    PMESH_DTYPES,
};
enum pmesh_reduction {
    PMESH_SUM,
    PMESH_MEAN,
    PMESH_MAX,
    PMESH_MIN,
    PMESH_PROD,
    PMESH_BAND,
    PMESH_BOR,
    PMESH_BXOR,
    PMESH_REDUCTIONS,
};

// --- reduce.c

// The bytes of one value; 0 if there is no such dtype, or no such reduction of it here.
PMESH_API uint64_t pmesh_itemsize(int32_t dtype, int32_t reduction);
PMESH_API void pmesh_accumulate(int32_t dtype, int32_t reduction, void *into, const void *other,
                                uint64_t count);
PMESH_API void pmesh_finish(int32_t dtype, int32_t reduction, void *into, uint64_t count,
                            uint32_t contributors);
PMESH_API void pmesh_make_nan_equal(int32_t dtype, void *values, uint64_t count);

// --- lane.c

enum pmesh_progress { PMESH_WAITS, PMESH_MOVED, PMESH_LANDED, PMESH_BROKE };

// How one track's lane waits, and what it needs to know between two calls.
struct pmesh_waiting {
    bool network;  // for its socket
    bool progress; // for another track
    bool held;     // a record of a higher roster has come (V4)
    bool waited;   // for the next record, of several connections
    double since;  // the header was read, and the body is awaited
    uint64_t paced_from;
};

// Whether a record may be sealed into the lane, and whether anything is left to be sent.
bool pmesh_may_seal(const struct pmesh_lane *lane);
bool pmesh_has_unsent(const struct pmesh_lane *lane);
// Seal a record into a lane that may. Returns false if that breaks the op.
bool pmesh_seal_record(struct pmesh_op *op, uint32_t track, const struct pmesh_record *record,
                       uint32_t segment);
// Send what is left, as much as the system takes.
enum pmesh_progress pmesh_flush(struct pmesh_op *op, uint32_t track);
// Receive the track's next record as far as it is there, into its place.
enum pmesh_progress pmesh_receive(struct pmesh_op *op, uint32_t track,
                                  const struct pmesh_record *record, uint32_t segment,
                                  struct pmesh_waiting *waiting);

// --- coding.c

// Whether all works fit the op's memory, and their queues what they may have.
bool pmesh_works_fit(const struct pmesh_op *op);
void pmesh_compute(const struct pmesh_op *op, const struct pmesh_work *work);

// --- executor.c

struct pmesh_runner;

// Whether the plan fits its memory: checked before anything is read or written.
bool pmesh_plan_fits(const struct pmesh_op *op);
// Whether these bytes of a region are there.
bool pmesh_fits(const struct pmesh_op *op, uint32_t region, uint64_t offset, uint64_t nbytes);

PMESH_API struct pmesh_runner *pmesh_runner_new(void);
PMESH_API void pmesh_runner_free(struct pmesh_runner *runner);
// A descriptor that is readable once the op that was begun has ended.
PMESH_API int pmesh_runner_fd(const struct pmesh_runner *runner);
enum pmesh_state {
    PMESH_OVER,   // the op has ended, or failed
    PMESH_AWAITS, // only something that arrives makes it go on
    PMESH_BUSY,
    PMESH_RUNS, // in threads, by `pmesh_hand_over`
};

// Begin an op, and do what can be done at once. Unless that was all, `pmesh_hand_over` follows, or
// `pmesh_advance` when a socket is ready. In any case `pmesh_end` follows.
PMESH_API int32_t pmesh_begin(struct pmesh_runner *runner, struct pmesh_op *op);
// Do what can be done at once. Returns an `enum pmesh_state`, as `pmesh_begin` does.
PMESH_API int32_t pmesh_advance(struct pmesh_runner *runner);
// Wait in the caller's thread for what arrives, at most about twice `most_ms`, and do what can be
// done then; nothing wakes it earlier. Only after PMESH_AWAITS; returns an `enum pmesh_state`.
PMESH_API int32_t pmesh_wait(struct pmesh_runner *runner, int32_t most_ms);
// Let threads do the rest: await the descriptor, or call `pmesh_stop`. Returns false if there are
// no threads.
PMESH_API bool pmesh_hand_over(struct pmesh_runner *runner);
// Make the op end soon, wherever it is; any thread may call it, also after the op's end.
PMESH_API void pmesh_stop(struct pmesh_runner *runner);
// Wait until no thread works on the op any more, and return its `enum pmesh_status`.
PMESH_API int32_t pmesh_end(struct pmesh_runner *runner);
// Sizes and offsets of the structs, for the test that compares them with Python's.
PMESH_API const uint32_t *pmesh_layout(void);

// --- version.c

PMESH_API int pmesh_abi(void);

#endif
