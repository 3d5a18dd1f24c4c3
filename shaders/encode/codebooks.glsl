// Encoders of the codebook types, blocks of 256 values: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S. The search is that of
// vkback/quants/codebook_search.py, for each group of values under one scale: for each of TARGETS guesses of the step (which place the largest
// value at so many steps) it takes the nearest codebook entries and solves for the least-squares step. The best step of all is kept and rounded
// to the block's scales, and then the entries are chosen again. All entries are tried. Thread g takes group g;
// for packing, thread u takes unit u.
//
//   ENTRIES     of the codebook; each has PER_ENTRY values, 8 or 4
//   LEVEL(c)    the level of number c
//   EVEN        1: seven sign bits stand for eight; the number of negative values is even
//   EITHER      1: each entry chooses the sign of delta (IQ1_M)
//   SCALE_OFFSET, SCALE_STEP, MAX_SCALE  a scale is d * (SCALE_OFFSET + SCALE_STEP * s), s in 0..MAX_SCALE
//   TARGET_FIRST, TARGET_RATIO  the guesses: first one, and ratio of each to the one before
#extension GL_EXT_control_flow_attributes : require
#include CODES_FILE
#define ENTRY uint
uint entry(uint codes) { return codes; }
#include "quant/codebook.glsl"

const float NOTABLY = 1.00001;    // a constant group is fitted by several steps alike; all groups shall take the same one
const uint COUNT = 256u / GROUPS, VECTORS = COUNT / PER_ENTRY;
#if defined(TYPE_IQ1_S) || defined(TYPE_IQ1_M)
#define SIGNED 0
#else
#define SIGNED 1
#endif

shared uint signs[32];
shared uint index[256u / PER_ENTRY];    // IQ1: bit 11 set: delta is negative
shared vec2 fits[GROUPS];               // step; and, for IQ1_S, delta
shared uint scale[GROUPS];

// For the values from `first` on and entry e: (dot product, sum of squares of the entry, sum of its levels), all without delta.
vec3 products(uint first, uint e) {
    const uint codes = look_up(e);
    vec3 sums = vec3(0.0);
    [[unroll]] for (uint j = 0u; j < PER_ENTRY; j++) {
#if PER_ENTRY == 8
        const uint number = (codes >> (8u * (j & 3u) + 2u * (j >> 2))) & 3u;
#else
        const uint number = (codes >> (8u * j)) & 7u;
#endif
        const float level = LEVEL(number);
        sums += level * vec3(v[first + j], level, 1.0);
    }
    return sums;
}

// The first two with delta added to every level; `total` is the sum of the values.
vec2 with_delta(vec3 sums, float total, float delta) {
    return vec2(sums.x + delta * total, sums.y + 2.0 * delta * sums.z + float(PER_ENTRY) * delta * delta);
}

float total_of(uint first) {
    float total = 0.0;
    for (uint j = 0u; j < PER_ENTRY; j++) total += v[first + j];
    return total;
}

// The best step for group g, and by how much it reduces the squared error. either: each entry may have delta or -delta.
vec2 fit(uint g, float delta, bool either) {
    float widest = 0.0;
    for (uint j = 0u; j < COUNT; j++) widest = max(widest, abs(v[g * COUNT + j]));
    float steps[TARGETS];
    vec2 sums[TARGETS];
    float target = TARGET_FIRST;
    [[unroll]] for (uint i = 0u; i < TARGETS; i++) {
        steps[i] = widest / target;
        sums[i] = vec2(0.0);
        target *= TARGET_RATIO;
    }
    for (uint vector = 0u; vector < VECTORS; vector++) {
        const uint first = g * COUNT + vector * PER_ENTRY;
        const float total = total_of(first);
        float costs[TARGETS];
        vec2 chosen[TARGETS];
        [[unroll]] for (uint i = 0u; i < TARGETS; i++) {
            costs[i] = 3.4e38;
            chosen[i] = vec2(0.0);
        }
        for (uint e = 0u; e < ENTRIES; e++) {
            const vec3 found = products(first, e);
            for (uint way = 0u; way < (either ? 2u : 1u); way++) {
                const vec2 own = with_delta(found, total, way == 0u ? delta : -delta);
                [[unroll]] for (uint i = 0u; i < TARGETS; i++) {
                    const float cost = steps[i] * own.y - 2.0 * own.x;
                    if (cost < costs[i]) {
                        costs[i] = cost;
                        chosen[i] = own;
                    }
                }
            }
        }
        [[unroll]] for (uint i = 0u; i < TARGETS; i++) sums[i] += chosen[i];
    }
    vec2 best = vec2(0.0);
    [[unroll]] for (uint i = 0u; i < TARGETS; i++) {
        const float fitted = sums[i].x * reciprocal(sums[i].y);
        if (fitted > 0.0 && sums[i].x * fitted > NOTABLY * best.y) best = vec2(fitted, sums[i].x * fitted);
    }
    return best;
}

// The entry nearest to the values from `first` on, for a given step.
uint nearest(uint first, float steps, float delta, bool either) {
    const float total = total_of(first);
    float least = 3.4e38;
    uint best = 0u;
    for (uint e = 0u; e < ENTRIES; e++) {
        const vec3 found = products(first, e);
        for (uint way = 0u; way < (either ? 2u : 1u); way++) {
            const vec2 own = with_delta(found, total, way == 0u ? delta : -delta);
            const float cost = steps * own.y - 2.0 * own.x;
            if (cost < least) {
                least = cost;
                best = e | way << 11;
            }
        }
    }
    return best;
}

uint sign_codes(uint u) {
    uint word = 0u;
    for (uint b = 0u; b < 4u; b++) word |= (signs[4u * u + b] & 127u) << (7u * b);
    return word;
}
uint low_bytes(uint at) {
    return (index[at] & 255u) | (index[at + 1u] & 255u) << 8 | (index[at + 2u] & 255u) << 16 | (index[at + 3u] & 255u) << 24;
}

void encode(uint block) {
    const uint thread = gl_LocalInvocationID.x;
    unit_table(thread, WG_SIZE);
#if SIGNED
    for (uint e = thread; e < 32u; e += WG_SIZE) {
        uint negative = 0u, least = 0u;
        for (uint j = 0u; j < 8u; j++) {
            const float value = v[8u * e + j];
            negative |= uint(value < 0.0) << j;
            v[8u * e + j] = abs(value);
            if (abs(value) < v[8u * e + least]) least = j;
        }
        if (EVEN == 1 && (bitCount(negative) & 1) == 1) {
            negative ^= 1u << least;
            v[8u * e + least] = -v[8u * e + least];
        }
        signs[e] = negative;
    }
#endif
    barrier();
    for (uint g = thread; g < GROUPS; g += WG_SIZE) {
#if defined(TYPE_IQ1_S)
        const vec2 plus = fit(g, 0.125, false), minus = fit(g, -0.125, false);
        fits[g] = minus.y > NOTABLY * plus.y ? vec2(minus.x, -0.125) : vec2(plus.x, 0.125);
#elif defined(TYPE_IQ1_M)
        fits[g] = vec2(fit(g, 0.125, true).x, 0.125);
#else
        fits[g] = vec2(fit(g, 0.0, false).x, 0.0);
#endif
    }
    barrier();
    float widest = 0.0;
    for (uint g = 0u; g < GROUPS; g++) widest = max(widest, fits[g].x);
    const float d = as_half(widest / (SCALE_OFFSET + SCALE_STEP * MAX_SCALE));
    for (uint g = thread; g < GROUPS; g += WG_SIZE) {
        scale[g] = uint(clamp(roundEven((fits[g].x * reciprocal(d) - SCALE_OFFSET) / SCALE_STEP), 0.0, MAX_SCALE));
        for (uint vector = 0u; vector < VECTORS; vector++) {
            const float steps = d * (SCALE_OFFSET + SCALE_STEP * float(scale[g]));
            index[g * VECTORS + vector] = nearest(g * COUNT + vector * PER_ENTRY, steps, fits[g].y, EITHER == 1);
        }
    }
    barrier();
    for (uint u = thread; u < 8u; u += WG_SIZE) {
        const uint unit = 8u * block + u;
#if defined(TYPE_IQ2_XXS)
        put_word(0u, 2u * unit, low_bytes(4u * u));
        put_word(0u, 2u * unit + 1u, sign_codes(u) | scale[u] << 28);
#elif defined(TYPE_IQ2_XS)
        for (uint w = 0u; w < 2u; w++) {
            const uint at = 4u * u + 2u * w;
            put_word(0u, 2u * unit + w, index[at] | (signs[at] & 127u) << 9 | index[at + 1u] << 16 | (signs[at + 1u] & 127u) << 25);
        }
        put(p.plane[0], unit, 8u, scale[2u * u] | scale[2u * u + 1u] << 4);
#elif defined(TYPE_IQ2_S)
        uint head = scale[2u * u] << 8 | scale[2u * u + 1u] << 12;
        for (uint b = 0u; b < 4u; b++) head |= (index[4u * u + b] >> 8) << (2u * b);
        put_word(0u, 2u * unit, low_bytes(4u * u));
        put_word(0u, 2u * unit + 1u, signs[4u * u] | signs[4u * u + 1u] << 8 | signs[4u * u + 2u] << 16 | signs[4u * u + 3u] << 24);
        put(p.plane[0], unit, 16u, head);
#elif defined(TYPE_IQ3_XXS)
        for (uint w = 0u; w < 2u; w++) put_word(0u, 2u * unit + w, low_bytes(8u * u + 4u * w));
        put_word(p.plane[0], unit, sign_codes(u) | scale[u] << 28);
#elif defined(TYPE_IQ3_S)
        uint high = 0u;
        for (uint b = 0u; b < 8u; b++) high |= (index[8u * u + b] >> 8) << b;
        for (uint w = 0u; w < 2u; w++) put_word(0u, 2u * unit + w, low_bytes(8u * u + 4u * w));
        put_word(p.plane[0], unit, signs[4u * u] | signs[4u * u + 1u] << 8 | signs[4u * u + 2u] << 16 | signs[4u * u + 3u] << 24);
        put(p.plane[1], unit, 8u, high);
#elif defined(TYPE_IQ1_S)
        uint high = scale[u] << 12 | (fits[u].y < 0.0 ? 0x8000u : 0u);
        for (uint b = 0u; b < 4u; b++) high |= (index[4u * u + b] >> 8) << (3u * b);
        put_word(0u, unit, low_bytes(4u * u));
        put(p.plane[0], unit, 16u, high);
#elif defined(TYPE_IQ1_M)
        uint high = 0u;
        for (uint b = 0u; b < 4u; b++) high |= (index[4u * u + b] >> 8) << (4u * b);
        put_word(0u, unit, low_bytes(4u * u));
        put(p.plane[0], unit, 16u, high);
#endif
    }
    if (thread != 0u) return;
#if defined(TYPE_IQ1_M)
    uvec2 words = uvec2(0u);
    for (uint g = 0u; g < 16u; g++) words[g >> 3] |= scale[g] << (16u * ((g >> 2) & 1u) + 3u * (g & 3u));
    for (uint i = 0u; i < 4u; i++) words[i >> 1] |= ((half_bits(d) >> (4u * i)) & 15u) << (16u * (i & 1u) + 12u);
    for (uint w = 0u; w < 2u; w++) put_word(p.plane[1], 2u * block + w, words[w]);
#elif defined(TYPE_IQ3_S)
    uint scales = 0u;
    for (uint g = 0u; g < 8u; g++) scales |= scale[g] << (4u * g);
    put_word(p.plane[2], block, scales);
    put(p.plane[3], block, 16u, half_bits(d));
#elif defined(TYPE_IQ2_XXS)
    put(p.plane[0], block, 16u, half_bits(d));
#else
    put(p.plane[1], block, 16u, half_bits(d));
#endif
}
