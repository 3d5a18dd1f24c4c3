"""Products with stored weights: MUL_MAT, MUL_MAT_ID, the fused LINEAR, and their kernels gemv and gemm."""
