"""References of the architectures: logits of tiny models by classes of the `transformers` package, in float64.

A module for each architecture (`-` of its name is `_`) has `logits(path, tokens)`, which needs torch and transformers. `data` holds what
they gave for the tiny shapes of `vkback synth`, written by tools/references.py. tests/models/test_references.py compares with that and,
where torch is installed, with the references themselves.
"""
