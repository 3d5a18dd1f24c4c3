#version 450
// RMS_NORM_PAIR of rows that are there (norm/norm_pair.glsl).
#define EMBEDS 0

layout(push_constant) uniform Push {
    uint n;
    uint quads;       // of a half
    uint table_rows;
    float eps_a;
    float eps_b;
    uint y_quads;     // of a row of y, with OUT 2 filled up with zeros to whole blocks
    uint y_stride;    // with OUT 2: 16-byte words of a column of matrices
    float scale;      // with OUT 2: factor of all values, which keeps them within 65504
} p;

#include "norm/norm_pair.glsl"
