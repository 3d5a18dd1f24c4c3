"""Models: GGUF files, tokenizer, architectures and their graphs, the numpy twin, perplexity, synthetic files."""

from vkback.gguf.file import GgufError, GgufFile, GgufTensor
from vkback.gguf.hparams import HParams
from vkback.gguf.tokenizer import StreamDecoder, Tokenizer
from vkback.gguf.vocabularies import TokenizerError
from vkback.models.architecture import ARCHITECTURES
from vkback.models.naming import model_description
from vkback.models.registry import Model, read_hparams

__all__ = [
    "ARCHITECTURES",
    "GgufError",
    "GgufFile",
    "GgufTensor",
    "HParams",
    "Model",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerError",
    "model_description",
    "read_hparams",
]
