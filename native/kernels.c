#include "kernels.h"

#include <float.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian");

/* x86-64 alone has no vector instructions of 32 bytes, which most machines have. Where gcc compiles
 * for glibc, the loader picks one of two versions. (Those of clang 14 lack the symbol without a
 * suffix. When the loader picks, ThreadSanitizer is not there yet.) */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) &&                            \
    !defined(__SANITIZE_THREAD__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* So that each version of an exported function has its own. */
#define INLINE static inline __attribute__((always_inline))

/* What stands in records and arenas, at any address. */
typedef float any_float __attribute__((aligned(1), may_alias));
typedef uint16_t any_u16 __attribute__((aligned(1), may_alias));
typedef uint32_t any_u32 __attribute__((aligned(1), may_alias));
typedef int64_t any_i64 __attribute__((aligned(1), may_alias));

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)
#define SIGN UINT32_C(0x80000000)
#define INFINITE 0x7F800000 /* the bits of infinity; a larger magnitude is a NaN */

enum {
    BLOCK = 256, /* values of int8 with one scale; here also those of fp16 and bf16 at a time */
    ONE_BIT_BLOCK = 1024
};

INLINE size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

INLINE size_t rounded_up(size_t count, size_t unit) {
    return count / unit + (count % unit != 0);
}

/* `count` values of at most 8 bytes are at an address, and on the wire take what was given. */
INLINE int fits(const void *values, size_t count, size_t wire_bytes, size_t expected) {
    return count <= SIZE_MAX / 8 && wire_bytes == expected && (values != NULL || count == 0);
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int32_t magnitude_of(float value) {
    return (int32_t)(bits_of(value) & ~SIGN);
}

INLINE float finite_or_0(float value) {
    return magnitude_of(value) < INFINITE ? value : 0.0f;
}

/* To the nearest, ties to even, for magnitudes below 2^22; beyond 2^23 a float has no fraction. */
INLINE float rounded(float value) {
    const float beyond = 12582912.0f; /* 1.5 * 2^23 */
    float magnitude = float_of(bits_of(value) & ~SIGN);
    return float_of(bits_of((magnitude + beyond) - beyond) | (bits_of(value) & SIGN));
}

/* The finalizer of SplitMix64; pmesh/compression/draws.py. */
INLINE uint64_t finalized(uint64_t word) {
    word = (word ^ (word >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ (word >> 27)) * UINT64_C(0x94D049BB133111EB);
    return word ^ (word >> 31);
}

/* --- what all hops do with a block of at most BLOCK values */

INLINE void take_own(float *restrict total, const struct pmesh_hop *hop, size_t start, size_t n) {
    const any_float *own = (const any_float *)hop->own + start;
    const float scale = hop->own_scale;
    if (hop->residual == NULL) {
        for (size_t i = 0; i < n; i++)
            total[i] = scale * own[i];
    } else {
        const any_float *residual = (const any_float *)hop->residual + start;
        for (size_t i = 0; i < n; i++)
            total[i] = scale * (own[i] + residual[i]);
    }
}

INLINE void add_arrived(float *restrict total, const float *restrict arrived, size_t n) {
    for (size_t i = 0; i < n; i++)
        total[i] = arrived[i] + total[i];
}

INLINE void divide(float *total, float divisor, size_t n) {
    if (divisor != 1.0f)
        for (size_t i = 0; i < n; i++)
            total[i] = total[i] / divisor;
}

INLINE void keep_residual(const struct pmesh_hop *hop, const float *restrict total,
                          const float *restrict image, size_t start, size_t n) {
    any_float *restrict kept = (any_float *)hop->residual_out + start;
    const float factor = hop->residual_factor;
    for (size_t i = 0; i < n; i++)
        kept[i] = finite_or_0((total[i] - image[i]) * factor);
}

/* --- fp16 and bf16 */

INLINE size_t bytes_of_halves(size_t count) {
    return 4 * rounded_up(count, 2);
}

INLINE void decode_bf16(any_float *restrict values, const any_u16 *restrict halves, size_t n) {
    for (size_t i = 0; i < n; i++)
        values[i] = float_of((uint32_t)halves[i] << 16);
}

/* A NaN keeps its sign and becomes quiet. */
INLINE void encode_bf16(any_u16 *restrict halves, const float *restrict values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(values[i]);
        uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        uint32_t quiet = (bits >> 16 & 0x8000) | 0x7FC0;
        halves[i] = (uint16_t)(magnitude_of(values[i]) > INFINITE ? quiet : nearest);
    }
}

/* 2^112 is the difference of the exponents' biases; right for denormals, too. */
INLINE void decode_fp16(any_float *restrict values, const any_u16 *restrict halves, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t half = halves[i];
        uint32_t bits = bits_of(float_of((half & 0x7FFF) << 13) * 0x1p112f);
        uint32_t exponent = (half & 0x7C00) == 0x7C00 ? INFINITE : 0;
        values[i] = float_of(bits | exponent | (half & 0x8000) << 16);
    }
}

/* Returns how many finite values round beyond 65504, and were clipped. */
INLINE int32_t encode_fp16(any_u16 *restrict halves, const float *restrict values, size_t n) {
    int32_t clipped = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t magnitude = magnitude_of(values[i]);
        int32_t sign = (int32_t)(bits_of(values[i]) >> 16 & 0x8000);
        int32_t odd = magnitude >> 13 & 1;
        /* 112 is the difference of the exponents' biases. */
        int32_t normal = (magnitude - (112 << 23) + 0xFFF + odd) >> 13;
        /* The last bit of a number from 0.5 on is 2^-24, the smallest denormal of fp16. */
        float raised = float_of((uint32_t)magnitude) + 0.5f;
        int32_t denormal = (int32_t)(bits_of(raised) - bits_of(0.5f));
        int32_t half = magnitude < 113 << 23 ? denormal : normal; /* 2^-14, the smallest normal */
        half = half < 0x7BFF ? half : 0x7BFF;
        half = magnitude < INFINITE ? half : magnitude > INFINITE ? 0x7E00 : 0x7C00;
        halves[i] = (uint16_t)(half | sign);
        /* 65520 rounds to 2^16. */
        clipped += (magnitude >= 0x477FF000) - (magnitude >= INFINITE);
    }
    return clipped;
}

INLINE int64_t hop_halves(const struct pmesh_hop *hop, int fp16) {
    if (!fits(hop->own, hop->count, hop->wire_bytes, bytes_of_halves(hop->count)))
        return PMESH_BAD_ARGUMENT;
    float total[BLOCK], image[BLOCK];
    int64_t clipped = 0;
    for (size_t start = 0; start < hop->count; start += BLOCK) {
        size_t n = smaller(BLOCK, hop->count - start);
        any_u16 *sent = (any_u16 *)hop->outgoing + start;
        take_own(total, hop, start, n);
        if (hop->incoming != NULL) {
            const any_u16 *arrived = (const any_u16 *)hop->incoming + start;
            fp16 ? decode_fp16(image, arrived, n) : decode_bf16(image, arrived, n);
            add_arrived(total, image, n);
        }
        divide(total, hop->divisor, n);
        if (fp16)
            clipped += encode_fp16(sent, total, n);
        else
            encode_bf16(sent, total, n);
        if (hop->residual_out != NULL) {
            fp16 ? decode_fp16(image, sent, n) : decode_bf16(image, sent, n);
            keep_residual(hop, total, image, start, n);
        }
    }
    if (hop->count % 2)
        ((any_u16 *)hop->outgoing)[hop->count] = 0;
    return clipped;
}

FOR_EACH_PROCESSOR int64_t pmesh_hop_fp16(const struct pmesh_hop *hop) {
    return hop_halves(hop, 1);
}

FOR_EACH_PROCESSOR int64_t pmesh_hop_bf16(const struct pmesh_hop *hop) {
    return hop_halves(hop, 0);
}

INLINE int64_t decode_halves(const any_u16 *wire, size_t wire_bytes, any_float *out, size_t count,
                             int fp16) {
    if (!fits(out, count, wire_bytes, bytes_of_halves(count)))
        return PMESH_BAD_ARGUMENT;
    fp16 ? decode_fp16(out, wire, count) : decode_bf16(out, wire, count);
    return 0;
}

FOR_EACH_PROCESSOR int64_t pmesh_decode_fp16(const void *wire, size_t wire_bytes, void *out,
                                             size_t count) {
    return decode_halves(wire, wire_bytes, out, count, 1);
}

FOR_EACH_PROCESSOR int64_t pmesh_decode_bf16(const void *wire, size_t wire_bytes, void *out,
                                             size_t count) {
    return decode_halves(wire, wire_bytes, out, count, 0);
}

/* --- int8: float[blocks] scales, int8[count] codes, zeros up to a multiple of 4 bytes */

INLINE size_t bytes_of_scales(size_t count) {
    return sizeof(float) * rounded_up(count, BLOCK);
}

INLINE size_t bytes_of_int8(size_t count) {
    return bytes_of_scales(count) + 4 * rounded_up(count, 4);
}

INLINE void decode_int8(any_float *restrict values, const int8_t *restrict codes, float scale,
                        size_t n) {
    for (size_t i = 0; i < n; i++)
        values[i] = (float)codes[i] * scale;
}

/* NaN if the block has an infinity or a NaN. */
INLINE float scale_of(const float *values, size_t n) {
    const float levels = 127.0f, smallest = 0x1p-126f; /* a smaller scale would be denormal */
    /* 127 times the next larger float would be infinity. */
    const float largest_scale = float_of(bits_of(FLT_MAX / 127.0f) - 1);
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t magnitude = magnitude_of(values[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= INFINITE)
        return float_of(0x7FC00000);
    float scale = float_of((uint32_t)largest) / levels;
    scale = scale > smallest ? scale : smallest;
    return scale < largest_scale ? scale : largest_scale;
}

INLINE void quantize(float *restrict image, const float *restrict total, float scale, size_t n) {
    for (size_t i = 0; i < n; i++)
        image[i] = rounded(total[i] / scale);
}

/* Down or up at random: each word gives four values, from its lowest bits on. */
INLINE void quantize_randomly(float *restrict image, const float *restrict total, float scale,
                              uint64_t counter, size_t n) {
    uint64_t words[BLOCK / 4];
    uint16_t quarters[BLOCK];
    for (size_t i = 0; i < BLOCK / 4; i++)
        words[i] = finalized(counter + i * GOLDEN);
    memcpy(quarters, words, sizeof quarters);
    for (size_t i = 0; i < n; i++) {
        float raised = total[i] / scale + (float)quarters[i] * 0x1p-16f;
        float nearest = rounded(raised);
        float code = nearest - (float)(nearest > raised);
        code = code < 127.0f ? code : 127.0f; /* a quotient may be 127.00001 */
        image[i] = code > -127.0f ? code : -127.0f;
    }
}

INLINE void hop_block(const struct pmesh_hop *hop, size_t block, size_t n, int stochastic) {
    float total[BLOCK], image[BLOCK];
    const size_t start = block * BLOCK, codes_from = bytes_of_scales(hop->count);
    take_own(total, hop, start, n);
    if (hop->incoming != NULL) {
        const int8_t *arrived = (const int8_t *)hop->incoming + codes_from + start;
        decode_int8(image, arrived, ((const any_float *)hop->incoming)[block], n);
        add_arrived(total, image, n);
    }
    divide(total, hop->divisor, n);
    const float scale = scale_of(total, n);
    if (scale != scale)
        memset(image, 0, sizeof image);
    else if (stochastic)
        quantize_randomly(image, total, scale, hop->counter + start / 4 * GOLDEN, n);
    else
        quantize(image, total, scale, n);
    ((any_float *)hop->outgoing)[block] = scale;
    int8_t *restrict codes = (int8_t *)hop->outgoing + codes_from + start;
    for (size_t i = 0; i < n; i++)
        codes[i] = (int8_t)image[i];
    if (hop->residual_out != NULL) {
        for (size_t i = 0; i < n; i++)
            image[i] = image[i] * scale;
        keep_residual(hop, total, image, start, n);
    }
}

INLINE int64_t hop_int8(const struct pmesh_hop *hop, int stochastic) {
    const size_t used = bytes_of_scales(hop->count) + hop->count;
    if (!fits(hop->own, hop->count, hop->wire_bytes, bytes_of_int8(hop->count)))
        return PMESH_BAD_ARGUMENT;
    for (size_t block = 0; block * BLOCK < hop->count; block++)
        hop_block(hop, block, smaller(BLOCK, hop->count - block * BLOCK), stochastic);
    memset((char *)hop->outgoing + used, 0, hop->wire_bytes - used);
    return 0;
}

FOR_EACH_PROCESSOR int64_t pmesh_hop_int8(const struct pmesh_hop *hop) {
    return hop_int8(hop, 0);
}

FOR_EACH_PROCESSOR int64_t pmesh_hop_int8_stochastic(const struct pmesh_hop *hop) {
    return hop_int8(hop, 1);
}

FOR_EACH_PROCESSOR int64_t pmesh_decode_int8(const void *wire, size_t wire_bytes, void *out,
                                             size_t count) {
    if (!fits(out, count, wire_bytes, bytes_of_int8(count)))
        return PMESH_BAD_ARGUMENT;
    const int8_t *codes = (const int8_t *)wire + bytes_of_scales(count);
    const any_float *scales = wire;
    any_float *values = out;
    size_t whole = count / BLOCK * BLOCK; /* with a constant length the loop has no remainder */
    for (size_t start = 0; start < whole; start += BLOCK)
        decode_int8(values + start, codes + start, scales[start / BLOCK], BLOCK);
    if (whole < count)
        decode_int8(values + whole, codes + whole, scales[whole / BLOCK], count - whole);
    return 0;
}

uint64_t pmesh_wire_bytes(int32_t codec, uint64_t count) {
    switch (codec) {
    case PMESH_CODEC_FP16:
    case PMESH_CODEC_BF16: return bytes_of_halves(count);
    case PMESH_CODEC_INT8:
    case PMESH_CODEC_INT8_STOCHASTIC: return bytes_of_int8(count);
    default: return 0;
    }
}

uint64_t pmesh_start_of(uint64_t key) {
    return finalized(key);
}

/* --- one bit: float[blocks] mean magnitudes, a bit for each value, zeros up to 4 bytes */

INLINE size_t bytes_of_one_bit(size_t count) {
    return 4 * rounded_up(count, ONE_BIT_BLOCK) + 4 * rounded_up(count, 32);
}

/* The magnitudes are added up by halves, as in numpy. */
INLINE float mean_magnitude(const float *restrict values, size_t n) {
    float sums[ONE_BIT_BLOCK];
    for (size_t i = 0; i < n; i++)
        sums[i] = float_of(bits_of(values[i]) & ~SIGN);
    for (size_t i = n; i < ONE_BIT_BLOCK; i++)
        sums[i] = 0.0f;
    for (size_t half = ONE_BIT_BLOCK / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++)
            sums[i] += sums[half + i];
    return sums[0] / (float)n;
}

INLINE uint32_t signs_of(const float *values, size_t n) {
    uint32_t word = 0;
    for (uint32_t i = 0; i < n; i++)
        word |= bits_of(values[i]) >> 31 << i;
    return word;
}

FOR_EACH_PROCESSOR int64_t pmesh_compress_one_bit(const void *own, const void *residual,
                                                  void *residual_out, size_t count, void *wire,
                                                  size_t wire_bytes) {
    if (!fits(own, count, wire_bytes, bytes_of_one_bit(count)))
        return PMESH_BAD_ARGUMENT;
    any_float *means = wire;
    any_u32 *signs = (any_u32 *)wire + rounded_up(count, ONE_BIT_BLOCK);
    float values[ONE_BIT_BLOCK];
    for (size_t start = 0; start < count; start += ONE_BIT_BLOCK) {
        size_t n = smaller(ONE_BIT_BLOCK, count - start);
        memcpy(values, (const any_float *)own + start, n * sizeof *values);
        if (residual != NULL) {
            const any_float *before = (const any_float *)residual + start;
            for (size_t i = 0; i < n; i++)
                values[i] += before[i];
        }
        const float mean = mean_magnitude(values, n);
        means[start / ONE_BIT_BLOCK] = mean;
        size_t whole = n / 32 * 32;
        for (size_t i = 0; i < whole; i += 32)
            signs[(start + i) / 32] = signs_of(values + i, 32);
        if (whole < n)
            signs[(start + whole) / 32] = signs_of(values + whole, n - whole);
        if (residual_out != NULL) {
            any_float *restrict after = (any_float *)residual_out + start;
            const uint32_t magnitude = bits_of(mean);
            for (size_t i = 0; i < n; i++)
                after[i] =
                    finite_or_0(values[i] - float_of((bits_of(values[i]) & SIGN) | magnitude));
        }
    }
    return 0;
}

INLINE void add_signed(any_float *restrict into, uint32_t word, uint32_t magnitude, size_t n) {
    for (uint32_t i = 0; i < n; i++)
        into[i] += float_of((word >> i) << 31 | magnitude);
}

FOR_EACH_PROCESSOR int64_t pmesh_accumulate_one_bit(const void *wire, size_t wire_bytes, void *into,
                                                    size_t count) {
    if (!fits(into, count, wire_bytes, bytes_of_one_bit(count)))
        return PMESH_BAD_ARGUMENT;
    const any_u32 *means = wire, *signs = means + rounded_up(count, ONE_BIT_BLOCK);
    any_float *values = into;
    size_t whole = count / 32 * 32;
    for (size_t i = 0; i < whole; i += 32)
        add_signed(values + i, signs[i / 32], means[i / ONE_BIT_BLOCK], 32);
    if (whole < count)
        add_signed(values + whole, signs[whole / 32], means[whole / ONE_BIT_BLOCK], count - whole);
    return 0;
}

/* --- random indices, and the product of PowerSGD */

/* One index from each of k runs, whose lengths differ by at most 1; divides by k only once. */
FOR_EACH_PROCESSOR int64_t pmesh_draw_indices(uint64_t counter, uint64_t count, uint64_t offset,
                                              void *indices, size_t k) {
    if (k > count || count > UINT32_MAX || offset > UINT32_MAX)
        return PMESH_BAD_ARGUMENT;
    if (k == 0)
        return 0;
    const uint64_t shortest = count / k, more = count % k;
    uint64_t start = 0, carry = 0;
    for (size_t i = 0; i < k; i++) {
        uint64_t word = finalized(counter + i * GOLDEN);
        carry += more;
        uint64_t longer = carry >= k;
        carry -= longer * k;
        uint64_t length = shortest + longer;
        uint64_t place = start + ((word >> 32) * length >> 32) + offset;
        ((any_i64 *)indices)[i] = (int64_t)(place - (place >= count) * count);
        start += length;
    }
    return 0;
}

INLINE void subtract(any_float *restrict kept, const float *restrict product, size_t n) {
    for (size_t j = 0; j < n; j++)
        kept[j] = finite_or_0(kept[j] - product[j]);
}

/* A part of one row; the columns of P and Q are added up from first to last. */
INLINE void multiply_part(float *restrict product, const any_float *p, const any_float *q,
                          size_t rank, size_t rows, size_t columns, size_t n) {
    for (size_t j = 0; j < n; j++)
        product[j] = p[0] * q[j];
    for (size_t i = 1; i < rank; i++) {
        const float factor = p[i * rows];
        for (size_t j = 0; j < n; j++)
            product[j] = product[j] + factor * q[i * columns + j];
    }
}

FOR_EACH_PROCESSOR int64_t pmesh_multiply(const void *p, size_t p_count, const void *q,
                                          size_t q_count, size_t rank, void *out, size_t out_count,
                                          void *left) {
    const size_t rows = rank ? p_count / rank : 0, columns = rank ? q_count / rank : 0;
    if (rows * rank != p_count || columns * rank != q_count)
        return PMESH_BAD_ARGUMENT;
    if (rows ? out_count / rows != columns || out_count % rows : out_count)
        return PMESH_BAD_ARGUMENT;
    float product[ONE_BIT_BLOCK];
    for (size_t row = 0; row < rows; row++)
        for (size_t start = 0; start < columns; start += ONE_BIT_BLOCK) {
            size_t n = smaller(ONE_BIT_BLOCK, columns - start), at = row * columns + start;
            multiply_part(product, (const any_float *)p + row, (const any_float *)q + start, rank,
                          rows, columns, n);
            memcpy((any_float *)out + at, product, n * sizeof *product);
            if (left != NULL)
                subtract((any_float *)left + at, product, n);
        }
    return 0;
}
