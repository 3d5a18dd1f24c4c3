// F16: 32 weights in 64 bytes, in four parts of 16: part n holds values 8n..8n+7 of each unit.
#define UNIT_INTS 0

struct UnitRaw { uvec4 part[4]; };

UnitRaw unit_load(Place at) {
    UnitRaw r;
    [[unroll]] for (uint n = 0; n < 4; n++) r.part[n] = QUAD(n * p.w.part, at, 0);
    return r;
}

vec4 four(uint a, uint b) {
    return vec4(unpackHalf2x16(a), unpackHalf2x16(b));
}

void unit_decode(UnitRaw r, out vec4 w[8]) {
    [[unroll]] for (int n = 0; n < 4; n++) {
        w[2 * n] = four(r.part[n].x, r.part[n].y);
        w[2 * n + 1] = four(r.part[n].z, r.part[n].w);
    }
}
