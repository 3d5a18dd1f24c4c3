"""What drivers' compilers make of kernels: statistics and machine code, read."""
