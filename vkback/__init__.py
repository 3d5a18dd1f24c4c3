"""vkback: GGUF models on Vulkan, with hand-written GLSL kernels, judged and tuned from Python."""

__version__ = "0.1.0"
