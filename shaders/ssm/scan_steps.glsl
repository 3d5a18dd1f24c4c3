// Steps and decays of the tokens of a chunk of SSM_SCAN (ssm/scan.comp says what they are), and where a head's parts lie.
//
// Needs CHUNK, N_HEAD, HEAD_DIM, STATE, N_GROUP, p.n, p.stride, tid, zx, a, dt_bias, pos and ssm/softplus.glsl. Padding, and tokens past the
// end of the batch, have step 0 and decay 1: they change no state.

#define INNER (N_HEAD * HEAD_DIM)
#define CHANNELS (INNER + 2 * N_GROUP * STATE)
#define QUADS (STATE / 4)
#define ROW_QUADS (CHANNELS / 4)                                    // of xbc
#define GROUP_OF(head) ((head) / (N_HEAD / N_GROUP))
#define B_AT(group) (INNER / 4 + (group) * QUADS)                   // in a row of xbc, in quads
#define C_AT(group) (INNER / 4 + (N_GROUP + (group)) * QUADS)

shared float steps[CHUNK], decays[CHUNK];

#define BRING_STEPS(chunk, head)                                                                                                         \
    for (uint i = tid; i < CHUNK; i += WG_SIZE) {                                                                                        \
        const uint token = min((chunk) * CHUNK + i, p.n - 1u);                                                                           \
        const bool real = (chunk) * CHUNK + i < p.n && pos[token] >= 0;                                                                  \
        steps[i] = real ? softplus(zx[token * p.stride + INNER + CHANNELS + head] + dt_bias[head]) : 0.0;                                \
        decays[i] = exp(steps[i] * a[head]);                                                                                             \
    }
