// The two windows as a library for tests/native/test_windows.py, which compares them with Python's.
#include "../windows.c"

struct both {
    struct pmesh_pool pool;
    struct pmesh_sends sends;
    struct pmesh_receives receives;
};

struct both *new_windows(uint64_t window_bytes, uint64_t window_records) {
    struct both *both = calloc(1, sizeof *both);
    if (both) {
        pmesh_sends_begin(&both->sends, &both->pool);
        pmesh_receives_begin(&both->receives, &both->pool);
        both->sends.window_bytes = both->receives.window_bytes = window_bytes;
        both->sends.window_records = both->receives.window_records = window_records;
    }
    return both;
}

void free_windows(struct both *both) {
    pmesh_sends_end(&both->sends);
    pmesh_receives_end(&both->receives);
    pmesh_empty_pool(&both->pool);
    free(both);
}

struct pmesh_sends *sends_of(struct both *both) {
    return &both->sends;
}

struct pmesh_receives *receives_of(struct both *both) {
    return &both->receives;
}

static struct pmesh_frame *new_frame(struct both *both, uint64_t number, uint64_t nbytes) {
    struct pmesh_frame *frame = pmesh_take_frame(&both->pool, nbytes);
    memset(frame->bytes, 0, nbytes);
    pmesh_put(frame->bytes, number, PMESH_NUMBER_BYTES);
    return frame;
}

void put_frame(struct both *both, uint64_t nbytes) {
    pmesh_sends_put(&both->sends, new_frame(both, both->sends.next, nbytes));
}

bool bring_frame(struct both *both, uint32_t place, uint64_t number, uint64_t nbytes) {
    struct pmesh_frame *frame = new_frame(both, number, nbytes);
    const bool fits = pmesh_receives_arrived_untrusted(&both->receives, place, frame);
    if (!fits) {
        pmesh_give_frame(&both->pool, frame);
    }
    return fits;
}

// The number of the record that this connection writes next, and what is left of it; -1 for none.
int64_t next_number(struct both *both, uint32_t place, uint64_t *left) {
    const uint8_t *part = pmesh_sends_next_part(&both->sends, place, left);
    return part ? (int64_t)both->sends.subflows[place].current_number : -1;
}

bool acknowledge(struct both *both, uint32_t place, uint64_t received, uint64_t wanted,
                 bool waiting, double now, bool is_late) {
    const struct pmesh_ack ack = {received, wanted, waiting};
    return pmesh_sends_acknowledge_untrusted(&both->sends, place, &ack, now, is_late);
}

double rate_of(const struct both *both, uint32_t place) {
    return both->sends.subflows[place].bytes_per_s;
}

int64_t first_number(const struct both *both) {
    const struct pmesh_frame *first = pmesh_receives_first(&both->receives);
    return first ? (int64_t)pmesh_get(first->bytes, PMESH_NUMBER_BYTES) : -1;
}

void take_ack(struct both *both, uint32_t place, bool waiting, uint64_t ack[2]) {
    const struct pmesh_ack made = pmesh_receives_acknowledge(&both->receives, place, waiting);
    ack[0] = made.received;
    ack[1] = made.wanted;
}
