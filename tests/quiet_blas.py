"""One thread for numpy's products: beside two test processes and a CPU driver's own threads, OpenBLAS's wait in a loop for the processors.
It reads the variable when numpy is first imported."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
