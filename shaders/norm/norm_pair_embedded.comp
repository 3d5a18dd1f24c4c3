#version 450
// RMS_NORM_PAIR that takes its first rows from an embedding itself (norm/norm_pair.glsl, quant/weights.glsl).
//
// Defines: QUANT_FILE
#define EMBEDS 1
#include "quant/weights.glsl"

layout(push_constant) uniform Push {
    Weights w;
    uint embed_rows;
    float embed_scale;
    uint n;
    uint quads;       // of a half
    uint table_rows;
    float eps_a;
    float eps_b;
    uint y_quads;     // of a row of y, with OUT 2 filled up with zeros to whole blocks
    uint y_stride;    // with OUT 2: 16-byte words of a column of matrices
    float scale;      // with OUT 2: factor of all values, which keeps them within 65504
} p;

#include "quant/place.glsl"
#include QUANT_FILE
#include "norm/norm_pair.glsl"
