// Gumbel noise as a function of seed, position and token alone.
//
//   float noise(uint seed, uint pos, uint id)
//   float unit(uint seed, uint pos, uint id)    what it is made of: evenly between 0 and 1
// The same in numpy: noise in vkback/ops/sampling/sample.py.

// The hash PCG3D of Jarzynski and Olano, "Hash Functions for GPU Rendering" (2020).
uint pcg3d(uvec3 v) {
    v = v * 1664525u + 1013904223u;
    v.x += v.y * v.z;
    v.y += v.z * v.x;
    v.z += v.x * v.y;
    v ^= v >> 16u;
    v.x += v.y * v.z;
    v.y += v.z * v.x;
    v.z += v.x * v.y;
    return v.x;
}

// An odd multiple of 2^-24: never 0 or 1.
float unit(uint seed, uint pos, uint id) {
    return float(pcg3d(uvec3(id, pos, seed)) >> 9u) * 1.1920929e-7 + 5.9604645e-8;
}

float noise(uint seed, uint pos, uint id) {
    const float u = unit(seed, pos, id);
    // -log(1 - u); for small u by the series of 2 artanh(u / (2 - u)), since log is accurate only to 2^-21 near 1,
    // and the smallest values decide the draw.
    const float z = u / (2.0 - u), zz = z * z;
    const float small = 2.0 * z * (1.0 + zz * (1.0 / 3.0 + zz * (1.0 / 5.0 + zz * (1.0 / 7.0 + zz * (1.0 / 9.0 + zz * (1.0 / 11.0 + zz / 13.0))))));
    return -log(u < 0.5 ? small : -log(1.0 - u));
}
