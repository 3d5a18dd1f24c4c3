// The samplers of sample/chain.glsl over the listed tokens. Each keeps tokens of a range of distances: those of `kept`. What is added up is
// added as whole numbers of 2^-30, so that the order of the list does not matter.
//
//   float run_chain(uint tid, uint listed, float top, float target, bool chained)    every thread calls: narrows `kept`, by top_k, top_p and
//       min_p of the loop where there is no chain; 1 / the temperature
//   void note_surprise(uint tid, uint listed, float top, float scale, uint id)   every thread calls after the draw: moves mirostat's mu on
//
// Needs what sample/draw.comp declares before it.

const float UNIT = 1073741824.0;    // 2^30
const uint NEAREST = 100u;          // tokens that mirostat estimates its exponent from
const float LN2 = 0.69314718;

shared uint limbs[3][BINS];
shared uint total_limbs[3];
shared uint near_count, near_dist[NEAREST], near_sorted[NEAREST];
shared float near_exponent;

void add_exact(inout uvec2 sum, float x) {
    const uint units = uint(x * UNIT + 0.5);
    sum.x += units;
    if (sum.x < units) sum.y++;
}

// The sum of all threads' sums.
float total_of(uint tid, uvec2 mine) {
    if (tid < 3u) total_limbs[tid] = 0;
    barrier();
    atomicAdd(total_limbs[0], mine.x & 0xffffu);
    atomicAdd(total_limbs[1], mine.x >> 16u);
    atomicAdd(total_limbs[2], mine.y);
    barrier();
    const float sum = (float(total_limbs[2]) * 4294967296.0 + float(total_limbs[1]) * 65536.0 + float(total_limbs[0])) / UNIT;
    barrier();
    return sum;
}

uint listed_id(uint i) {
    return list[IN_COLUMN(i, p.vocab)];
}

uint listed_distance(uint id, float top) {
    return distance_of(logits[IN_COLUMN(id, p.vocab)], top);
}

// The smallest distance that is kept.
uint nearest_of(uint tid, uint listed, float top) {
    uint found = 0u;
    for (uint i = tid; i < listed; i += WG_SIZE) {
        const uint id = listed_id(i), dist = listed_distance(id, top);
        if (is_kept(dist, id)) found = max(found, ~dist);
    }
    return ~wg_max(found);
}

float scaled(uint dist, uint nearest, float scale) {
    return float(dist - nearest) / STEPS_PER_UNIT * scale;
}

// Of the kept tokens: the sum of exp(-y), y being the scaled distance from the nearest; the mean of y; their number.
struct Mass { float sum; float mean; uint count; };

Mass mass_of(uint tid, uint listed, float top, uint nearest, float scale) {
    uvec2 sum = uvec2(0), far = uvec2(0);
    uint count = 0u;
    for (uint i = tid; i < listed; i += WG_SIZE) {
        const uint id = listed_id(i), dist = listed_distance(id, top);
        if (!is_kept(dist, id)) continue;
        const float y = scaled(dist, nearest, scale), w = exp(-y);
        add_exact(sum, w);
        add_exact(far, w * y);
        count++;
    }
    const float all = total_of(tid, sum);
    const float mean = total_of(tid, far) / all;
    return Mass(all, mean, wg_sum(count));
}

// The smallest distance from `centre` within which kept tokens have this share of the sum of exp(-y).
uint select_share(uint tid, uint listed, float top, uint nearest, float scale, uint centre, float share) {
    uint prefix = 0u;
    float target = 0.0;
    for (uint level = 0u; level < LEVELS; level++) {
        for (uint i = tid; i < BINS; i += WG_SIZE) limbs[0][i] = limbs[1][i] = limbs[2][i] = 0u;
        barrier();
        for (uint i = tid; i < listed; i += WG_SIZE) {
            const uint id = listed_id(i), dist = listed_distance(id, top);
            const uint key = dist > centre ? dist - centre : centre - dist;
            if (!is_kept(dist, id) || key >> (27u - 9u * level) != prefix) continue;
            const uint units = uint(exp(-scaled(dist, nearest, scale)) * UNIT + 0.5), bin = bin_of(key, level);
            if ((units & 1023u) != 0u) atomicAdd(limbs[0][bin], units & 1023u);
            if ((units >> 10u & 1023u) != 0u) atomicAdd(limbs[1][bin], units >> 10u & 1023u);
            if (units >> 20u != 0u) atomicAdd(limbs[2][bin], units >> 20u);
        }
        barrier();
        for (uint i = tid; i < BINS; i += WG_SIZE)
            search_value[i] = float(limbs[2][i]) / 1024.0 + float(limbs[1][i]) / 1048576.0 + float(limbs[0][i]) / UNIT;
        barrier();
        const Found found = search(tid, level == 0u ? share : 0.0, target);
        prefix = prefix << 9u | found.bin;
        target = found.rest;
    }
    return prefix;
}

// A distance in steps, of one in logits.
uint steps_of(float distance) {
    return uint(clamp(distance, 0.0, 127.99999) * STEPS_PER_UNIT);
}

void keep_up_to(uint dist) {
    if (dist < kept.hi) kept = Kept(kept.lo, dist, ~0u);
}

// Mirostat's k: from the exponent of Zipf's law that the nearest of `count` kept tokens follow.
uint mirostat_k(uint tid, uint listed, float top, uint nearest, float scale, uint count) {
    const uint many = min(count, NEAREST);
    uint last = kept.hi;
    if (many == NEAREST) last = select_distance(tid, listed, top, false, 0.0, float(NEAREST)).dist;
    if (tid == 0u) near_count = 0u;
    barrier();
    for (uint i = tid; i < listed; i += WG_SIZE) {
        const uint id = listed_id(i), dist = listed_distance(id, top);
        if (is_kept(dist, id) && (dist < last || many < NEAREST)) near_dist[atomicAdd(near_count, 1u)] = dist;
    }
    barrier();
    const uint nearer = near_count;
    for (uint i = nearer + tid; i < many; i += WG_SIZE) near_dist[i] = last;
    barrier();
    for (uint i = tid; i < many; i += WG_SIZE) {
        uint rank = 0u;
        for (uint j = 0u; j < many; j++) rank += near_dist[j] < near_dist[i] || (near_dist[j] == near_dist[i] && j < i) ? 1u : 0u;
        near_sorted[rank] = near_dist[i];
    }
    barrier();
    if (tid == 0u) {
        float both = 0.0, squares = 0.0;
        for (uint i = 0u; i + 1u < many; i++) {
            const float t = log(float(i + 2u) / float(i + 1u));
            both += t * scaled(near_sorted[i + 1u], near_sorted[i], scale);
            squares += t * t;
        }
        near_exponent = max(squares > 0.0 ? both / squares : 0.0, 0.01);
    }
    barrier();
    const float s = near_exponent;
    const float e = abs(s - 1.0) < 1e-3 ? 1e-3 : s - 1.0;
    const float k = pow(e * exp2(chain_word(CHAIN_MU)) / (1.0 - pow(float(p.vocab), -e)), 1.0 / s);
    return uint(clamp(k, 1.0, float(p.vocab)));
}

// What several samplers go by is called at one place for all of them: compilers put a function in wherever it is called, and one with
// barriers is long.
float run_chain(uint tid, uint listed, float top, float target, bool chained) {
    float scale = 1.0;
    const int top_k = loop_words[IN_LOOP(LOOP_TOP_K)];
    const float top_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_TOP_P)]), min_p = intBitsToFloat(loop_words[IN_LOOP(LOOP_MIN_P)]);
    const uint count = chained ? uint(chain_word(CHAIN_COUNT)) : 3u;
    for (uint i = 0u; i < count; i++) {
        const int kind = chained ? int(chain_word(CHAIN_ORDER + i)) : i == 0u ? TOP_K : i == 1u ? TOP_P : MIN_P;
        if (!chained) {
            if (kind == TOP_K && (top_k <= 0 || uint(top_k) >= listed)) continue;
            if (kind == TOP_P && top_p >= 1.0) continue;
            if (kind == MIN_P) {
                if (min_p > 0.0) keep_up_to(distance_limit(min_p));
                continue;
            }
        }
        const float range = chain_word(CHAIN_RANGE);
        if (kind == XTC) {
            // A draw of its own: no token has this id.
            const float chance = unit(uint(loop_words[IN_LOOP(LOOP_SEED)]), uint(pos[COLUMN]), ~0u);
            if (chance > chain_word(CHAIN_XTC_P)) continue;
        }
        const uint nearest = chained && kind != TOP_K ? nearest_of(tid, listed, top) : kept.lo;

        Mass mass = Mass(0.0, 0.0, 0u);
        if ((kind == TOP_K && chained) || kind == TYP_P || kind == XTC || (kind == TEMPERATURE && range > 0.0) || kind == MIROSTAT ||
            kind == MIROSTAT_V2)
            mass = mass_of(tid, listed, top, nearest, scale);

        const bool whole = kind == TOP_P && (i == 0u || !chained);    // of all tokens, listed or not
        if ((kind == TOP_P && !whole) || kind == TYP_P) {
            uint centre = nearest;
            float share = top_p;
            if (kind == TYP_P) {
                centre += steps_of(mass.mean / scale);
                share = chain_word(CHAIN_TYP_P);
            }
            const uint width = select_share(tid, listed, top, nearest, scale, centre, max(share, MIN_SHARE));
            if (kind == TYP_P) kept.lo = max(kept.lo, centre - min(width, centre));
            keep_up_to(centre + width);
        } else if (kind == MIN_P) {
            keep_up_to(nearest + steps_of(-log(min_p) / scale));
        } else if (kind == TOP_N_SIGMA) {
            uvec2 sum = uvec2(0), squares = uvec2(0);
            uint tokens = 0u;
            for (uint j = tid; j < listed; j += WG_SIZE) {
                const uint id = listed_id(j), dist = listed_distance(id, top);
                if (!is_kept(dist, id)) continue;
                const float u = float(dist - nearest) / float(DISTANCE_END);
                add_exact(sum, u);
                add_exact(squares, u * u);
                tokens++;
            }
            const float n = float(wg_sum(tokens)), mean = total_of(tid, sum) / n;
            const float variance = max(total_of(tid, squares) / n - mean * mean, 0.0);
            keep_up_to(nearest + steps_of(128.0 * chain_word(CHAIN_SIGMA) * sqrt(variance)));
        } else if (kind == XTC) {
            const float bound = -log(chain_word(CHAIN_XTC_T) * mass.sum);
            uint least = 0u;
            for (uint j = tid; j < listed; j += WG_SIZE) {
                const uint id = listed_id(j), dist = listed_distance(id, top);
                if (is_kept(dist, id) && scaled(dist, nearest, scale) <= bound) least = max(least, dist);
            }
            kept.lo = max(kept.lo, wg_max(least));
        } else if (kind == TEMPERATURE) {
            float temp = chain_word(CHAIN_TEMP);
            if (range > 0.0) {
                const float least = max(temp - range, 0.0), most = temp + range;
                const float spread = mass.count > 1u ? clamp((log(mass.sum) + mass.mean) / log(float(mass.count)), 0.0, 1.0) : 0.0;
                temp = least + (most - least) * (spread > 0.0 ? pow(spread, chain_word(CHAIN_EXPONENT)) : 0.0);
            }
            if (temp > 0.0)
                scale /= temp;
            else
                keep_up_to(nearest);
        } else if (kind == MIROSTAT_V2) {
            keep_up_to(nearest + steps_of((chain_word(CHAIN_MU) * LN2 - log(mass.sum)) / scale));
        }

        if (!whole && kind != TOP_K && kind != MIROSTAT) continue;
        float share = 0.0, goal = target;
        if (whole) {
            if (!chained && top_k > 0) share = max(top_p, MIN_SHARE);
        } else {
            const uint k = kind == MIROSTAT ? mirostat_k(tid, listed, top, nearest, scale, mass.count) : uint(top_k);
            if (chained && k >= mass.count) continue;
            goal = float(k);
        }
        const Selected found = select_distance(tid, listed, top, whole, share, goal);
        if (whole)
            keep_up_to(found.dist);
        else
            keep_selected(tid, listed, top, found);
    }
    return scale;
}

void note_surprise(uint tid, uint listed, float top, float scale, uint id) {
    const uint count = uint(chain_word(CHAIN_COUNT));
    const int last = int(chain_word(CHAIN_ORDER + count - 1u));
    if (last != MIROSTAT && last != MIROSTAT_V2) return;
    const uint nearest = nearest_of(tid, listed, top);
    const float sum = mass_of(tid, listed, top, nearest, scale).sum;
    const float surprise = (scaled(listed_distance(id, top), nearest, scale) + log(sum)) / LN2;
    if (tid != 0u) return;
    const float mu = chain_word(CHAIN_MU) - chain_word(CHAIN_ETA) * (surprise - chain_word(CHAIN_TAU));
    chain_words[IN_CHAIN(CHAIN_MU)] = mu;
}
