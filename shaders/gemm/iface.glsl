// Push constants and buffers that all kernels of the GEMM family share.
//
//   binding 0  weights, planes (quant/weights.glsl)
//   binding 1  x, the activations (each kernel says in which form)
//   binding 2  y, the result
//   binding 3  bias F32 [m], or of all experts end to end; unused, any buffer, without a bias
//   binding 4  residual F32, shape of y; unused, any buffer, without a residual
//   binding 5  route (gemm/route.comp) of a grouped product; otherwise unused, any buffer
//
// Rows are rows of the weight; columns are tokens. In a grouped product (MUL_MAT_ID) a column is a slot, that is, one chosen expert of one
// token. The route sorts the slots by expert and cuts them into column tiles, none of which mixes two experts.

layout(push_constant) uniform Push {
    Weights w;
    uint m;            // rows of this shard, or of one expert
    uint k;            // values in a row of the weight
    uint n;            // columns: tokens or slots
    uint tiles_n;      // column tiles; grouped: as many as the route has room for
    uint split_units;  // units of a row in one part of a split-K product
    uint x_stride;     // from one row of x to the next, in the words that the kernel reads
    uint y_stride;     // from one row of y to the next, in values (Q8_1: units of a row)
    uint y_offset;     // output row of this shard's first row
    uint w_row0;       // row of the whole tensor where this shard begins
    uint x_shared;     // grouped: slots that share a row of x: 1, or the chosen experts of a token
    float y_scale;     // factor of every sum: undoes the scaling of f16 activations
    float out_scale;   // factor of every f16 output, which keeps it within 65504
} p;
