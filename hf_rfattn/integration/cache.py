"""Generation with constant memory: a cache layer that holds a mechanism's state instead of all keys and values.

A forward pre-hook of each attention module puts this layer into the cache that `generate` created, before the model
calls `cache.update`, and passes it to the attention function as a keyword. All state is in the cache and none in the
model, so threads and torch.compile work as usual.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer

from ..features.maps import RandomFeatures
from ..mechanisms import Mechanism
from ..ops import State
from .names import CACHE, NAME

_START_AGAIN = "Start again without past_key_values."
_ROLLBACK = (
    "A recurrent state cannot forget tokens, so assisted decoding, prompt lookup and crop() are not supported. "
    "Generate without them, or switch to softmax with model.set_attn_implementation('sdpa')."
)


class RecurrentLayer(CacheLayerMixin):
    """The cache of one patched layer: tensors of fixed size at fixed addresses, whatever the context length (unless the
    mechanism holds all keys).

    The tensors are not created in inference mode, since they could not be updated outside of it.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, layer: Any):
        """Replace an empty cache layer. A static layer passes on its length; tokens are then counted in a tensor, as
        torch.compile needs it.
        """
        if type(layer) not in (DynamicLayer, StaticLayer):
            raise NotImplementedError(
                f"Patched layers do not support {type(layer).__name__}; set cache_implementation to None or 'static'."
            )
        copied = isinstance(layer, DynamicLayer) and layer.keys is not None and not layer.keys.numel()
        if copied or int(layer.get_seq_length()) > 0:
            raise ValueError(
                "This cache was filled by softmax attention (before patching, or in training mode), or is a copy of "
                f"keys and values, as Whisper's generate returns it. Patched layers cannot use it. {_START_AGAIN}"
            )
        super().__init__()
        self.static_length = layer.max_cache_len if isinstance(layer, StaticLayer) else None
        self.is_compileable = self.static_length is not None
        with torch.inference_mode(False):
            self.count = torch.tensor(0) if self.is_compileable else None
        self.state: State | None = None
        self.patch_number: int | None = None  # of the mechanism that created the state
        self.versions: list[int] | None = None  # of its random feature maps
        self.announced = False  # hand_on_cache has announced the next update
        self.waiting = False  # the attention function has not yet taken the keys of the last update

    @property
    def seen(self) -> int | Tensor:
        """Number of tokens in the state: a tensor if it replaces a static layer, else a shape, for torch.export."""
        if self.count is not None:
            return self.count
        return 0 if self.keys is None else self.keys.shape[2]

    @seen.setter
    def seen(self, tokens: Any) -> None:
        if self.count is not None:
            self.count.fill_(tokens)
        elif self.keys is not None:
            self.keys = self.values = self.keys.new_empty(self.batch_size, 0, tokens, 0)

    @property
    def batch_size(self) -> int:
        return 0 if self.keys is None else self.keys.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Required by transformers. Does nothing: `attend` creates the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return them; `attend` adds them to the state."""
        if not self.announced:
            raise ValueError(f"This cache was filled by patched layers, so softmax cannot read it. {_START_AGAIN}")
        if self.waiting:
            raise NotImplementedError(
                "The model updated this cache again without computing attention in between, which a recurrent state "
                "does not support. Pass use_cache=False."
            )
        batch, _, new, _ = key_states.shape
        if self.keys is not None and batch != self.batch_size:
            raise ValueError(
                f"This cache holds {self.batch_size} sequences, but the input has {batch}. Use one cache per batch, or "
                "first call cache.batch_select_indices(rows) or cache.batch_repeat_interleave(n)."
            )
        self.announced, self.waiting = False, True
        # Models may read keys and values: these have no elements, but their shape gives the number of tokens.
        if self.keys is None:
            self.keys = self.values = key_states.new_empty(batch, 0, 0, 0)
        if self.count is None:
            self.keys = self.values = self.keys.new_empty(batch, 0, self.keys.shape[2] + new, 0)
        else:
            self.count = self.count.to(key_states.device).add_(new)
        return key_states, value_states

    def attend(
        self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Attention of the tokens of the last update to the past and to each other. `key_mask` covers all tokens so
        far, or is None.
        """
        if not self.waiting:
            raise NotImplementedError(
                "This architecture calls attention more than once per layer or shares keys between layers, which a "
                "recurrent state does not support. Pass use_cache=False."
            )
        self.waiting = False
        if self.state is None:
            self.device, self.is_initialized = k.device, True
            with torch.inference_mode(False):
                if mechanism.holds_all_keys:  # in the model's dtype, like softmax; preallocated for a static cache
                    room = self.static_length or 0
                    self.state = mechanism.new_state(k.shape[0], v.shape[-1], v.dtype, v.device, room)  # type: ignore[call-arg]
                else:
                    dtype = torch.promote_types(v.dtype, torch.float32)
                    self.state = mechanism.new_state(k.shape[0], v.shape[-1], dtype, v.device)
            if self.is_compileable and not torch.compiler.is_compiling():
                for tensor in (*self.state.tensors(), self.count):
                    torch._dynamo.mark_static_address(tensor)
        if key_mask is not None:
            seen: Any = self.keys.shape[2] if self.count is None else self.count  # type: ignore[union-attr]
            new = k.shape[2]
            key_mask = key_mask.index_select(1, seen - new + torch.arange(new, device=k.device))
        return mechanism(q, k, v, state=self.state, key_mask=key_mask, scale=scale)

    def get_seq_length(self) -> int:
        return self.seen  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks cover the whole past, which softmax layers need."""
        length = self.seen + query_length if self.static_length is None else self.static_length
        return length, 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1 if self.static_length is None else self.static_length

    def nbytes(self) -> int:
        """Bytes held by the state."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.state.tensors()) if self.state else 0

    def reset(self) -> None:
        if self.state is not None:
            self.state.reset()
        self.seen = 0
        self.versions = None
        self.announced = self.waiting = False

    @torch.inference_mode(False)
    def _index(self, rows: Tensor) -> None:
        if self.state is None or self.keys is None:
            return
        chosen = self.state.index_select(rows)
        if len(rows) == self.batch_size:  # keep the addresses
            self.state.copy_(chosen)
        else:
            self.state = chosen
        self.keys = self.values = self.keys.index_select(0, rows.to(self.keys.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._index(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._index(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._index(torch.arange(self.batch_size).repeat_interleave(repeats))

    @torch.inference_mode(False)
    def offload(self) -> None:
        self.state = self.state and self.state.to("cpu")

    @torch.inference_mode(False)
    def prefetch(self) -> None:
        self.state = self.state and self.state.to(self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecurrentLayer":
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "patch_number": None}  # it differs between processes

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise NotImplementedError(_ROLLBACK)

    def activate_past_recording(self) -> None:
        raise NotImplementedError(_ROLLBACK)


class Stateful:
    """True while the patched attention modules are in use: transformers then refuses, before the first token, decoding
    methods that roll back tokens.
    """

    def __init__(self, modules: list[nn.Module]):
        self.modules = modules

    def __bool__(self) -> bool:
        return any(m.config._attn_implementation == NAME for m in self.modules)  # type: ignore[union-attr]


def hand_on_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of each self-attention module of a patched model, which passes its cache layer on."""
    cache: Any = None
    for value in (*args, *kwargs.values()):
        cache = value if isinstance(value, Cache) else cache
    mechanism: Any = getattr(module, "rf", None)
    layer_idx = getattr(module, "layer_idx", None)
    if cache is None or layer_idx is None or module.config._attn_implementation != NAME:  # type: ignore[union-attr]
        return None
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    while len(cache.layers) <= layer_idx and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if mechanism is not None and not isinstance(layer, RecurrentLayer):
        if module.training and type(layer) is DynamicLayer:
            return None  # some models create a cache in training, which nothing reads
        if isinstance(layer, DynamicLayer) and hasattr(layer, "update_recurrent_state"):
            return None  # layers with both a state space and attention keep all keys
        layer = cache.layers[layer_idx] = RecurrentLayer(layer)
    if mechanism is not None:  # the state must come from the same mechanism and draw
        versions = []
        for part in mechanism.modules():
            if isinstance(part, RandomFeatures):
                versions.append(part.version)
        if not layer.is_initialized or layer.patch_number is None:
            layer.patch_number = mechanism.patch_number
        if layer.versions is None:
            layer.versions = versions
        if layer.patch_number != mechanism.patch_number or layer.versions != versions:
            raise ValueError(
                "This cache was filled with another mechanism or random draw: the model has been patched, redrawn or "
                f"calibrated since. {_START_AGAIN}"
            )
        layer.announced = True
    return args, {**kwargs, CACHE: layer}
