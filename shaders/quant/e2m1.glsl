// E2M1 codes of MXFP4 and NVFP4, four at once, one a byte: twice the value (0 1 2 3 4 6 8 12 and their negatives) + 12, in 0..24, without
// a carry between bytes. With `low` the two low bits, `high` the third: codes below 4 mean low; codes 4..7 mean 4 + 2 low, and 2 more for 7.
uint e2m1_plus_12(uint code) {
    const uint low = code & 0x03030303u;
    const uint high = (code >> 2) & 0x01010101u;
    const uint both = low & (low >> 1) & high;
    const uint magnitude = low + (low & (high * 3u)) + (high << 2) + (both << 1);
    const uint negative = ((code >> 3) & 0x01010101u) * 15u;
    return 0x0c0c0c0cu + magnitude - ((magnitude & negative) << 1);
}
