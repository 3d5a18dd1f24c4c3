// Prologue of ATTN_DECODE: norm and RoPE of the workgroup's queries and of the key. The workgroup that owns row pos also stores key and value.
// Attention uses the new row rounded to F16, so the result equals that of storing first and reading back.
//
// HEAD_LANES neighbouring threads take the slots of a head (rope/slots.glsl). All loads are issued before the first is used, and none depends
// on pos.
//
//   angles  vec4 [ROPE_PAIRS / 2]: (cos, sin) of two neighbouring pairs (rope/angles.comp); none where ROPE_PAIRS is 0: nothing is turned

#include "rope/slots.glsl"

layout(binding = 1) writeonly buffer CacheK1 { uint cache_k1[]; };
layout(binding = 2) writeonly buffer CacheV1 { uint cache_v1[]; };
#if ROPE_PAIRS
layout(binding = BIND_ANGLES) readonly buffer Angles { vec4 angles[]; };
#endif
#if HAS_NORM
layout(binding = BIND_Q_NORM) readonly buffer QNorm { vec2 q_norm[]; };
layout(binding = BIND_K_NORM) readonly buffer KNorm { vec2 k_norm[]; };
#endif

#define WORDS (HD / 2)
#define SLOTS (HD / 4)
#define SLOT_ROUNDS ((SLOTS + HEAD_LANES - 1) / HEAD_LANES)
#define HEADS_AT_ONCE (WG_SIZE / HEAD_LANES)
#define HEAD_ROUNDS ((HEADS + HEADS_AT_ONCE) / HEADS_AT_ONCE)    // of HEADS queries and the key
#define VALUE_ROUNDS ((WORDS + WG_SIZE - 1) / WG_SIZE)

// Row pos, which the cache does not hold yet. The workgroup with the last split owns it and takes it before the rows of its split.
shared uvec4 new_k[COLS], new_v[COLS];
bool owns_new;

vec2 head_a[HEAD_ROUNDS][SLOT_ROUNDS], head_b[HEAD_ROUNDS][SLOT_ROUNDS];
#if HAS_NORM
vec2 norm_a[HEAD_ROUNDS][SLOT_ROUNDS], norm_b[HEAD_ROUNDS][SLOT_ROUNDS];
#endif
#if ROPE_PAIRS
vec4 slot_angles[SLOT_ROUNDS];
#endif
vec2 value_words[VALUE_ROUNDS];

void read_heads(uint tid, uint head0, uint kv) {
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++) {
        const uint head = i * HEADS_AT_ONCE + tid / HEAD_LANES;
        const uint from = (head < HEADS ? head0 + head : p.n_head + kv) * WORDS;
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) {
            const uint slot = j * HEAD_LANES + tid % HEAD_LANES;
            const uvec2 at = places(min(slot, SLOTS - 1));
            const bool there = head <= HEADS && slot < SLOTS;
            head_a[i][j] = there ? qkv2[from + at.x] : vec2(0.0);
            head_b[i][j] = there ? qkv2[from + at.y] : vec2(0.0);
        }
    }
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++)
        value_words[i] = qkv2[(p.n_head + p.n_head_kv + kv) * WORDS + min(i * WG_SIZE + tid, WORDS - 1)];
}

#if SPINS
bool heads_arrived() {
    bool there = true;
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++)
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) there = there && arrived(head_a[i][j]) && arrived(head_b[i][j]);
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++) there = there && arrived(value_words[i]);
    return there;
}
#endif

// Loads angles, norms and heads. With SPINS the heads may not have arrived yet: the includer spins on them later.
void prefetch_heads(uint tid, uint head0, uint kv) {
#if ROPE_PAIRS
    [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) slot_angles[j] = angles[min(j * HEAD_LANES + tid % HEAD_LANES, ROTATED - 1)];
#endif
#if HAS_NORM
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++)
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) {
            const uvec2 at = places(min(j * HEAD_LANES + tid % HEAD_LANES, SLOTS - 1));
            const bool query = i * HEADS_AT_ONCE + tid / HEAD_LANES < HEADS;
            norm_a[i][j] = query ? q_norm[at.x] : k_norm[at.x];
            norm_b[i][j] = query ? q_norm[at.y] : k_norm[at.y];
        }
#endif
    read_heads(tid, head0, kv);
}

void put_query(uint head, uint place, vec2 v) {
    query4[head * OUT4 + (place >> 1)][2u * (place & 1u)] = p.scale * v.x;
    query4[head * OUT4 + (place >> 1)][2u * (place & 1u) + 1u] = p.scale * v.y;
}

void put_key(uint kv, uint row, bool stores, uint place, vec2 v) {
    const uint word = packHalf2x16(v);
    new_k[place >> 2][place & 3u] = word;
    if (stores) cache_k1[(kv * p.n_ctx + row) * WORDS + place] = word;
}

void prepare(uint tid, uint head0, uint kv) {
    const uint row = uint(pos[0]);
    const bool stores = owns_new && head0 % (p.n_head / p.n_head_kv) == 0;
    [[unroll]] for (uint i = 0; i < HEAD_ROUNDS; i++) {
        const uint head = i * HEADS_AT_ONCE + tid / HEAD_LANES;
#if HAS_NORM
        float square = 0.0;
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) square += dot(head_a[i][j], head_a[i][j]) + dot(head_b[i][j], head_b[i][j]);
        const float norm = inversesqrt(group_sum(square, HEAD_LANES) / float(HD) + p.eps);
#endif
        [[unroll]] for (uint j = 0; j < SLOT_ROUNDS; j++) {
            const uint slot = j * HEAD_LANES + tid % HEAD_LANES;
            vec2 a = head_a[i][j], b = head_b[i][j];
#if HAS_NORM
            a *= norm * norm_a[i][j];
            b *= norm * norm_b[i][j];
#endif
#if ROPE_PAIRS
            if (slot < ROTATED) turn(a, b, slot_angles[j]);
#endif
            const uvec2 at = places(slot);
            if (slot < SLOTS && head < HEADS) {
                put_query(head, at.x, a);
                put_query(head, at.y, b);
            } else if (slot < SLOTS && head == HEADS) {
                put_key(kv, row, stores, at.x, a);
                put_key(kv, row, stores, at.y, b);
            }
        }
    }
    [[unroll]] for (uint i = 0; i < VALUE_ROUNDS; i++) {
        const uint place = i * WG_SIZE + tid;
        if (place < WORDS) {
            const uint word = packHalf2x16(value_words[i]);
            new_v[place >> 2][place & 3u] = word;
            if (stores) cache_v1[(kv * p.n_ctx + row) * WORDS + place] = word;
        }
    }
}
