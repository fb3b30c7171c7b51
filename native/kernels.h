/* The kernels of compression. Each gives the bits that pmesh/compression/ gives in numpy, but which
 * NaN it is may differ. All arrays may begin at any address. Thread-safe: a call leaves no state.
 *
 * A result of PMESH_BAD_ARGUMENT says that lengths do not fit; nothing was written then. */
#ifndef PMESH_KERNELS_H
#define PMESH_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "pmesh.h"

enum { PMESH_BAD_ARGUMENT = -1 };

/* One hop of a ring codec: `Codec.hop` in pmesh/compression/codecs.py. */
struct pmesh_hop {
    const void *incoming; /* uint8[wire_bytes]; NULL at the first hop */
    void *outgoing;       /* uint8[wire_bytes], written */
    size_t wire_bytes;
    const void *own;      /* float[count] */
    const void *residual; /* float[count]; NULL for zeros */
    void *residual_out;   /* float[count], written; may be `residual`; NULL for no feedback */
    size_t count;
    uint64_t counter; /* of the first random word, for stochastic rounding */
    float own_scale;
    float divisor;
    float residual_factor; /* from an error of the sum to an error of this rank's values */
};

/* Each returns how many finite values were clipped. */
PMESH_API int64_t pmesh_hop_fp16(const struct pmesh_hop *hop);
PMESH_API int64_t pmesh_hop_bf16(const struct pmesh_hop *hop);
PMESH_API int64_t pmesh_hop_int8(const struct pmesh_hop *hop);
PMESH_API int64_t pmesh_hop_int8_stochastic(const struct pmesh_hop *hop);

/* From uint8[wire_bytes] to float[count]. Any bytes decode to some values. Each returns 0. */
PMESH_API int64_t pmesh_decode_fp16(const void *wire, size_t wire_bytes, void *out, size_t count);
PMESH_API int64_t pmesh_decode_bf16(const void *wire, size_t wire_bytes, void *out, size_t count);
PMESH_API int64_t pmesh_decode_int8(const void *wire, size_t wire_bytes, void *out, size_t count);

/* The bytes of `count` values in the form of a codec (`enum pmesh_codec`); 0 if there is none. */
uint64_t pmesh_wire_bytes(int32_t codec, uint64_t count);
/* `draws.start_of`: the counter of the first random word. */
uint64_t pmesh_start_of(uint64_t key);

/* `one_bit.compress` and `one_bit.accumulate`; a residual is float[count], or NULL. */
PMESH_API int64_t pmesh_compress_one_bit(const void *own, const void *residual, void *residual_out,
                                         size_t count, void *wire, size_t wire_bytes);
PMESH_API int64_t pmesh_accumulate_one_bit(const void *wire, size_t wire_bytes, void *into,
                                           size_t count);

/* `random_k.draw_indices`: int64[k] indices below `count`, which is below 2^32, as is `offset`. */
PMESH_API int64_t pmesh_draw_indices(uint64_t counter, uint64_t count, uint64_t offset,
                                     void *indices, size_t k);

/* out = P Q^T, float[rows][columns], from float[rank][rows] and float[rank][columns]. `left`, if it
 * is not NULL, loses as much, and becomes 0 where it is not finite. Each count is of all values. */
PMESH_API int64_t pmesh_multiply(const void *p, size_t p_count, const void *q, size_t q_count,
                                 size_t rank, void *out, size_t out_count, void *left);

#endif
