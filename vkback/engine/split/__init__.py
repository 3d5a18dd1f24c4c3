"""One model over several devices, layer by layer (docs/several_devices.md)."""
