"""The decoder that was measured to be the fastest for this number of sequences on this GPU: see kernels/fastest.py.

`python -m scripts.tune op=decode auto=true` measures. If the fastest decoder cannot run here, or refuses the model or
the cache, the next one decodes. scripts.generate builds it by its own name (make_decoder() in model/decoder.py), so a
generation also has what the decoder defines besides decode().
"""

from types import ModuleType
from typing import Any

from torch import Tensor

from kernels import fastest
from kernels.cache import Cache
from kernels.decode import Model
from kernels.registry import backend, load

unavailable = fastest.unavailable_decoders


def detail() -> str:
    return "the fastest by this GPU's table"


def pack(model: Model, cache: Cache) -> tuple[ModuleType, Any]:
    """Return the module of the first decoder that accepts this model, and what its pack() returns."""
    weights, batch = model.weights(), len(cache.kv[0][0])
    device = weights.wte.device

    def pack_with(name: str) -> tuple[ModuleType, Any]:
        load("decode", name, device)  # raises Unavailable if it cannot run here
        module = backend("decode", name)
        return module, module.pack(model, cache) if hasattr(module, "pack") else weights

    names = fastest.rank_decoders(weights.wte.dtype, weights.wte.shape[1], batch, device)
    return fastest.first_accepted(names, pack_with)


def decode(packed: tuple[ModuleType, Any], tokens: Tensor, cache: Cache) -> Tensor:
    module, own = packed
    return module.decode(own, tokens, cache)
