// log of the sum of exp(x) over the p.dim values from `from` on; every thread of the workgroup gets it.
// Needs a buffer x and common/reduce.glsl.
float log_sum_exp(uint from, uint t) {
    float top = uintBitsToFloat(0xff800000u);
    for (uint i = t; i < p.dim; i += WG_SIZE) top = max(top, x[from + i]);
    top = wg_max(top);
    float sum = 0.0;
    for (uint i = t; i < p.dim; i += WG_SIZE) sum += exp(max(x[from + i] - top, -87.0));
    return top + log(wg_sum(sum));
}
