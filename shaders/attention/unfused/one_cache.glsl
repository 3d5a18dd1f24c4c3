// attention/cache_rows.glsl for a kernel that reads one cache, K or V: fetch_k8 reads it.
//
// Defines: CACHE_TYPE (CACHE_*), PITCH (groups of eight values from row to row). The cache is bound as uvec4 k4[], uvec2 k2[], uint k1[].
#define K_TYPE CACHE_TYPE
#define V_TYPE CACHE_TYPE
#define K_PITCH PITCH
#define V_PITCH PITCH
#define v4 k4
#define v2 k2
#define v1 k1
#include "attention/cache_rows.glsl"
