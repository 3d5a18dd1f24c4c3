// F32: 32 weights in 128 bytes, in eight parts of 16: part n holds values 4n..4n+3 of each unit.
#define UNIT_INTS 0

struct UnitRaw { uvec4 part[8]; };

UnitRaw unit_load(Place at) {
    UnitRaw r;
    [[unroll]] for (uint n = 0; n < 8; n++) r.part[n] = QUAD(n * p.w.part, at, 0);
    return r;
}

void unit_decode(UnitRaw r, out vec4 w[8]) {
    [[unroll]] for (int n = 0; n < 8; n++) w[n] = uintBitsToFloat(r.part[n]);
}
