// Epilogue of a GEMV: y = act(norm_factor * sum + bias) + residual for each row, with act none, GLU, gelu or squared ReLU, gelu times a
// multiplier where there is one (its sum then has a scale); with SOFTCAP y = cap * tanh(y / cap); stored as F32 or Q8_1.
#if GELU || defined(SOFTCAP)
#include "elementwise/functions.glsl"
#endif

#if Y_TYPE == Y_F32
#define RESIDUAL_STRIDE p.y_stride
#else
#define RESIDUAL_STRIDE (32u * p.y_units)  // the residual is F32, whatever y is
#endif

// Bias plus residual of this lane's output row. Loaded before the walk, which hides their latency.
float addend[COLS];
#ifdef BIND_MULTIPLIER
float multiplier[COLS];
#endif

#ifdef BIND_BIAS
// Bias of one row of this row group's matrix; with EXPERTS_SUMMED, the weighted sum of its experts' biases.
float bias_of(uint row) {
#if EXPERTS == EXPERTS_SUMMED
    float sum = 0.0;
    [[unroll]] for (uint e = 0; e < N_USED; e++) sum += summed_weight[e] * bias1[summed_row[e] + row];
    return sum;
#else
    return bias1[p.w_row0 + expert_row + row];
#endif
}
#endif

#if GLU && defined(BIND_BIAS)
vec2 glu_bias;  // biases of gate and up
#endif

void fetch_addend() {
#if GLU && defined(BIND_BIAS)
    const uint gate_row = min(first_row + (PARTIALS > 1 ? 2u * lane : lane & ~1u), p.m - 2u);
    glu_bias = vec2(bias_of(gate_row), bias_of(gate_row + 1u));
#endif
    const uint row = min(first_row + lane, p.m - 1u);
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        addend[c] = 0.0;
#ifdef BIND_MULTIPLIER
        const uint of = p.multiplier_at + min(y_row + c, p.n - 1u) * RESIDUAL_STRIDE + p.y_offset + row;
  #if SPINS_ON_PARTS
        float value;
        SPIN_UNTIL(value = multiplier1[of], arrived(value));
        multiplier[c] = value;
  #else
        multiplier[c] = multiplier1[of];
  #endif
#endif
#ifdef BIND_BIAS
        addend[c] += bias_of(row);
#endif
#ifdef BIND_RESIDUAL
        const uint at = min(y_row + c, p.n - 1u) * RESIDUAL_STRIDE + p.y_offset + row;
  #if SPINS_ON_PARTS
        float residual;
        SPIN_UNTIL(residual = residual1[at], arrived(residual));
        addend[c] += residual;
  #else
        addend[c] += residual1[at];
  #endif
#endif
    }
}

// This lane's output row within its row group; ROWS for a lane that has none.
uint output_row() {
#if PARTIALS > 1
    return lane < (ROWS >> GLU) ? lane : ROWS;
#else
    return lane < ROWS && (lane & GLU) == 0 ? lane >> GLU : ROWS;
#endif
}

#ifdef BIND_MULTIPLIER
#define SCALED(sum) (p.scale * (sum))
#define TIMES(v, c) ((v) * multiplier[c])
#else
#define SCALED(sum) (sum)
#define TIMES(v, c) (v)
#endif

#if PROLOGUE == PROLOGUE_NORM
#define NORMED(sum) (norm_factor * (sum))
#else
#define NORMED(sum) (sum)
#endif

#ifdef SOFTCAP
#define CAPPED(v) (SOFTCAP * tanh_exact((1.0 / SOFTCAP) * (v)))
#elif defined(SQUARED_RELU)
// NaN stays NaN.
float squared_relu(float v) { return v < 0.0 ? 0.0 : v * v; }
#define CAPPED(v) squared_relu(v)
#else
#define CAPPED(v) (v)
#endif

// The finished value of output_row() for token c. Every lane must call, since it shuffles.
float apply_epilogue(uint tid, uint buf, uint c) {
#if GLU && PARTIALS > 1
    float gate = row_total(tid, buf, min(2u * lane, ROWS - 2u), c), up = row_total(tid, buf, min(2u * lane, ROWS - 2u) + 1u, c);
#elif GLU
    float gate = total[c], up = subgroupShuffleXor(total[c], 1);
#endif
#if GLU
    gate = NORMED(gate);
    up = NORMED(up);
#endif
#if GLU && defined(BIND_BIAS)
    gate += glu_bias.x;
    up += glu_bias.y;
#endif
#if GLU && defined(GLU_LIMIT)
    gate = min(gate, GLU_LIMIT);
    return gate / (1.0 + exp(-GLU_ALPHA * gate)) * (clamp(up, -GLU_LIMIT, GLU_LIMIT) + 1.0);
#elif GLU && GELU
    return gelu(gate) * up;
#elif GLU
    return gate / (1.0 + exp(-gate)) * up;
#elif GELU && PARTIALS > 1
    return TIMES(gelu(SCALED(NORMED(row_total(tid, buf, min(lane, ROWS - 1u), c))) + addend[c]), c);
#elif GELU
    return TIMES(gelu(SCALED(NORMED(total[c])) + addend[c]), c);
#elif PARTIALS > 1
    return CAPPED(NORMED(row_total(tid, buf, min(lane, ROWS - 1u), c)) + addend[c]);
#else
    return CAPPED(NORMED(total[c]) + addend[c]);
#endif
}

#if Y_TYPE == Y_F32

void epilogue(uint tid, uint buf, uint tile) {
    const uint i = output_row();
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        const float v = apply_epilogue(tid, buf, c);
        if (i < ROWS && first_row + (i << GLU) < p.m && (EXPERTS != EXPERTS_NONE || y_row + c < p.n))
            y1[(y_row + c) * p.y_stride + Y_OFFSET + (first_row >> GLU) + i] = not_sentinel(v);
    }
}

#else

shared vec4 staged[1 + LOOP_TILES][COLS][TILE_OUT / 4];

void epilogue(uint tid, uint buf, uint tile) {
    const uint i = output_row();
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        const float v = apply_epilogue(tid, buf, c);
        const uint at = (tid / LANES) * (ROWS >> GLU) + i;
        if (i < ROWS) staged[buf][c][at >> 2][at & 3] = first_row + (i << GLU) < p.m ? v : 0.0;
    }
    barrier();
    for (uint first = 0; first < TILE_OUT / 4; first += WG)
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            const uint t = first + tid;
            const uint quad = (Y_OFFSET + tile * TILE_OUT) / 4 + t;
            const Q8_1Quad packed = q8_1_pack(quad, staged[buf][c][min(t, TILE_OUT / 4 - 1)]);
            if (t < TILE_OUT / 4 && tile * TILE_OUT + t * 4 < (p.m >> GLU) && (EXPERTS != EXPERTS_NONE || y_row + c < p.n))
                q8_1_store(y_row + c, p.y_units, quad, packed);
        }
}

#endif
