// What the tests of the library share: random numbers by seed, connections, and an AEAD that is
// none: it finds what was changed by accident or by a test, and hides nothing.
#ifndef PMESH_TESTS_TOY_H
#define PMESH_TESTS_TOY_H

#undef NDEBUG
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../pmesh.h"

enum { ROOM = PMESH_OVERHEAD_BYTES + PMESH_MAX_BODY_BYTES }; // of `in` and of `out`

static inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

struct random {
    uint64_t state;
};

// From 0 to below `end`; 0 if that is 0.
static inline uint64_t below(struct random *random, uint64_t end) {
    random->state += 0x9e3779b97f4a7c15U;
    return end ? mixed(random->state) % end : 0;
}

// Copy at most 8 bytes; a size that the compiler knows costs no call under ASan.
static inline void toy_copy(void *to, const void *from, uint64_t nbytes) {
    if (nbytes >= 8) {
        memcpy(to, from, 8);
    } else {
        memcpy(to, from, nbytes);
    }
}

static inline uint64_t toy_word(const uint8_t *from, uint64_t nbytes) {
    uint64_t word = 0;
    toy_copy(&word, from, nbytes);
    return word;
}

// Each 8 bytes with what depends on their place.
static inline void toy_xor(uint8_t *to, const uint8_t *from, uint64_t nbytes, uint64_t secret) {
    for (uint64_t i = 0; i < nbytes; i += 8) {
        const uint64_t left = nbytes - i, word = toy_word(from + i, left) ^ mixed(secret + i);
        toy_copy(to + i, &word, left);
    }
}

static inline void toy_absorb(uint64_t sums[4], const uint8_t *from, uint64_t nbytes) {
    for (uint64_t i = 0; i < nbytes; i += 8) {
        sums[i / 8 % 4] = mixed(sums[i / 8 % 4] + toy_word(from + i, nbytes - i));
    }
    sums[nbytes % 4] = mixed(sums[nbytes % 4] + nbytes);
}

static inline uint64_t toy_secret(const uint8_t *nonce, const uint8_t *key) {
    return mixed(toy_word(nonce, 8) + mixed(toy_word(nonce + 8, 8))) ^
           mixed(toy_word(key, 8) + mixed(toy_word(key + 8, 8)));
}

static inline void toy_tag(uint64_t tag[4], const uint8_t *sealed, uint64_t nbytes,
                           const uint8_t *header, uint64_t header_bytes, uint64_t secret) {
    for (int i = 0; i < 4; i++) {
        tag[i] = mixed(secret + (uint64_t)i);
    }
    toy_absorb(tag, header, header_bytes);
    toy_absorb(tag, sealed, nbytes);
    for (int i = 0; i < 4; i++) {
        tag[i] = mixed(tag[i] + tag[(i + 3) % 4]);
    }
}

static inline int toy_seal(uint8_t *to, unsigned long long *to_bytes, const uint8_t *body,
                           unsigned long long body_bytes, const uint8_t *header,
                           unsigned long long header_bytes, const uint8_t *unused,
                           const uint8_t *nonce, const uint8_t *key) {
    const uint64_t secret = toy_secret(nonce, key);
    uint64_t tag[4];
    assert(!to_bytes && !unused);
    toy_xor(to, body, body_bytes, secret);
    toy_tag(tag, to, body_bytes, header, header_bytes, secret);
    memcpy(to + body_bytes, tag, sizeof tag);
    return 0;
}

static inline int toy_open(uint8_t *body, unsigned long long *body_bytes, uint8_t *unused,
                           const uint8_t *from, unsigned long long from_bytes,
                           const uint8_t *header, unsigned long long header_bytes,
                           const uint8_t *nonce, const uint8_t *key) {
    const uint64_t secret = toy_secret(nonce, key), nbytes = from_bytes - PMESH_TAG_BYTES;
    uint64_t tag[4];
    assert(!body_bytes && !unused && from_bytes >= PMESH_TAG_BYTES);
    toy_tag(tag, from, nbytes, header, header_bytes, secret);
    if (memcmp(tag, from + nbytes, sizeof tag) != 0) {
        return -1;
    }
    toy_xor(body, from, nbytes, secret);
    return 0;
}

// The same, as libaegis declares its functions.
static inline int toy_aegis_seal(uint8_t *to, size_t tag_bytes, const uint8_t *body,
                                 size_t body_bytes, const uint8_t *header, size_t header_bytes,
                                 const uint8_t *nonce, const uint8_t *key) {
    assert(tag_bytes == PMESH_TAG_BYTES);
    return toy_seal(to, NULL, body, body_bytes, header, header_bytes, NULL, nonce, key);
}

static inline int toy_aegis_open(uint8_t *body, const uint8_t *from, size_t from_bytes,
                                 size_t tag_bytes, const uint8_t *header, size_t header_bytes,
                                 const uint8_t *nonce, const uint8_t *key) {
    assert(tag_bytes == PMESH_TAG_BYTES);
    return toy_open(body, NULL, NULL, from, from_bytes, header, header_bytes, nonce, key);
}

// An AEAD that a fuzzer can guess: the first bit of a tag says whether it is right.
static inline int guessable_open(uint8_t *body, unsigned long long *body_bytes, uint8_t *unused,
                                 const uint8_t *from, unsigned long long from_bytes,
                                 const uint8_t *header, unsigned long long header_bytes,
                                 const uint8_t *nonce, const uint8_t *key) {
    const uint64_t nbytes = from_bytes - PMESH_TAG_BYTES;
    assert(!body_bytes && !unused && header && header_bytes == PMESH_HEADER_BYTES && nonce && key);
    memmove(body, from, nbytes);
    return from[nbytes] & 1;
}

// Of exactly so many bytes, so that ASan finds what reads or writes beyond.
static inline void *exactly(uint64_t nbytes) {
    void *memory = malloc(nbytes ? nbytes : 1);
    assert(memory);
    return memory;
}

static inline struct pmesh_lane new_lane(int fd, const uint8_t key[PMESH_KEY_BYTES]) {
    struct pmesh_lane lane = {.peer_completed = -1, .fd = fd, .wake_up_bytes = 32768, .asked = 1};
    lane.out = exactly(ROOM);
    lane.in = exactly(ROOM);
    memcpy(lane.seal_key, key, PMESH_KEY_BYTES);
    memcpy(lane.open_key, key, PMESH_KEY_BYTES);
    return lane;
}

#endif
