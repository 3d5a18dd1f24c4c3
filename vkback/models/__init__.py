"""Models: GGUF files, tokenizer, architectures and their graphs, the numpy twin, perplexity, synthetic files."""

from vkback.models.architecture import ARCHITECTURES
from vkback.models.gguf_file import GgufError, GgufFile, GgufTensor
from vkback.models.hparams import HParams
from vkback.models.naming import model_description
from vkback.models.registry import Model, read_hparams
from vkback.models.tokenizer import StreamDecoder, Tokenizer, TokenizerError

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
