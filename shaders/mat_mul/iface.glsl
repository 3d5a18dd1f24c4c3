// Push constants and buffers that every kernel of the mat-mul family has.
//
//   binding 0  weights, planes of docs/architecture.md (quant/weights.glsl)
//   binding 1  x, the activations (each kernel says in which form)
//   binding 2  y, the products
//   binding 3  bias F32 [m], or of all experts end to end; where the kernel adds none, any buffer
//   binding 4  residual F32, shape of y; where the kernel adds none, any buffer
//   binding 5  route (mat_mul/route.comp), of a grouped product; else any buffer
//
// Rows are those of the weight, columns are tokens. A grouped product (MUL_MAT_ID) has one column a slot, a slot being one used expert of
// one token; the route puts the slots in the order of their experts and cuts them into column tiles, none with slots of two experts.

layout(push_constant) uniform Push {
    Weights w;
    uint m;            // weight rows of this shard, or of one expert
    uint k;            // weights of a row
    uint n;            // columns: tokens or slots
    uint tiles_n;      // column tiles; grouped: as many as the route has room for
    uint split_units;  // units of a row that one part of a split-K product takes
    uint x_stride;     // from one row of x to the next, in what the kernel reads it by
    uint y_stride;     // from one row of y to the next, in values (Q8_1: units of a row)
    uint y_offset;     // output row of this shard's first row
    uint w_row0;       // row of the whole weight where this shard begins
    uint x_shared;     // grouped: slots that share a row of x, 1 or the used experts of a token
    float y_scale;     // every sum is multiplied by it: undoes the scale of f16 activations
    float out_scale;   // an output in f16 is multiplied by it, so that it stays within 65504
} p;
