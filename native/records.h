// What every record has: numbers in the order of the network, and the AEAD.
#ifndef PMESH_RECORDS_H
#define PMESH_RECORDS_H

#include "pmesh.h"

static inline void pmesh_put(uint8_t *to, uint64_t value, int nbytes) {
    for (int i = nbytes - 1; i >= 0; i--) {
        to[i] = (uint8_t)value;
        value >>= 8;
    }
}

static inline uint64_t pmesh_get(const uint8_t *from, int nbytes) {
    uint64_t value = 0;
    for (int i = 0; i < nbytes; i++) {
        value = value << 8 | from[i];
    }
    return value;
}

struct pmesh_cipher {
    pmesh_function seal, open;
    int32_t aead;
};

// Seal a body behind the header that is in the record. The record's number is its nonce.
void pmesh_seal(const struct pmesh_cipher *cipher, const uint8_t key[PMESH_KEY_BYTES],
                uint64_t number, uint8_t *record, const uint8_t *body, uint64_t nbytes);
// Open it, into its place or elsewhere; returns false if it was not sealed so.
bool pmesh_open_untrusted(const struct pmesh_cipher *cipher, const uint8_t key[PMESH_KEY_BYTES],
                          uint64_t number, const uint8_t *record, uint8_t *body, uint64_t nbytes);
// Whether an errno says that nothing is ready.
bool pmesh_would_block(int error);

#endif
