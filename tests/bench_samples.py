"""A result of vkbench to print and compare."""

from __future__ import annotations

from vkback.report.bench_table import BenchResult

LLAMA_8B = BenchResult(
    build_commit="5d8bb900b",
    build_number=6910,
    cpu_info="a processor",
    gpu_info="NVIDIA GeForce RTX 5090",
    model_filename="it's.gguf",
    model_type="llama 8B Q4_K - Medium",
    model_size=4_912_898_304,
    model_n_params=8_030_261_312,
    n_prompt=0,
    n_gen=128,
    n_depth=0,
    test_time="2026-01-15T12:00:00Z",
    samples_ns=(500_000_000, 400_000_000),
    bytes_per_token=4_500_000_000,
)
"""128 tokens in 0.5 s and 0.4 s: 256 and 320 t/s, mean 288, sample deviation sqrt(2 * 32^2) = 45.2548; 4.5 GB a token x 288 = 1296 GB/s."""
