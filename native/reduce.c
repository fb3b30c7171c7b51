// Reductions of two ranks' values, in place: the bits of numpy's ufuncs, except those of a NaN.
// Integers wrap, so signed ones are computed as unsigned. A bool is any byte that is not 0.
#include "pmesh.h"

#include <math.h>

#define LOOP(T, EXPRESSION)                                                                        \
    do {                                                                                           \
        T *restrict x = into;                                                                      \
        const T *restrict y = other;                                                               \
        for (uint64_t i = 0; i < count; i++) {                                                     \
            const T a = x[i], b = y[i];                                                            \
            x[i] = (T)(EXPRESSION);                                                                \
        }                                                                                          \
    } while (0)

// For a type T, computed in the type W, which is unsigned and at least as wide as an int.
#define INTEGERS(NAME, T, W)                                                                       \
    static void NAME(int32_t reduction, void *into, const void *other, uint64_t count) {           \
        switch (reduction) {                                                                       \
        case PMESH_SUM: LOOP(T, (W)a + (W)b); break;                                               \
        case PMESH_PROD: LOOP(T, (W)a * (W)b); break;                                              \
        case PMESH_MAX: LOOP(T, a > b ? a : b); break;                                             \
        case PMESH_MIN: LOOP(T, a < b ? a : b); break;                                             \
        case PMESH_BAND: LOOP(T, (W)a & (W)b); break;                                              \
        case PMESH_BOR: LOOP(T, (W)a | (W)b); break;                                               \
        default: LOOP(T, (W)a ^ (W)b); break;                                                      \
        }                                                                                          \
    }

INTEGERS(int64s, int64_t, uint64_t)
INTEGERS(uint64s, uint64_t, uint64_t)
INTEGERS(int32s, int32_t, uint32_t)
INTEGERS(uint32s, uint32_t, uint32_t)
INTEGERS(int16s, int16_t, uint32_t)
INTEGERS(uint16s, uint16_t, uint32_t)
INTEGERS(int8s, int8_t, uint32_t)
INTEGERS(uint8s, uint8_t, uint32_t)

// A NaN on either side is the result, as in numpy.
#define FLOATS(NAME, T)                                                                            \
    static void NAME(int32_t reduction, void *into, const void *other, uint64_t count) {           \
        switch (reduction) {                                                                       \
        case PMESH_PROD: LOOP(T, a * b); break;                                                    \
        case PMESH_MAX: LOOP(T, (a >= b || a != a) ? a : b); break;                                \
        case PMESH_MIN: LOOP(T, (a <= b || a != a) ? a : b); break;                                \
        default: LOOP(T, a + b); break;                                                            \
        }                                                                                          \
    }

FLOATS(float64s, double)
FLOATS(float32s, float)

static void bools(int32_t reduction, void *into, const void *other, uint64_t count) {
    switch (reduction) {
    case PMESH_PROD:
    case PMESH_MIN:
    case PMESH_BAND: LOOP(uint8_t, (a != 0) & (b != 0)); break;
    case PMESH_BXOR: LOOP(uint8_t, (a != 0) ^ (b != 0)); break;
    default: LOOP(uint8_t, (a | b) != 0); break;
    }
}

static const uint8_t ITEMSIZES[PMESH_DTYPES] = {16, 8, 8, 4, 8, 8, 4, 4, 2, 2, 1, 1, 1};

static bool is_complex(int32_t dtype) {
    return dtype == PMESH_COMPLEX128 || dtype == PMESH_COMPLEX64;
}

static bool is_float(int32_t dtype) {
    return dtype == PMESH_FLOAT64 || dtype == PMESH_FLOAT32;
}

uint64_t pmesh_itemsize(int32_t dtype, int32_t reduction) {
    if (dtype < 0 || dtype >= PMESH_DTYPES || reduction < 0 || reduction >= PMESH_REDUCTIONS) {
        return 0;
    }
    if (is_complex(dtype) && reduction > PMESH_MEAN) {
        return 0; // numpy may fuse the operations of a product; it alone knows which
    }
    if (is_float(dtype) && reduction > PMESH_PROD) {
        return 0;
    }
    if (!is_float(dtype) && !is_complex(dtype) && reduction == PMESH_MEAN) {
        return 0;
    }
    return ITEMSIZES[dtype];
}

void pmesh_accumulate(int32_t dtype, int32_t reduction, void *into, const void *other,
                      uint64_t count) {
    switch (dtype) {
    case PMESH_COMPLEX128: float64s(PMESH_SUM, into, other, 2 * count); break;
    case PMESH_COMPLEX64: float32s(PMESH_SUM, into, other, 2 * count); break;
    case PMESH_FLOAT64: float64s(reduction, into, other, count); break;
    case PMESH_FLOAT32: float32s(reduction, into, other, count); break;
    case PMESH_INT64: int64s(reduction, into, other, count); break;
    case PMESH_UINT64: uint64s(reduction, into, other, count); break;
    case PMESH_INT32: int32s(reduction, into, other, count); break;
    case PMESH_UINT32: uint32s(reduction, into, other, count); break;
    case PMESH_INT16: int16s(reduction, into, other, count); break;
    case PMESH_UINT16: uint16s(reduction, into, other, count); break;
    case PMESH_INT8: int8s(reduction, into, other, count); break;
    case PMESH_UINT8: uint8s(reduction, into, other, count); break;
    default: bools(reduction, into, other, count); break;
    }
}

static uint64_t parts_of(int32_t dtype, uint64_t count) {
    return is_complex(dtype) ? 2 * count : count;
}

void pmesh_finish(int32_t dtype, int32_t reduction, void *into, uint64_t count,
                  uint32_t contributors) {
    if (reduction != PMESH_MEAN) {
        return;
    }
    const uint64_t parts = parts_of(dtype, count);
    if (dtype == PMESH_FLOAT64 || dtype == PMESH_COMPLEX128) {
        double *x = into;
        for (uint64_t i = 0; i < parts; i++) {
            x[i] /= (double)contributors;
        }
    } else {
        float *x = into;
        for (uint64_t i = 0; i < parts; i++) {
            x[i] /= (float)contributors;
        }
    }
}

void pmesh_make_nan_equal(int32_t dtype, void *values, uint64_t count) {
    const uint64_t parts = parts_of(dtype, count);
    if (dtype == PMESH_FLOAT64 || dtype == PMESH_COMPLEX128) {
        double *x = values;
        for (uint64_t i = 0; i < parts; i++) {
            x[i] = x[i] != x[i] ? (double)NAN : x[i];
        }
    } else if (dtype == PMESH_FLOAT32 || dtype == PMESH_COMPLEX64) {
        float *x = values;
        for (uint64_t i = 0; i < parts; i++) {
            x[i] = x[i] != x[i] ? NAN : x[i];
        }
    }
}
