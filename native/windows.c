#include "windows.h"
#include "records.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t ACK_BYTES = 512 * 1024;
static const uint32_t ACK_RECORDS = 32;
static const uint64_t ACK_EARLY_BYTES = 64 * 1024;
static const double MEASURE_S = 0.01, STALE_S = 1.0;
static const uint64_t BUSY_BYTES = 64 * 1024;
static const double SILENT_S = 0.3, SPARE_S = 0.01, GAIN = 0.25;

// --- frames

static const uint64_t LEAST_TO_REUSE = 4096; // malloc is quick with less

struct pmesh_frame *pmesh_take_frame(struct pmesh_pool *pool, uint64_t nbytes) {
    struct pmesh_frame *frame = NULL;
    for (uint32_t i = pool->count; i-- > 0 && !frame;) {
        if (pool->frames[i]->room >= nbytes && pool->frames[i]->room / 2 <= nbytes) {
            frame = pool->frames[i];
            pool->bytes -= frame->room;
            pool->count--;
            memmove(&pool->frames[i], &pool->frames[i + 1],
                    (pool->count - i) * sizeof *pool->frames);
        }
    }
    if (!frame) {
        frame = malloc(sizeof *frame + nbytes);
        if (!frame) {
            return NULL;
        }
        frame->room = nbytes;
    }
    frame->nbytes = nbytes;
    frame->users = 1;
    return frame;
}

void pmesh_give_frame(struct pmesh_pool *pool, struct pmesh_frame *frame) {
    if (--frame->users) {
        return;
    }
    const bool has_room =
        pool->count < PMESH_FRAMES_TO_REUSE && pool->bytes + frame->room <= PMESH_WINDOW_BYTES;
    if (!has_room || frame->room < LEAST_TO_REUSE) {
        free(frame);
        return;
    }
    pool->frames[pool->count++] = frame;
    pool->bytes += frame->room;
}

void pmesh_empty_pool(struct pmesh_pool *pool) {
    while (pool->count) {
        free(pool->frames[--pool->count]);
    }
    pool->bytes = 0;
}

// --- the sender's side

void pmesh_sends_begin(struct pmesh_sends *sends, struct pmesh_pool *pool) {
    *sends = (struct pmesh_sends){
        .pool = pool,
        .window_bytes = PMESH_WINDOW_BYTES,
        .window_records = PMESH_WINDOW_RECORDS,
        .relieved_at = -INFINITY,
    };
}

static struct pmesh_sealed *kept(struct pmesh_sends *sends, uint64_t number) {
    return &sends->kept[number % PMESH_WINDOW_RECORDS];
}

void pmesh_sends_end(struct pmesh_sends *sends) {
    while (sends->count) {
        pmesh_sends_drop(sends, sends->count - 1);
    }
    for (; sends->wanted < sends->next; sends->wanted++) {
        pmesh_give_frame(sends->pool, kept(sends, sends->wanted)->frame);
    }
}

bool pmesh_sends_has_room(const struct pmesh_sends *sends) {
    const uint64_t count = sends->next - sends->wanted;
    const bool has_bytes = sends->kept_bytes + PMESH_MAX_FRAME_BYTES <= sends->window_bytes;
    return !count || (has_bytes && count < sends->window_records);
}

bool pmesh_sends_has_unsent(const struct pmesh_sends *sends) {
    bool has = sends->homeless;
    for (uint32_t i = 0; i < sends->count; i++) {
        const struct pmesh_send_subflow *subflow = &sends->subflows[i];
        has |=
            subflow->queue_count || (subflow->current && subflow->current_number >= sends->wanted);
    }
    return has;
}

bool pmesh_sends_is_empty(const struct pmesh_sends *sends) {
    return sends->next == sends->wanted;
}

static uint64_t to_do(const struct pmesh_send_subflow *subflow) {
    const uint64_t rest = subflow->current ? subflow->current->nbytes - subflow->written : 0;
    return subflow->sent - subflow->received + rest + subflow->queued;
}

// How long until so many bytes more would have arrived.
static double arrival_s(const struct pmesh_send_subflow *subflow, uint64_t nbytes) {
    return subflow->round_trip_s + (double)(to_do(subflow) + nbytes) / subflow->bytes_per_s;
}

// The connection over which so many bytes have arrived first; NULL if there is none.
static struct pmesh_send_subflow *best(struct pmesh_sends *sends, uint64_t nbytes) {
    struct pmesh_send_subflow *found = NULL;
    bool all_silent = true;
    double least = 0;
    for (uint32_t i = 0; i < sends->count; i++) {
        all_silent &= sends->subflows[i].is_silent;
    }
    for (uint32_t i = 0; i < sends->count; i++) {
        struct pmesh_send_subflow *subflow = &sends->subflows[i];
        const double arrives = arrival_s(subflow, nbytes);
        if ((all_silent || !subflow->is_silent) && (!found || arrives < least)) {
            found = subflow;
            least = arrives;
        }
    }
    return found;
}

static void enqueue(struct pmesh_sends *sends, struct pmesh_send_subflow *subflow, uint64_t number,
                    enum pmesh_queued how) {
    uint8_t *queued = &subflow->queue[number % PMESH_WINDOW_RECORDS];
    if (*queued == PMESH_NOT_QUEUED) {
        subflow->queue_count++;
        subflow->queued += kept(sends, number)->frame->nbytes;
    }
    if (*queued != PMESH_QUEUED) {
        *queued = (uint8_t)how;
    }
}

static void unqueue(struct pmesh_sends *sends, struct pmesh_send_subflow *subflow,
                    uint64_t number) {
    uint8_t *queued = &subflow->queue[number % PMESH_WINDOW_RECORDS];
    if (*queued != PMESH_NOT_QUEUED) {
        subflow->queue_count--;
        subflow->queued -= kept(sends, number)->frame->nbytes;
        *queued = PMESH_NOT_QUEUED;
    }
}

static void assign(struct pmesh_sends *sends, uint64_t number) {
    struct pmesh_sealed *record = kept(sends, number);
    struct pmesh_send_subflow *subflow = best(sends, record->frame->nbytes);
    record->has_begun = false;
    record->subflow = subflow ? (int64_t)subflow->index : -1;
    if (subflow) {
        enqueue(sends, subflow, number, PMESH_QUEUED);
    } else {
        sends->homeless++;
    }
}

void pmesh_sends_add(struct pmesh_sends *sends, uint32_t index, double bytes_per_s,
                     double round_trip_s, double now) {
    sends->subflows[sends->count++] = (struct pmesh_send_subflow){
        .index = index,
        .bytes_per_s = bytes_per_s > 1 ? bytes_per_s : 1,
        .round_trip_s = round_trip_s,
        .busy_at = now,
        .heard_at = -INFINITY,
    };
    for (uint64_t number = sends->wanted; sends->homeless && number < sends->next; number++) {
        if (kept(sends, number)->subflow < 0) {
            sends->homeless--;
            assign(sends, number);
        }
    }
}

void pmesh_sends_drop(struct pmesh_sends *sends, uint32_t place) {
    const int64_t index = sends->subflows[place].index;
    if (sends->subflows[place].current) {
        pmesh_give_frame(sends->pool, sends->subflows[place].current);
    }
    sends->count--;
    memmove(&sends->subflows[place], &sends->subflows[place + 1],
            (sends->count - place) * sizeof *sends->subflows);
    for (uint64_t number = sends->wanted; number < sends->next; number++) {
        kept(sends, number)->copied = false;
        if (kept(sends, number)->subflow == index) {
            assign(sends, number);
        }
    }
}

void pmesh_sends_put(struct pmesh_sends *sends, struct pmesh_frame *frame) {
    *kept(sends, sends->next) = (struct pmesh_sealed){.frame = frame};
    sends->kept_bytes += frame->nbytes;
    assign(sends, sends->next++);
}

bool pmesh_sends_has_to_write(const struct pmesh_sends *sends, uint32_t place) {
    return sends->subflows[place].current || sends->subflows[place].queue_count;
}

static void begin_next(struct pmesh_sends *sends, struct pmesh_send_subflow *subflow) {
    uint64_t number = sends->wanted;
    while (subflow->queue[number % PMESH_WINDOW_RECORDS] == PMESH_NOT_QUEUED) {
        number++;
    }
    struct pmesh_sealed *record = kept(sends, number);
    if (subflow->queue[number % PMESH_WINDOW_RECORDS] == PMESH_QUEUED) {
        record->has_begun = true;
        record->end = subflow->sent + record->frame->nbytes;
    }
    unqueue(sends, subflow, number);
    record->frame->users++;
    subflow->current = record->frame;
    subflow->current_number = number;
    subflow->written = 0;
}

const uint8_t *pmesh_sends_next_part(struct pmesh_sends *sends, uint32_t place, uint64_t *nbytes) {
    struct pmesh_send_subflow *subflow = &sends->subflows[place];
    if (!subflow->current && subflow->queue_count) {
        begin_next(sends, subflow);
    }
    *nbytes = subflow->current ? subflow->current->nbytes - subflow->written : 0;
    return subflow->current ? subflow->current->bytes + subflow->written : NULL;
}

void pmesh_sends_wrote(struct pmesh_sends *sends, uint32_t place, uint64_t count, double now) {
    struct pmesh_send_subflow *subflow = &sends->subflows[place];
    if (subflow->sent == subflow->received) {
        subflow->busy_at = now;
        subflow->measures = false;
    }
    subflow->sent += count;
    subflow->written += count;
    if (subflow->written == subflow->current->nbytes) {
        pmesh_give_frame(sends->pool, subflow->current);
        subflow->current = NULL;
    }
}

static void take_sample(struct pmesh_send_subflow *subflow, double sample) {
    const double rate = sample > 1 ? sample : 1;
    if (subflow->least < BUSY_BYTES && sample <= subflow->bytes_per_s) {
        return; // nothing to send was the limit
    }
    if (!subflow->is_measured) {
        subflow->is_measured = true;
        subflow->bytes_per_s = rate;
    }
    subflow->bytes_per_s += GAIN * (rate - subflow->bytes_per_s);
}

static void measure(struct pmesh_send_subflow *subflow, bool waiting, double now, bool is_late) {
    const uint64_t left = to_do(subflow);
    subflow->least = left < subflow->least ? left : subflow->least;
    subflow->measures &= !is_late;
    if (is_late || !waiting) {
        return;
    }
    if (subflow->measures) {
        const double elapsed = now - subflow->since;
        if (elapsed < MEASURE_S) {
            return;
        }
        if (elapsed < STALE_S) {
            take_sample(subflow, (double)(subflow->received - subflow->mark) / elapsed);
        }
    }
    subflow->measures = true;
    subflow->since = now;
    subflow->mark = subflow->received;
    subflow->least = left;
}

static void free_up_to(struct pmesh_sends *sends, uint64_t wanted) {
    for (; sends->wanted < wanted; sends->wanted++) {
        struct pmesh_frame *frame = kept(sends, sends->wanted)->frame;
        for (uint32_t i = 0; i < sends->count; i++) {
            unqueue(sends, &sends->subflows[i], sends->wanted);
        }
        sends->kept_bytes -= frame->nbytes;
        pmesh_give_frame(sends->pool, frame);
    }
}

bool pmesh_sends_acknowledge_untrusted(struct pmesh_sends *sends, uint32_t place,
                                       const struct pmesh_ack *ack, double now, bool is_late) {
    struct pmesh_send_subflow *subflow = &sends->subflows[place];
    if (ack->received < subflow->received || ack->received > subflow->sent ||
        ack->wanted > sends->next) {
        return false;
    }
    if (ack->received > subflow->received) {
        subflow->received = ack->received;
        subflow->is_silent = false;
        subflow->heard_at = subflow->busy_at = now;
    }
    measure(subflow, ack->waiting, now, is_late);
    free_up_to(sends, ack->wanted);
    return true;
}

// Only beside one that has got further, or has nothing more to do: else the receiver may just not
// read.
static void find_silent(struct pmesh_sends *sends, double now) {
    double latest = -INFINITY;
    for (uint32_t i = 0; i < sends->count; i++) {
        const struct pmesh_send_subflow *subflow = &sends->subflows[i];
        const double heard_at = subflow->sent == subflow->received ? now : subflow->heard_at;
        latest = heard_at > latest ? heard_at : latest;
    }
    for (uint32_t i = 0; i < sends->count; i++) {
        struct pmesh_send_subflow *subflow = &sends->subflows[i];
        const bool is_busy = subflow->sent > subflow->received;
        if (is_busy && latest - subflow->busy_at > SILENT_S && !subflow->is_silent) {
            subflow->is_silent = true;
            for (uint64_t number = sends->wanted; number < sends->next; number++) {
                kept(sends, number)->copied = false; // perhaps to this one
            }
        }
    }
}

static struct pmesh_send_subflow *subflow_of(struct pmesh_sends *sends, int64_t index) {
    struct pmesh_send_subflow *subflow = sends->subflows;
    while (subflow->index != index) {
        subflow++;
    }
    return subflow;
}

static void copy_if_late(struct pmesh_sends *sends, uint64_t number) {
    struct pmesh_sealed *record = kept(sends, number);
    const uint64_t nbytes = record->frame->nbytes;
    const struct pmesh_send_subflow *here = subflow_of(sends, record->subflow);
    struct pmesh_send_subflow *there = best(sends, nbytes);
    if (there == here || record->end <= here->received) {
        return;
    }
    const double late_s = (double)(record->end - here->received) / here->bytes_per_s;
    if (here->is_silent || late_s > 2 * arrival_s(there, nbytes) + SPARE_S) {
        record->copied = true;
        enqueue(sends, there, number, PMESH_QUEUED_COPY);
    }
}

// Let all that wait in queues be assigned anew.
static void assign_again(struct pmesh_sends *sends) {
    uint8_t queues[PMESH_MOST_SUBFLOWS][PMESH_WINDOW_RECORDS];
    for (uint32_t i = 0; i < sends->count; i++) {
        struct pmesh_send_subflow *subflow = &sends->subflows[i];
        memcpy(queues[i], subflow->queue, sizeof subflow->queue);
        memset(subflow->queue, PMESH_NOT_QUEUED, sizeof subflow->queue);
        subflow->queue_count = 0;
        subflow->queued = 0;
    }
    for (uint64_t number = sends->wanted; number < sends->next; number++) {
        for (uint32_t i = 0; i < sends->count; i++) {
            switch (queues[i][number % PMESH_WINDOW_RECORDS]) {
            case PMESH_QUEUED: assign(sends, number); break;
            case PMESH_QUEUED_COPY:
                enqueue(sends, best(sends, kept(sends, number)->frame->nbytes), number,
                        PMESH_QUEUED_COPY);
                break;
            default: break;
            }
        }
    }
}

void pmesh_sends_relieve(struct pmesh_sends *sends, double now) {
    if (sends->count < 2 || now - sends->relieved_at < MEASURE_S) {
        return;
    }
    sends->relieved_at = now;
    find_silent(sends, now);
    bool all_busy = true;
    for (uint32_t i = 0; i < sends->count; i++) {
        all_busy &= pmesh_sends_has_to_write(sends, i);
    }
    if (all_busy) {
        return; // nobody has time for more
    }
    assign_again(sends);
    for (uint64_t number = sends->wanted; number < sends->next; number++) {
        if (kept(sends, number)->has_begun && !kept(sends, number)->copied) {
            copy_if_late(sends, number);
        }
    }
}

// --- the receiver's side

void pmesh_receives_begin(struct pmesh_receives *receives, struct pmesh_pool *pool) {
    *receives = (struct pmesh_receives){
        .pool = pool,
        .window_bytes = PMESH_WINDOW_BYTES,
        .window_records = PMESH_WINDOW_RECORDS,
    };
}

void pmesh_receives_end(struct pmesh_receives *receives) {
    for (uint32_t i = 0; i < PMESH_FRAMES_KEPT; i++) {
        if (receives->frames[i]) {
            pmesh_give_frame(receives->pool, receives->frames[i]);
            receives->frames[i] = NULL;
        }
    }
}

void pmesh_receives_add(struct pmesh_receives *receives) {
    receives->subflows[receives->count++] = (struct pmesh_receive_subflow){0};
}

void pmesh_receives_drop(struct pmesh_receives *receives, uint32_t place) {
    receives->count--;
    memmove(&receives->subflows[place], &receives->subflows[place + 1],
            (receives->count - place) * sizeof *receives->subflows);
}

struct pmesh_frame *pmesh_receives_first(const struct pmesh_receives *receives) {
    return receives->frames[receives->opened % PMESH_FRAMES_KEPT];
}

void pmesh_receives_opened(struct pmesh_receives *receives) {
    struct pmesh_frame **first = &receives->frames[receives->opened++ % PMESH_FRAMES_KEPT];
    pmesh_give_frame(receives->pool, *first);
    *first = NULL;
}

void pmesh_receives_read(struct pmesh_receives *receives, uint32_t place, uint64_t nbytes) {
    receives->subflows[place].nbytes += nbytes;
}

bool pmesh_receives_arrived_untrusted(struct pmesh_receives *receives, uint32_t place,
                                      struct pmesh_frame *frame) {
    const uint64_t number = pmesh_get(frame->bytes, PMESH_NUMBER_BYTES);
    receives->subflows[place].records++;
    // Not `lacks + window_records`, nor what is kept: a number of a peer may be the largest.
    if (number >= receives->lacks && (number - receives->lacks >= receives->window_records ||
                                      number - receives->opened >= PMESH_FRAMES_KEPT)) {
        return false;
    }
    struct pmesh_frame **place_of = &receives->frames[number % PMESH_FRAMES_KEPT];
    if (number < receives->lacks || *place_of) {
        pmesh_give_frame(receives->pool, frame);
        return true;
    }
    if (receives->early_bytes && receives->early_bytes + frame->nbytes > receives->window_bytes) {
        return false;
    }
    *place_of = frame;
    receives->early_bytes += frame->nbytes;
    while (receives->lacks - receives->opened < PMESH_FRAMES_KEPT &&
           (frame = receives->frames[receives->lacks % PMESH_FRAMES_KEPT])) {
        receives->lacks++;
        receives->early_bytes -= frame->nbytes;
        receives->grown += frame->nbytes;
    }
    return true;
}

bool pmesh_receives_owes(const struct pmesh_receives *receives, uint32_t place) {
    const struct pmesh_receive_subflow *subflow = &receives->subflows[place];
    return subflow->nbytes > subflow->acknowledged || subflow->told < receives->lacks;
}

bool pmesh_receives_is_due(const struct pmesh_receives *receives, uint32_t place, bool waiting) {
    const struct pmesh_receive_subflow *subflow = &receives->subflows[place];
    const uint64_t owed = subflow->nbytes - subflow->acknowledged;
    const uint64_t enough = waiting ? ACK_EARLY_BYTES : ACK_BYTES;
    return owed && (owed >= enough || receives->grown >= enough || subflow->records >= ACK_RECORDS);
}

struct pmesh_ack pmesh_receives_acknowledge(struct pmesh_receives *receives, uint32_t place,
                                            bool waiting) {
    struct pmesh_receive_subflow *subflow = &receives->subflows[place];
    subflow->acknowledged = subflow->nbytes;
    subflow->records = 0;
    receives->grown = 0;
    subflow->told = receives->lacks;
    return (struct pmesh_ack){subflow->nbytes, receives->lacks, waiting};
}
