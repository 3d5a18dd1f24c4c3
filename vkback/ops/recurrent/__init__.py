"""Recurrent layers: Mamba-2's convolution and scan."""
