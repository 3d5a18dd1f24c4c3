// log(1 + exp(v)), accurate to the last bits for any v: the factor e / seen corrects what 1 + exp(v) rounds away.
float softplus(float v) {
    if (v > 20.0) return v;
    const float e = exp(v);
    precise float sum = 1.0 + e;
    precise float seen = sum - 1.0;
    return seen == 0.0 ? e : log(sum) * (e / seen);
}
