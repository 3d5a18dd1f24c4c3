// Which key head a head of a delta net shares, where its parts lie in a row of qkv, and its gates (ssm/delta_net.comp says what they are).
// Needs N_HEAD, DIM, KEY, N_GROUP, TILED and ssm/softplus.glsl.

#define INNER (N_HEAD * DIM)
#define CHANNELS (INNER + 2 * N_GROUP * KEY)
#define QUADS (KEY / 4)

#if TILED
#define GROUP_OF(head) ((head) % N_GROUP)
#define OWNS_GROUP(head) ((head) < N_GROUP)
#else
#define GROUP_OF(head) ((head) / (N_HEAD / N_GROUP))
#define OWNS_GROUP(head) ((head) % (N_HEAD / N_GROUP) == 0u)
#endif

float sigmoid(float v) { return 1.0 / (1.0 + exp(min(-v, 88.0))); }

float decay_of(float alpha, float dt_bias, float rate) { return exp(softplus(alpha + dt_bias) * rate); }
