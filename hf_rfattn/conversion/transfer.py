"""The training of attention transfer, and its state on disk."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ..features import FeatureMap
from ..integration import AttentionError
from ..integration.error import energy, mechanism_sites, run_with_softmax, valid_queries
from ..mechanisms import LinearMechanism, Mechanism
from ..ops.naive import allowed_pairs, masked_softmax, repeat_heads
from .processes import process_count, sum_over_processes

STATE = "conversion.pt"
WARMUP = 0.05  # share of the steps
LEAST_GAIN = 0.01  # a layer whose loss has fallen by less than this share since `patience` steps before has learnt
LONGEST_DIVERGENCE = 1024  # tokens up to which matrices of weights are compared
SMALLEST_WEIGHT = 1e-8  # whose logarithm is still looked at


@dataclass
class _Layer:
    """One mechanism while it learns."""

    name: str
    parameters: dict[str, nn.Parameter]
    parts: list[LinearMechanism]
    steps: int = 0
    loss: float = math.nan  # of the last step
    loss_sum: float = 0.0  # since the last look, every `patience` steps
    last_mean: float = math.inf
    stopped: bool = False

    def record(self, loss: float, patience: int | None) -> None:
        self.loss = loss
        self.steps += 1
        self.loss_sum += loss
        if patience is not None and self.steps % patience == 0:
            mean, self.loss_sum = self.loss_sum / patience, 0.0
            self.stopped = mean >= (1 - LEAST_GAIN) * self.last_mean
            self.last_mean = mean

    def facts(self) -> dict[str, Any]:
        """All but the tensors."""
        return {name: getattr(self, name) for name in ("steps", "loss", "loss_sum", "last_mean", "stopped")}


class Transfer:
    """The training: one optimizer with a group a layer, stepped by `train`."""

    def __init__(
        self, model: nn.Module, steps: int, learning_rate: float, parts: float, divergence: float, patience: int | None
    ):
        self.model, self.steps, self.patience = model, steps, patience
        self.learning_rate, self.parts, self.divergence = learning_rate, parts, divergence
        self.layers: dict[Mechanism, _Layer] = {}
        for mechanism, name in mechanism_sites(model).items():
            parameters = dict(mechanism.named_parameters())
            if parameters:
                linear = [m for m in mechanism.modules() if isinstance(m, LinearMechanism) and m is not mechanism]
                learning = [m for m in linear if any(True for _ in m.parameters())]
                self.layers[mechanism] = _Layer(name, parameters, learning if parts else [])
        if not self.layers:
            kinds = sorted({m.config.name for m in mechanism_sites(model)})
            raise ValueError(
                f"{', '.join(kinds)}: nothing to train, these mechanisms have no parameters. Choose one that learns, "
                "such as 'hedgehog' or 'fmm', or 'favor+' with trainable=True."
            )
        signed = [m for m in self.layers for part in m.modules() if isinstance(part, FeatureMap) and not part.positive]
        if divergence and signed:
            raise ValueError(
                f"divergence needs positive attention weights; those of {signed[0].config.name!r} "
                f"({self.layers[signed[0]].name}) can be negative. Leave it at 0."
            )
        self.optimizer = torch.optim.Adam(
            [{"params": list(layer.parameters.values())} for layer in self.layers.values()], lr=learning_rate
        )
        self.step = 0
        self.seconds = 0.0
        self._losses: dict[Mechanism, Tensor] = {}

    @contextmanager
    def layers_in_float32(self) -> Iterator[None]:
        """Train parameters that small steps can change; leave them, and what is known of them, as they were found."""
        found = {p: (p.requires_grad, p.grad) for layer in self.layers.values() for p in layer.parameters.values()}
        dtypes = {mechanism: next(mechanism.parameters()).dtype for mechanism in self.layers}
        for mechanism, dtype in dtypes.items():
            mechanism.to(torch.promote_types(dtype, torch.float32))
        for parameter in found:
            parameter.requires_grad_(True).grad = None
        try:
            yield
        finally:
            for mechanism, dtype in dtypes.items():
                mechanism.to(dtype)
            for parameter, (requires, gradient) in found.items():
                parameter.requires_grad_(requires).grad = gradient

    def train(self, batch: Mapping[str, Any]) -> None:
        """One step of all layers that have not stopped."""
        self._losses.clear()
        run_with_softmax(self.model, batch, self._learn, gradients=True)
        if not self._losses:
            raise ValueError("The batch reached no layer that learns.")
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        sum_over_processes(gradients)
        losses = torch.stack(list(self._losses.values()))
        sum_over_processes([losses])
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate_factor(self.step, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        for mechanism, loss in zip(self._losses, losses.tolist(), strict=True):
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"{self.layers[mechanism].name}: the loss became {loss} at step {self.step}. Try a lower "
                    f"learning_rate than {self.learning_rate}."
                )
            layer = self.layers[mechanism]
            layer.record(loss, self.patience)
            if layer.stopped:
                for parameter in layer.parameters.values():
                    parameter.requires_grad_(False)

    def _learn(self, mechanism: Mechanism, args: tuple, masks: dict[str, Any], exact: Tensor, output: Tensor) -> None:
        """Loss and gradients of one layer, as soon as it has been seen: its graph does not outlive it."""
        layer = self.layers.get(mechanism)
        if layer is None or layer.stopped:
            return
        valid = valid_queries(exact, masks)
        total = energy(exact, valid, torch.float32)
        sum_over_processes([total])
        total = total.clamp(min=torch.finfo(total.dtype).tiny)

        def relative(out: Tensor) -> Tensor:
            return (energy(out.float() - exact.float(), valid, torch.float32) / total).mean()

        with torch.enable_grad():
            loss = whole = relative(output)
            for part in layer.parts:
                loss = loss + self.parts / len(layer.parts) * relative(part(*args, **masks))
            if self.divergence:
                loss = loss + self.divergence * _divergence(mechanism, args, masks, valid)
            loss.backward()
        self._losses[mechanism] = self._losses.get(mechanism, 0) + whole.detach()

    def mean_error(self) -> float:
        """Root of the mean loss of the last step, over layers."""
        return math.sqrt(sum(layer.loss for layer in self.layers.values()) / len(self.layers))

    def save(self, path: Path, before: AttentionError) -> None:
        """Write the state whole or not at all."""
        state = {
            "settings": self.settings(),
            "error before training": _rounded(before.overall),
            "step": self.step,
            "seconds": self.seconds,
            "layers": {layer.name: layer.facts() for layer in self.layers.values()},
            "parameters": {layer.name: layer.parameters for layer in self.layers.values()},
            "optimizer": self.optimizer.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            torch.save(state, unfinished)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    def load(self, path: Path, before: AttentionError) -> None:
        """Go on from a state, if there is one."""
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            now = {"settings": self.settings(), "error before training": _rounded(before.overall)}
            for what, value in now.items():
                if state[what] != value:
                    raise ValueError(
                        f"{path} belongs to another conversion: its {what} was {state[what]}, now it is {value}. Give "
                        "the same model, batches and options again, or another checkpoint."
                    )
            self.step, self.seconds = state["step"], state["seconds"]
            for layer in self.layers.values():
                vars(layer).update(state["layers"][layer.name])
                for name, parameter in layer.parameters.items():
                    parameter.data.copy_(state["parameters"][layer.name][name])
                    parameter.requires_grad_(not layer.stopped)
            self.optimizer.load_state_dict(state["optimizer"])
        except (UnpicklingError, RuntimeError, OSError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged or was not written by this version ({type(error).__name__}). Delete it to start "
                "the conversion again, or give another checkpoint."
            ) from error

    def settings(self) -> dict[str, Any]:
        names = ("steps", "learning_rate", "parts", "divergence", "patience")
        kinds = {layer.name: mechanism.config.to_dict() for mechanism, layer in self.layers.items()}
        return {name: getattr(self, name) for name in names} | {"layers": kinds}


def rate_factor(step: int, steps: int) -> float:
    """The share of the highest learning rate that step number `step` (from 0) uses: up in a line, down as a cosine.

    >>> [round(rate_factor(step, 100), 2) for step in (0, 4, 5, 50, 99)]
    [0.2, 1.0, 1.0, 0.54, 0.0]
    """
    ramp = math.ceil(WARMUP * steps)
    if step < ramp:
        return (step + 1) / ramp
    return (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp))) / 2


def _divergence(mechanism: Mechanism, args: tuple, masks: dict[str, Any], valid: Tensor) -> Tensor:
    """Mean over queries and heads of the divergence of a mechanism's attention weights from those of softmax."""
    q, k, _ = args
    if k.shape[2] > LONGEST_DIVERGENCE:
        raise ValueError(
            f"divergence compares matrices of attention weights, for inputs of at most {LONGEST_DIVERGENCE} tokens; "
            f"this one has {k.shape[2]}. Give shorter batches, or divergence=0."
        )
    pattern: dict[str, Any] = {name: masks.get(name) for name in ("key_mask", "segments")}
    pattern["causal"] = bool(masks.get("causal"))
    scale = q.shape[-1] ** -0.5 if masks.get("scale") is None else masks["scale"]
    scores = q.float() @ repeat_heads(k.float(), q.shape[1]).transpose(-1, -2) * scale
    allowed = allowed_pairs(q.shape[2], k.shape[2], **pattern, device=q.device)
    exact = masked_softmax(scores, allowed)
    weights = mechanism.attention_weights(q.float(), k.float(), **pattern, scale=scale)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=SMALLEST_WEIGHT)
    logs = exact.clamp(min=SMALLEST_WEIGHT).log() - weights.clamp(min=SMALLEST_WEIGHT).log()
    by_query = (exact * logs).sum(-1)  # [B, H, Lq]
    return (by_query * valid[:, None]).sum() / (valid.sum() * q.shape[1] * process_count())


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.2g}") for value in values]
