#version 450
// DELTA_NET: the gated delta rule, token by token. CONV 1: CONV_DELTA_NET, one token with the convolution before it and the gated norm behind it.
//
//   q, k of length 1 (as the root of the sum of squares and p.length_eps says), q times KEY^-0.5 as well
//   S[r, :] = exp(a[h] softplus(alpha + dt_bias[h])) S[r, :]
//   S[r, :] = S[r, :] + sigmoid(beta) (v[r] - S[r, :] . k) k        y[r] = S[r, :] . q
//   CONV 1: y = y / sqrt(mean of the head's y^2 + p.eps) * norm * silu(z)
//
// Head h has DIM rows r of KEY values. It shares q and k with the other heads of its group: h % N_GROUP (TILED 1), or h / (N_HEAD / N_GROUP).
//
// Bindings in this order:
//   qkv       F32 [n, CHANNELS], q and k [N_GROUP * KEY] each, v [N_HEAD * DIM]: the convolution's output; CONV 1: its input
//   alpha, beta  F32 [n, N_HEAD];  CONV 1: z F32 [n, N_HEAD * DIM].  PACKED 1 (CONV 1): one tensor, a row is qkv, z, alpha, beta
//   CONV 1:   w F32 [CHANNELS, TAPS]
//   a, dt_bias  F32 [N_HEAD];  CONV 1: norm F32 [DIM]
//   pos       I32 [n]; -1: padding, which is at the end, gives zeros and does not change the states
//   state     F32 [SLOTS, N_HEAD, DIM, KEY]: slot p % SLOTS holds the state after the token at position p. A batch whose first position is
//             0 starts from zeros. The slot that was read is not overwritten, so a token that runs twice gives the same result twice.
//             KEEP 1: the state after each token is stored, not the last one alone, so that a batch can end at any of its tokens afterwards
//   CONV 1:   conv F32 [RING, CHANNELS] (ssm/taps.glsl)
//   y         F32 [n, N_HEAD * DIM], or Q8_1 (OUT_Q8_1, CONV 1)
//   BIND_SLOTS  slots I32 [n] (CONV 1): each token is of a sequence of its own, whose states are number slots[t] of state and conv, which
//             then have one more axis in front; workgroups along z take the tokens
//   BIND_DRAWS  draws I32 [n] (BIND_SLOTS): a sequence may have drafts in columns of their own (ssm/own_columns.glsl). The workgroups of its
//             last token take all of them, one after the other
//
// A workgroup has ROWS rows of a head, all of them with CONV 1. A thread has PER_THREAD rows, and of each the quads of one of LANES lanes; it
// holds them in registers for all tokens. q, k and v of TILE tokens at a time are staged in shared memory. q and k stay there as they come:
// their lengths divide the sums. y needs no second pass over the new state, since S . q is the decayed state . q plus the update times k . q.
#extension GL_EXT_control_flow_attributes : require
#define REDUCE_GROUPS 1
#include "common/reduce.glsl"
#include "common/sentinel.glsl"

#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef KEEP
#define KEEP 0
#endif

layout(local_size_x = WG_SIZE) in;

layout(push_constant) uniform Push {
    uint n;
    float length_eps;
    float q_scale;
    float eps;
} p;

#include "ssm/softplus.glsl"
#include "ssm/delta_heads.glsl"
#define EACH ((QUADS + LANES - 1) / LANES)

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InQkv { float qkv[]; };
#if PACKED
#define WIDTH (CHANNELS + INNER + 2 * N_HEAD)
#define Z(token, i) qkv[(token) * WIDTH + CHANNELS + (i)]
#define ALPHA(token, head) qkv[(token) * WIDTH + CHANNELS + INNER + (head)]
#define BETA(token, head) qkv[(token) * WIDTH + CHANNELS + INNER + N_HEAD + (head)]
#define BIND_W 1
#else
#define WIDTH CHANNELS
layout(std430, set = 0, binding = 1) SYNC_INPUT buffer InAlpha { float alpha[]; };
layout(std430, set = 0, binding = 2) SYNC_INPUT buffer InBeta { float beta[]; };
#define ALPHA(token, head) alpha[(token) * N_HEAD + (head)]
#define BETA(token, head) beta[(token) * N_HEAD + (head)]
  #if CONV
layout(std430, set = 0, binding = 3) SYNC_INPUT buffer InZ { float z[]; };
#define Z(token, i) z[(token) * INNER + (i)]
#define BIND_W 4
  #endif
#endif
#if CONV
layout(std430, set = 0, binding = BIND_W) readonly buffer InW { float w[]; };
#define BIND_A (BIND_W + 1)
layout(std430, set = 0, binding = BIND_A + 2) readonly buffer InNorm { vec4 norm[]; };
layout(std430, set = 0, binding = BIND_A + 5) buffer ConvState { float conv[]; };
#else
#define BIND_A 3
#endif
layout(std430, set = 0, binding = BIND_A) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = BIND_A + 1) readonly buffer InDtBias { float dt_bias[]; };
layout(std430, set = 0, binding = BIND_A + 2 + CONV) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = BIND_A + 3 + CONV) buffer States { vec4 states[]; };
#if OUT_Q8_1
layout(std430, set = 0, binding = BIND_A + 6) writeonly buffer OutY { uint y_words[]; };
#include "common/q8_1.glsl"
#elif CONV
layout(std430, set = 0, binding = BIND_A + 6) writeonly buffer OutY { vec4 y[]; };
#else
layout(std430, set = 0, binding = BIND_A + 4) writeonly buffer OutY { float y[]; };
#endif

#ifdef BIND_SLOTS
layout(std430, set = 0, binding = BIND_SLOTS) readonly buffer InSlots { int slots[]; };
#define TOKEN0 gl_WorkGroupID.z
#define SEQUENCE uint(slots[TOKEN0])
#ifdef BIND_DRAWS
layout(std430, set = 0, binding = BIND_DRAWS) readonly buffer InDraws { int draws[]; };
#include "ssm/own_columns.glsl"
#define TOKENS own_count
#define COLUMN_OF(token) own_columns[token]
#else
#define TOKENS 1u
#endif
#else
#define TOKEN0 0u
#define TOKENS p.n
#define SEQUENCE 0u
#endif
#ifndef COLUMN_OF
#define COLUMN_OF(token) (TOKEN0 + (token))
#endif

#define CONV_X(token, c) qkv[COLUMN_OF(token) * WIDTH + (c)]
#define CONV_ROW(row, c) conv[(SEQUENCE * RING + (row)) * CHANNELS + (c)]
#include "ssm/taps.glsl"

shared vec4 tile_q[TILE][QUADS], tile_k[TILE][QUADS];
shared float tile_v[TILE][ROWS];
shared float tile_decay[TILE], tile_beta[TILE];
#if TILE > 1
shared vec3 tile_squares[TILE];
#endif
#if CONV
shared float head_y[DIM];
#endif

#define ITEMS (2 * KEY + ROWS)

// Which channel is item i of those that this workgroup needs: q, k, its rows of v.
uint channel_of(uint i, uint head, uint row0) {
    if (i < 2 * KEY) return i / KEY * (N_GROUP * KEY) + GROUP_OF(head) * KEY + i % KEY;
    return 2 * N_GROUP * KEY + head * DIM + min(row0 + (i - 2 * KEY), DIM - 1u);
}

void store_tile(uint t, uint i, float v) {
    if (i < KEY) tile_q[t][i / 4u][i % 4u] = v;
    else if (i < 2 * KEY) tile_k[t][(i - KEY) / 4u][(i - KEY) % 4u] = v;
    else tile_v[t][i - 2 * KEY] = v;
}

float sum_of(vec4 v) { return (v.x + v.y) + (v.z + v.w); }

// q . q, k . k and k . q of a token of the tile. The lanes of a group call together.
vec3 squares_of(uint t, uint lane) {
    vec4 qq = vec4(0.0), kk = vec4(0.0), kq = vec4(0.0);
    [[unroll]] for (uint i = 0; i < EACH; i++) {
        const uint quad = i * LANES + lane;
        if (QUADS % LANES == 0 || quad < QUADS) {
            const vec4 q = tile_q[t][quad], k = tile_k[t][quad];
            qq = fma(q, q, qq);
            kk = fma(k, k, kk);
            kq = fma(k, q, kq);
        }
    }
    return vec3(group_sum(sum_of(qq), LANES), group_sum(sum_of(kk), LANES), group_sum(sum_of(kq), LANES));
}

#if CONV
// The gated norm of the head, of the token in a column. Every thread calls it; those of a quad of the head bring z.
void gated_norm(uint column, uint tid, uint head, vec4 gate) {
    const bool mine = tid < DIM / 4;
    barrier();
    vec4 v = vec4(0.0);
    if (mine) v = vec4(head_y[4u * tid], head_y[4u * tid + 1u], head_y[4u * tid + 2u], head_y[4u * tid + 3u]);
    const float scale = 1.0 / sqrt(wg_sum(sum_of(v * v)) / float(DIM) + p.eps);
    if (mine) v = v * scale * norm[tid] * vec4(silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w));
    const uint out_quad = head * (DIM / 4) + tid;
  #if OUT_Q8_1
    const Q8_1Quad packed = q8_1_pack(out_quad, v);
    if (mine) q8_1_store(column, INNER / 32, out_quad, packed);
  #else
    if (mine) y[column * (INNER / 4) + out_quad] = not_sentinel(v);
  #endif
}
#endif

void main() {
#ifdef BIND_DRAWS
    if (drafted(TOKEN0)) return;
    gather_columns(TOKEN0);
#endif
    const uint tid = gl_LocalInvocationIndex;
    const uint head = gl_WorkGroupID.y, row0 = gl_WorkGroupID.x * ROWS;
    const uint lane = tid % LANES, first_row = tid / LANES * PER_THREAD;
    const float decay_rate = a[head], dt_base = dt_bias[head];

    const int first = pos[TOKEN0];
    int last = -1;
    const uint slot = N_HEAD * DIM * QUADS;
    const uint head_at = SEQUENCE * SLOTS * slot + head * DIM * QUADS;
    vec4 state[PER_THREAD][EACH];
    [[unroll]] for (uint j = 0; j < PER_THREAD; j++) {
        const uint row = min(row0 + first_row + j, DIM - 1u);
        [[unroll]] for (uint i = 0; i < EACH; i++) {
            const uint quad = i * LANES + lane;
            state[j][i] = first > 0 && quad < QUADS ? states[uint(first - 1) % SLOTS * slot + head_at + row * QUADS + quad] : vec4(0.0);
        }
    }

// What lies here of a row of the state, which is that after the token at a position.
#define STORE_ROW(row, j, position)                                                                                                  \
    [[unroll]] for (uint i = 0; i < EACH; i++) {                                                                                     \
        const uint quad = i * LANES + lane;                                                                                          \
        if (QUADS % LANES == 0 || quad < QUADS) states[uint(position) % SLOTS * slot + head_at + (row) * QUADS + quad] = state[j][i]; \
    }

#if CONV
    const bool mine = tid < DIM / 4;  // in the gated norm a thread takes a quad
    vec4 gate = vec4(0.0);
#endif
    for (uint t0 = 0u; t0 < TOKENS; t0 += TILE) {
        const uint count = min(TILE, TOKENS - t0);
        if (t0 > 0u) barrier();
#if CONV
        for (uint i = tid; i < ITEMS; i += WG_SIZE) {
            const uint c = channel_of(i, head, row0);
            float sum = 0.0;
            for (uint back = TAPS - 1u; back > 0u; back--)
                sum = fma(w[c * TAPS + TAPS - 1u - back], CONV_TAP(t0, first + int(t0), c, back), sum);
            float x;
            SPIN_UNTIL(x = CONV_X(t0, c), arrived(x));
            sum = fma(w[c * TAPS + TAPS - 1u], x, sum);
            store_tile(0u, i, silu(sum));
            // No tap of these tokens reads the row of the ring that is written here. q and k are stored once for their group.
            const bool owner = i < 2 * KEY ? OWNS_GROUP(head) : i - 2 * KEY < DIM;
            if (first >= 0 && owner) CONV_ROW((uint(first) + t0) % RING, c) = x;
        }
#else
        for (uint i = tid; i < count * ITEMS; i += WG_SIZE) {
            const uint t = i / ITEMS;
            store_tile(t, i % ITEMS, CONV_X(t0 + t, channel_of(i % ITEMS, head, row0)));
        }
#endif
        for (uint t = tid; t < count; t += WG_SIZE) {
            float dt, share;
            SPIN_UNTIL(dt = ALPHA(COLUMN_OF(t0 + t), head), arrived(dt));
            SPIN_UNTIL(share = BETA(COLUMN_OF(t0 + t), head), arrived(share));
            const bool real = pos[COLUMN_OF(t0 + t)] >= 0;  // padding: decay 1 and beta 0 leave the state as it is
            tile_decay[t] = real ? decay_of(dt, dt_base, decay_rate) : 1.0;
            tile_beta[t] = real ? sigmoid(share) : 0.0;
        }
#if CONV
        if (mine) {
            const uint i = head * DIM + 4u * tid;
            SPIN_UNTIL(gate = vec4(Z(COLUMN_OF(t0), i), Z(COLUMN_OF(t0), i + 1u), Z(COLUMN_OF(t0), i + 2u), Z(COLUMN_OF(t0), i + 3u)), arrived(gate));
        }
#endif
        barrier();
#if TILE > 1
        for (uint from = 0u; from < count; from += WG_SIZE / LANES) {
            const uint t = from + tid / LANES;
            const vec3 found = squares_of(min(t, count - 1u), lane);
            if (lane == 0u && t < count) tile_squares[t] = found;
        }
        barrier();
#endif
        for (uint t = 0u; t < count; t++) {
#if TILE > 1
            const vec3 squares = tile_squares[t];
#else
            const vec3 squares = squares_of(0u, lane);
#endif
            const float q_unit = p.q_scale / sqrt(squares.x + p.length_eps), k_unit = 1.0 / sqrt(squares.y + p.length_eps);
            const float decay = tile_decay[t], share = tile_beta[t];
            const int position = pos[COLUMN_OF(t0 + t)];
            last = max(last, position);
            [[unroll]] for (uint j = 0; j < PER_THREAD; j++) {
                vec4 by_k = vec4(0.0), by_q = vec4(0.0);
                [[unroll]] for (uint i = 0; i < EACH; i++) {
                    const uint quad = i * LANES + lane;
                    if (QUADS % LANES == 0 || quad < QUADS) {
                        state[j][i] *= decay;
                        by_k = fma(state[j][i], tile_k[t][quad], by_k);
                        by_q = fma(state[j][i], tile_q[t][quad], by_q);
                    }
                }
                const float found = k_unit * group_sum(sum_of(by_k), LANES), seen = group_sum(sum_of(by_q), LANES);
                const float update = share * (tile_v[t][first_row + j] - found) * k_unit;
                [[unroll]] for (uint i = 0; i < EACH; i++) {
                    const uint quad = i * LANES + lane;
                    if (QUADS % LANES == 0 || quad < QUADS) state[j][i] = fma(tile_k[t][quad], vec4(update), state[j][i]);
                }
                const float made = position >= 0 ? q_unit * fma(update, squares.z, seen) : 0.0;
                const uint row = row0 + first_row + j;
#if KEEP
                if (row < DIM && position >= 0) STORE_ROW(row, j, position);
#endif
#if CONV
                if (lane == 0u && row < DIM) head_y[row] = made;
#else
                if (lane == 0u && row < DIM) y[(t0 + t) * INNER + head * DIM + row] = made;
#endif
            }
        }
#ifdef BIND_DRAWS
        gated_norm(COLUMN_OF(t0), tid, head, gate);
#endif
    }

#if !KEEP
    if (last >= 0) [[unroll]] for (uint j = 0; j < PER_THREAD; j++) {
        const uint row = row0 + first_row + j;
        if (row < DIM) STORE_ROW(row, j, last);
    }
#endif
#if CONV && !defined(BIND_DRAWS)
    gated_norm(TOKEN0, tid, head, gate);
#endif
}
