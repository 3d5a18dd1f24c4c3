// Finds the bin at which the running sum over BINS bins reaches a target. The order of additions is fixed.
//
//   Found search(uint tid, float share, float target)
//
// The bins are in search_value, written before a barrier; every thread calls. With share > 0 the target is share * (the sum of all bins). The
// result is the first bin whose value is above 0 and whose running sum is at least the target or, if rounding keeps the sum below it, the last
// bin above 0; `rest` is the target minus the bins before it.

struct Found { uint bin; float target; float rest; };

const uint SEARCH_RUN = 16u, SEARCH_RUNS = BINS / SEARCH_RUN;

shared float search_value[BINS];
shared float search_run[SEARCH_RUNS];
shared uint search_first, search_last;

// The sum of the bins before bin i: whole runs first, then the bins of its own run. (Not `precise`: glslang 11 propagates that through the
// whole shader and runs out of memory. A sum alone has nothing to contract.)
float search_before(uint i) {
    float runs = 0.0, inside = 0.0;
    for (uint r = 0; r < i / SEARCH_RUN; r++) runs += search_run[r];
    for (uint j = i / SEARCH_RUN * SEARCH_RUN; j < i; j++) inside += search_value[j];
    return runs + inside;
}

Found search(uint tid, float share, float target) {
    if (tid == 0) {
        search_first = BINS;
        search_last = 0;
    }
    for (uint r = tid; r < SEARCH_RUNS; r += WG_SIZE) {
        float sum = 0.0;
        for (uint j = 0; j < SEARCH_RUN; j++) sum += search_value[r * SEARCH_RUN + j];
        search_run[r] = sum;
    }
    barrier();
    if (share > 0.0) target = share * search_before(BINS);
    for (uint i = tid; i < BINS; i += WG_SIZE) {
        if (search_value[i] > 0.0) {
            atomicMax(search_last, i);
            if (search_before(i) + search_value[i] >= target) atomicMin(search_first, i);
        }
    }
    barrier();
    const uint bin = min(search_first, search_last);
    const float rest = target - search_before(bin);
    barrier();
    return Found(bin, target, rest);
}
