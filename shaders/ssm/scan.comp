#version 450
// SSM_SCAN: the recurrence of Mamba-2, token by token; with CONV 1 SSM_CONV_SCAN: one token, with the convolution before it.
//
//   dt = softplus(dt + dt_bias[h])      state[h, r, :] = exp(dt a[h]) state[h, r, :] + dt x[h, r] B[g, :]
//   y[h, r] = (state[h, r, :] . C[g, :] + d[h] x[h, r]) * silu(z[h, r])
//
// Head h has HEAD_DIM rows r of STATE values. It shares B and C with the other heads of its group g = h / (N_HEAD / N_GROUP).
//
// Bindings in this order:
//   zx        F32 [n, stride]; a row is z [N_HEAD * HEAD_DIM], the convolution's input x, B, C [CHANNELS], and dt [N_HEAD]
//   CONV 0:   xbc F32 [n, CHANNELS], the convolution's output;  CONV 1: w F32 [CHANNELS, TAPS], [BIAS: bias F32 [CHANNELS]]
//   a, d, dt_bias  F32 [N_HEAD]
//   pos       I32 [n]; -1: padding, which is at the end, gives zeros and does not change the states
//   state     F32 [SLOTS, N_HEAD, HEAD_DIM, STATE]: slot p % SLOTS holds the state after the token at position p. A batch whose first position
//             is 0 starts from zeros. The slot that was read is not overwritten, so a token that runs twice gives the same result twice.
//             KEEP 1: the state after each token is stored, not the last one alone, so that the text can go on from any of them
//   CONV 1:   conv F32 [RING, CHANNELS] (ssm/taps.glsl)
//   y         F32 [n, N_HEAD * HEAD_DIM]
//   BIND_SLOTS  slots I32 [n] (CONV 1): each token is of a sequence of its own, whose states are number slots[t] of state and conv, which
//             then have one more axis in front; workgroups along z take the tokens
//   BIND_DRAWS  draws I32 [n] (BIND_SLOTS): a sequence may have drafts in columns of their own (ssm/own_columns.glsl). The workgroups of its
//             last token take all of them, one after the other
//
// A workgroup has ROWS rows of a head. LANES = WG_SIZE / ROWS neighbouring threads share a row and hold its state in registers for all tokens,
// EACH quads per thread. B, C and the factors of TILE tokens at a time are staged in shared memory.
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
    uint stride;
} p;

#define INNER (N_HEAD * HEAD_DIM)
#define CHANNELS (INNER + 2 * N_GROUP * STATE)
#define QUADS (STATE / 4)
#define EACH ((QUADS + LANES - 1) / LANES)

layout(std430, set = 0, binding = 0) SYNC_INPUT buffer InZx { float zx[]; };
#if CONV
layout(std430, set = 0, binding = 1) readonly buffer InW { float w[]; };
#if BIAS
layout(std430, set = 0, binding = 2) readonly buffer InBias { float bias[]; };
#endif
#define BIND_A (2 + BIAS)
#else
layout(std430, set = 0, binding = 1) readonly buffer InXbc { float xbc[]; };
#define BIND_A 2
#endif
layout(std430, set = 0, binding = BIND_A) readonly buffer InA { float a[]; };
layout(std430, set = 0, binding = BIND_A + 1) readonly buffer InD { float d[]; };
layout(std430, set = 0, binding = BIND_A + 2) readonly buffer InDtBias { float dt_bias[]; };
layout(std430, set = 0, binding = BIND_A + 3) readonly buffer InPos { int pos[]; };
layout(std430, set = 0, binding = BIND_A + 4) buffer States { vec4 states[]; };
#if CONV
layout(std430, set = 0, binding = BIND_A + 5) buffer ConvState { float conv[]; };
#endif
layout(std430, set = 0, binding = BIND_A + 5 + CONV) writeonly buffer OutY { float y[]; };

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

#define CONV_X(token, c) zx[COLUMN_OF(token) * p.stride + INNER + (c)]
#define CONV_ROW(row, c) conv[(SEQUENCE * RING + (row)) * CHANNELS + (c)]
#include "ssm/taps.glsl"

#include "ssm/softplus.glsl"

shared vec4 tile_b[TILE][QUADS], tile_c[TILE][QUADS];
shared float tile_x[TILE][ROWS];
shared float tile_dt[TILE], tile_decay[TILE];

// Which channel of the convolution is item i of those that this workgroup needs: its rows of x, then B, then C.
uint channel_of(uint i, uint head, uint row0) {
    if (i < ROWS) return head * HEAD_DIM + min(row0 + i, HEAD_DIM - 1u);
    const uint group = head / (N_HEAD / N_GROUP);
    i -= ROWS;
    return i < STATE ? INNER + group * STATE + i : INNER + (N_GROUP + group) * STATE + (i - STATE);
}

void store_tile(uint t, uint i, float v) {
    if (i < ROWS) tile_x[t][i] = v;
    else if (i < ROWS + STATE) tile_b[t][(i - ROWS) / 4u][(i - ROWS) % 4u] = v;
    else tile_c[t][(i - ROWS - STATE) / 4u][(i - ROWS - STATE) % 4u] = v;
}

#define ITEMS (ROWS + 2 * STATE)

void main() {
#ifdef BIND_DRAWS
    if (drafted(TOKEN0)) return;
    gather_columns(TOKEN0);
#endif
    const uint tid = gl_LocalInvocationIndex;
    const uint head = gl_WorkGroupID.y, row0 = gl_WorkGroupID.x * ROWS;
    const uint row = row0 + tid / LANES, lane = tid % LANES;
    const bool valid = row < HEAD_DIM;
    const uint y_at = head * HEAD_DIM + min(row, HEAD_DIM - 1u);
    const float decay_rate = a[head], skip = d[head], dt_base = dt_bias[head];

    const int first = pos[TOKEN0];
    int last = -1;
    const uint slot = N_HEAD * HEAD_DIM * QUADS;
    const uint at = SEQUENCE * SLOTS * slot + (head * HEAD_DIM + min(row, HEAD_DIM - 1u)) * QUADS;
    vec4 state[EACH];
    [[unroll]] for (uint i = 0; i < EACH; i++) {
        const uint q = i * LANES + lane;
        state[i] = first > 0 && q < QUADS ? states[uint(first - 1) % SLOTS * slot + at + q] : vec4(0.0);
    }

// The state after the token at a position.
#define STORE_STATE(position)                                                                                            \
    [[unroll]] for (uint i = 0; i < EACH; i++) {                                                                          \
        const uint q = i * LANES + lane;                                                                                  \
        if (QUADS % LANES == 0 || q < QUADS) states[uint(position) % SLOTS * slot + at + q] = state[i];                   \
    }

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
  #if BIAS
            sum += bias[c];
  #endif
            store_tile(0u, i, silu(sum));
            // No tap of these tokens reads the row of the ring that is written here. B and C are stored once for their group.
            const bool owner = i < ROWS ? row0 + i < HEAD_DIM : row0 == 0u && head % (N_HEAD / N_GROUP) == 0u;
            if (first >= 0 && owner) CONV_ROW((uint(first) + t0) % RING, c) = x;
        }
#else
        for (uint i = tid; i < count * ITEMS; i += WG_SIZE) {
            const uint t = i / ITEMS;
            store_tile(t, i % ITEMS, xbc[(t0 + t) * CHANNELS + channel_of(i % ITEMS, head, row0)]);
        }
#endif
        for (uint t = tid; t < count; t += WG_SIZE) {
            float dt;
            SPIN_UNTIL(dt = zx[COLUMN_OF(t0 + t) * p.stride + INNER + CHANNELS + head], arrived(dt));
            dt = pos[COLUMN_OF(t0 + t)] >= 0 ? softplus(dt + dt_base) : 0.0;  // padding: dt 0 and decay 1 leave the state as it is
            tile_dt[t] = dt;
            tile_decay[t] = exp(dt * decay_rate);
        }
        barrier();
        for (uint t = 0u; t < count; t++) {
            const float x = tile_x[t][tid / LANES];
            const float input_x = tile_dt[t] * x, decay = tile_decay[t];
            vec4 sum = vec4(0.0);
            [[unroll]] for (uint i = 0; i < EACH; i++) {
                const uint q = i * LANES + lane;
                if (QUADS % LANES == 0 || q < QUADS) {
                    state[i] = state[i] * decay + tile_b[t][q] * input_x;
                    sum = fma(state[i], tile_c[t][q], sum);
                }
            }
            const float total = group_sum((sum.x + sum.y) + (sum.z + sum.w), LANES);
            last = max(last, pos[COLUMN_OF(t0 + t)]);
#if KEEP
            if (valid && pos[COLUMN_OF(t0 + t)] >= 0) STORE_STATE(pos[COLUMN_OF(t0 + t)]);
#endif
            if (lane == 0u && valid) {
                float z;
                SPIN_UNTIL(z = zx[COLUMN_OF(t0 + t) * p.stride + y_at], arrived(z));
                y[COLUMN_OF(t0 + t) * INNER + y_at] = pos[COLUMN_OF(t0 + t)] >= 0 ? not_sentinel((total + skip * x) * silu(z)) : 0.0;
            }
        }
    }

#if !KEEP
    if (last >= 0 && valid) STORE_STATE(last);
#endif
}
