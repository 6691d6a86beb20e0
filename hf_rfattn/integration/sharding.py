"""`shard_sequence`: sequence parallelism, where each process of a group computes one part of the same sequences.

The forward of the base model (`BertModel`, `LlamaModel`) takes this process's part of the inputs and, if the head needs
all positions, gathers the hidden states. Hooks of the attention modules pass the part on to the attention function.
Language models and token classifiers continue with a part of the hidden states; their loss is computed here.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.sharded import Part
from .discovery import AttentionSite, find_attention
from .names import NAME, PART

M = TypeVar("M", bound=nn.Module)

_MARK = "rf_sharded"  # attribute of a base model whose forward is replaced

# Inputs of a base model with one entry per position, `[B, L]` or `[B, L, E]`.
_BY_POSITION = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
# Losses of models whose logits at a position depend only on its hidden state.
_BY_TOKEN = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")


def shard_sequence(model: M, mesh_or_group: Any, *, gather: bool | None = None) -> M:
    """Split sequences across the processes of a group (sequence parallelism), in place, and return the model.

    `model`: a patched encoder or decoder with any head. `mesh_or_group`: a one-dimensional `DeviceMesh` or a process
    group; None undoes the sharding. All processes of the group call the model with the same batch, and each computes
    one contiguous part of every sequence. Every process returns the loss of the whole sequences. Gradients must be
    averaged over all processes, as `DistributedDataParallel`, FSDP2 and `accelerator.prepare` do; they then equal the
    gradients of a single process.

    `gather`: whether to gather the hidden states after the last layer, so that outputs cover all positions and any head
    works. Default: only where necessary. Language models and token classifiers return the logits of their part,
    `ceil(L / N)` positions, the last of which may be padding.

    Communication: linear mechanisms exchange their sums; `band` and `fmm` also exchange the keys next to a part.
    `multipole` gathers block summaries and fetches the blocks it needs, but gathers queries, keys and values of packed
    sequences. Softmax layers gather keys and values, with a warning that names them.

    Not supported: generation, encoder-decoder models, models with several towers, and models that do not accept
    `position_ids`.

    >>> import hf_rfattn, torch.distributed as dist
    >>> from transformers import BertConfig, BertForMaskedLM
    >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    >>> model = hf_rfattn.patch_model(BertForMaskedLM(tiny), "favor+")
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or use torchrun
    >>> model = hf_rfattn.shard_sequence(model, dist.group.WORLD)
    >>> dist.destroy_process_group()
    """
    _remove(model)
    if mesh_or_group is None:
        return model
    group = _process_group(mesh_or_group)
    sites = find_attention(model)
    base = _base_model(sites)
    head = next(m for m in model.modules() if isinstance(m, PreTrainedModel) and any(c is base for c in m.modules()))
    by_token = head is not base and (head.loss_type in _BY_TOKEN or (head.loss_type is None and head.can_generate()))
    _warn_of_gathering(sites)
    sharding = _Sharding(group, _numbering(base), not by_token if gather is None else gather)
    setattr(base, _MARK, True)
    # Replaces forward instead of adding hooks, since sentence-transformers calls `forward` directly.
    base.forward = MethodType(_sharded_forward(type(base), sharding), base)
    pooler = getattr(base, "pooler", None)
    if isinstance(pooler, nn.Module):
        pooler.register_forward_pre_hook(sharding.hand_on_first_token)
    for site in sites:
        site.module.register_forward_pre_hook(sharding.hand_on_part, with_kwargs=True)
    if not sharding.gather and head is not base:
        head.register_forward_pre_hook(sharding.take_labels, with_kwargs=True)
        head.register_forward_hook(sharding.add_loss)
    return model


def _sharded_forward(cls: type[PreTrainedModel], sharding: "_Sharding") -> Callable[..., Any]:
    @functools.wraps(cls.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        try:
            output = cls.forward(self, **sharding.cut_inputs(self, args, kwargs))
            return sharding.join_outputs(output)
        finally:
            sharding.part = None

    return forward


def _process_group(mesh_or_group: Any) -> Any:
    if isinstance(mesh_or_group, dist.ProcessGroup):
        return mesh_or_group
    if not isinstance(mesh_or_group, dist.DeviceMesh):
        given = type(mesh_or_group).__name__
        raise ValueError(f"mesh_or_group must be a DeviceMesh, a process group or None, not {given}.")
    if mesh_or_group.ndim != 1:
        raise ValueError(
            f"The mesh has dimensions {mesh_or_group.mesh_dim_names or mesh_or_group.ndim}; pass the one that splits "
            "sequences, such as mesh['cp']."
        )
    return mesh_or_group.get_group()


def _base_model(sites: list[AttentionSite]) -> PreTrainedModel:
    """Return the model that takes tokens and returns hidden states."""
    owners = list({id(site.owner): site.owner for site in sites}.values())
    name = type(owners[0]).__name__
    if not any(getattr(site.module, "rf", None) is not None for site in sites):
        raise ValueError(f"{name} is not patched: call hf_rfattn.patch_model(model, ...) first.")
    if len(owners) > 1 or any(site.cross for site in sites):
        raise NotImplementedError(
            f"Sequences of {', '.join(type(owner).__name__ for owner in owners)} cannot be split across processes: the "
            "model must have one stack of layers and no cross-attention."
        )
    if "position_ids" not in inspect.signature(owners[0].forward).parameters:
        raise NotImplementedError(
            f"{name} does not accept position_ids, so every part of a sequence would get the positions of the first."
        )
    return owners[0]


def _warn_of_gathering(sites: list[AttentionSite]) -> None:
    kinds: dict[str, list[str]] = {}
    for site in sites:
        mechanism = getattr(site.module, "rf", None)
        if mechanism is None or mechanism.gathers_sequence():
            kind = "softmax" if mechanism is None else repr(mechanism.config.name)
            kinds.setdefault(kind, []).append(site.name)
    for kind, names in kinds.items():
        warnings.warn(
            f"{len(names)} attention modules ({kind}) gather the keys and values of all processes, so their memory "
            f"and communication grow with the length: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}.",
            stacklevel=3,
        )


def _remove(model: nn.Module) -> None:
    for module in model.modules():
        if vars(module).pop(_MARK, None) is not None:
            del module.forward
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), _Sharding):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


class _Sharding:
    """The hooks of one model, and the state that they share during a forward pass."""

    def __init__(self, group: Any, number: Callable[[Tensor], Tensor], gather: bool):
        self.group, self.number, self.gather = group, number, gather
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.part: Part | None = None  # set during a forward pass
        self.length = 0  # length of the whole sequences
        self.labels: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Sharding":
        return self  # copies of a model share its group

    def cut_inputs(self, base: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Before the base model: replace the inputs with those of this part."""
        kwargs = _by_name(base, args, kwargs)
        _check(base, kwargs)
        tokens = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
        batch, self.length = tokens.shape[:2]
        filling = -self.length % self.size
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        key_mask = segments = None
        if mask is not None or filling:
            key_mask = torch.ones_like(tokens[..., 0] if tokens.ndim == 3 else tokens) if mask is None else mask
            key_mask = F.pad(key_mask, (0, filling)).to(torch.bool)
        if positions is None:
            kwargs["position_ids"] = self.number(tokens)
        elif mask is None:  # the rule by which transformers detects packed sequences
            jumps = positions.diff(prepend=positions[:, :1] - 1) != 1
            segments = _filled(jumps.cumsum(1), filling).expand(batch, -1) if bool(jumps.any()) else None
        self.part = Part(self.group, self.rank, self.size, (self.length + filling) // self.size, key_mask, segments)
        for name in _BY_POSITION:
            value = kwargs.get(name)
            if value is not None:
                kwargs[name] = self.part.own(_filled(value, filling, name == "position_ids"), 1)
        if "use_cache" in inspect.signature(base.forward).parameters:
            kwargs["use_cache"] = False
        return kwargs

    def hand_on_part(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before an attention module: pass the part on to the attention function.

        Gradient checkpointing calls the module again after the forward pass, with the same mask object, so the part is
        also stored there.
        """
        masks = [x for x in (kwargs.get("attention_mask"), *args) if isinstance(x, Tensor) and x.ndim == 4]
        part = self.part
        for mask in masks:
            if part is None:
                part = getattr(mask, PART, None)
            else:
                setattr(mask, PART, part)
        if part is None:
            raise RuntimeError(f"{type(module).__name__} of a sharded model was called directly; call the model.")
        return args, {**kwargs, PART: part}

    def hand_on_first_token(self, pooler: nn.Module, args: tuple) -> tuple:
        """Before a pooler, which reads the first token: pass it the first token of the first part."""
        first = args[0][:, :1] if args[0].ndim == 3 else args[0]
        return (self.part.gather(first)[0], *args[1:])  # type: ignore[union-attr]

    def join_outputs(self, output: Any) -> Any:
        """After the base model: gather the hidden states of all positions, if needed."""
        part = self.part
        if part is None or not self.gather:
            return output

        def join(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(join, value))
            if isinstance(value, Tensor) and value.ndim == 3 and value.shape[1] == part.length:
                return part.whole(value, 1)[:, : self.length]
            return value

        if isinstance(output, tuple):
            return join(output)
        return type(output)(**{name: join(value) for name, value in output.items()})

    def take_labels(self, head: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Before a model that predicts tokens: keep the labels for `add_loss`."""
        kwargs = _by_name(head, args, kwargs)
        self.labels = {name: kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch")}
        return (), kwargs

    def add_loss(self, head: PreTrainedModel, args: tuple, output: Any) -> Any:
        """After it: add the loss over all parts, the mean over all labels that are not ignored, as in transformers."""
        labels, shifted, count = self.labels.values()
        self.labels = {}
        if shifted is None and labels is not None and head.loss_type not in _BY_TOKEN[1:]:
            shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        labels = labels if shifted is None else shifted
        if labels is None:
            return output
        logits = output[0] if isinstance(output, tuple) else output.logits
        length = -(-labels.shape[1] // self.size)
        part = Part(self.group, self.rank, self.size, length)
        if logits.shape[1] != length:
            raise ValueError(
                f"There are logits for {logits.shape[1]} of the {length} positions of this part, but the loss needs "
                "all of them. Do not pass logits_to_keep."
            )
        own = part.own(F.pad(labels, (0, length * self.size - labels.shape[1]), value=-100), 1)
        total = F.cross_entropy(logits.flatten(0, 1).float(), own.flatten().to(logits.device), reduction="sum")
        loss = part.gather(total).sum() / ((labels != -100).sum() if count is None else count)
        return (loss, *output) if isinstance(output, tuple) else type(output)(**{"loss": loss, **output})


def _by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def _filled(x: Tensor, filling: int, repeat: bool = False) -> Tensor:
    """Append `filling` positions: zeros, or copies of the last position."""
    if not filling:
        return x
    return torch.cat([x, x[:, -1:].expand(-1, filling, *x.shape[2:]) * (1 if repeat else 0)], 1)


def _check(base: PreTrainedModel, inputs: dict[str, Any]) -> None:
    name = type(base).__name__
    if base.config._attn_implementation != NAME:
        raise ValueError(
            f"{name} is sharded, but its attention implementation is {base.config._attn_implementation!r} now. Undo "
            "the sharding with hf_rfattn.shard_sequence(model, None)."
        )
    if inputs.get("past_key_values") is not None:
        raise NotImplementedError(
            f"{name} is sharded and cannot generate; undo the sharding with hf_rfattn.shard_sequence(model, None)."
        )
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise NotImplementedError("A sharded model needs a 2D attention_mask, or none.")
    for key, value in inputs.items():
        if isinstance(value, Tensor) and key not in _BY_POSITION:
            raise NotImplementedError(
                f"{name} got the input {key!r}, which cannot be split across processes; supported inputs: "
                f"{', '.join(_BY_POSITION)}."
            )


def _numbering(base: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the function with which the model computes default position_ids."""
    for module in base.modules():
        number = getattr(module, "create_position_ids_from_input_ids", None)  # RoBERTa and similar models
        by_mask = isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters
        if number is not None or by_mask:
            padding = getattr(module, "padding_idx", None)

            def positions(tokens: Tensor, number: Any = number, padding: Any = padding) -> Tensor:
                if number is None or tokens.ndim != 2:
                    raise ValueError(f"{type(base).__name__} computes position_ids in its own way: pass position_ids.")
                return number(tokens, padding)

            return positions
    return lambda tokens: torch.arange(tokens.shape[1], device=tokens.device)[None]
