"""Training loop of attention transfer, and its checkpoints."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ..integration import AttentionError
from ..integration.error import energy, mechanism_sites, run_batch, run_with_softmax, valid_queries
from ..mechanisms import LinearMechanism, Mechanism
from .heads import Heads, set_exact_heads
from .processes import sum_over_processes

STATE = "conversion.pt"
WARMUP, DECAY = 0.05, 0.4  # fractions of the steps
BETAS = (0.5, 0.9)  # of Adam; a shorter memory than its defaults needs fewer steps
ENOUGH = 0.97  # stop after a round whose error is above this fraction of the previous round's
TAIL = 10  # the error of a round is the mean over this many steps at its end
END_TO_END_RATE = 0.2  # learning rate of end-to-end steps relative to the others


class Transfer:
    """Trains all mechanisms that have parameters with one optimizer. The last steps, a fraction `end_to_end` of all,
    train all layers jointly.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: int,
        rounds: int,
        learning_rate: float,
        end_to_end: float,
        parts: float,
        exact_heads: float,
        seed: int,
    ):
        self.model, self.steps, self.learning_rate = model, steps, learning_rate
        self.apart, self.parts = steps - int(end_to_end * steps), parts
        self.together = steps - self.apart  # end-to-end steps of a round
        self.most = self.apart + rounds * self.together
        self._find_mechanisms()
        if not self.names:
            raise ValueError(
                f"{', '.join(sorted({m.config.name for m in self.sites}))}: nothing to train, these mechanisms have no "
                "parameters. Choose a trainable one such as 'hedgehog', 'fmm', or 'favor+' with trainable=True."
            )
        self.parameters = [p for mechanism in self.names for p in mechanism.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate, betas=BETAS)
        configs = {name: mechanism.config.to_dict() for mechanism, name in self.names.items()}
        numbers = {
            "steps": steps,
            "rounds": rounds,
            "learning_rate": learning_rate,
            "end_to_end": end_to_end,
            "exact_heads": exact_heads,
            "parts": parts,
            "seed": seed,
        }
        self.settings = {**numbers, "layers": configs}
        self.step = 0
        self.seconds = 0.0
        self.heads: Heads = {}  # that keep exact softmax
        self.losses: dict[Mechanism, Tensor] = {}  # of the last step
        self.recent: list[float] = []  # errors of the last steps
        self.rounds: list[float] = []  # errors of the rounds so far

    def _find_mechanisms(self) -> None:
        self.sites = mechanism_sites(self.model)
        self.names = {mechanism: name for mechanism, name in self.sites.items() if list(mechanism.parameters())}

    def keep_exact(self, heads: Heads) -> None:
        """Let these heads use exact softmax from now on."""
        set_exact_heads(self.model, heads)
        self.heads = heads
        self._find_mechanisms()

    @contextmanager
    def layers_in_float32(self) -> Iterator[None]:
        """Context in which mechanisms are in float32 and only their parameters require gradients. Afterwards, dtypes,
        `requires_grad` and gradients are restored.
        """
        found = {p: (p.requires_grad, p.grad) for p in self.model.parameters()}
        dtypes = {mechanism: next(mechanism.parameters()).dtype for mechanism in self.names}
        for mechanism, dtype in dtypes.items():
            mechanism.to(torch.promote_types(dtype, torch.float32))
        for parameter in found:
            parameter.requires_grad_(False).grad = None
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for mechanism, dtype in dtypes.items():
                mechanism.to(dtype)
            for parameter, (requires, gradient) in found.items():
                parameter.requires_grad_(requires).grad = gradient

    def train(self, batch: Mapping[str, Any]) -> float:
        """Run one training step of all layers and return the root of their mean loss."""
        self.losses.clear()
        if self.step < self.apart:
            run_with_softmax(self.model, batch, self._learn, gradients=True)
            rate = self.learning_rate * rate_factor(self.step, self.apart)
        else:
            position = (self.step - self.apart) % self.together
            if position == 0:
                self.optimizer.state.clear()  # end-to-end gradients have another magnitude
            self._learn_together(batch)
            rate = END_TO_END_RATE * self.learning_rate * rate_factor(position, self.together)
        if not self.losses:
            raise ValueError("The batch reached no trainable layer. Is the attention implementation 'hf_rfattn'?")
        sum_over_processes([p.grad for p in self.parameters if p.grad is not None])
        losses = torch.stack(list(self.losses.values()))
        sum_over_processes([losses])
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        for mechanism, loss in zip(self.losses, losses.tolist(), strict=True):
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"{self.sites[mechanism]}: the loss became {loss} at step {self.step}. Use a lower learning_rate "
                    f"than {self.learning_rate}."
                )
        error = math.sqrt(losses.mean())
        self.recent = [*self.recent, error][-min(TAIL, max(1, self.together)) :]
        if self.step > self.apart and (self.step - self.apart) % self.together == 0:
            self.rounds.append(sum(self.recent) / len(self.recent))
        return error

    def finished(self) -> bool:
        """Whether all steps are done, or the last round has not reduced the error enough."""
        between_rounds = self.step > self.apart and (self.step - self.apart) % self.together == 0
        stuck = between_rounds and len(self.rounds) > 1 and self.rounds[-1] > ENOUGH * self.rounds[-2]
        return self.step == self.most or stuck

    def _learn(self, mechanism: Mechanism, args: tuple, masks: dict[str, Any], exact: Tensor, output: Tensor) -> None:
        """Loss and gradients of one layer, computed as soon as it has run, which frees its graph."""
        if mechanism not in self.names:
            return
        relative = _distance(exact, valid_queries(exact, masks))
        with torch.enable_grad():
            loss = whole = relative(output)
            if self.parts:
                inner = [m for m in mechanism.modules() if isinstance(m, LinearMechanism) and m is not mechanism]
                learning = [m for m in inner if list(m.parameters())]
                for part in learning:
                    loss = loss + self.parts / len(learning) * relative(part(*args, **masks))
            loss.backward()
        self.losses[mechanism] = self.losses.get(mechanism, 0) + whole.detach()

    def _learn_together(self, batch: Mapping[str, Any]) -> None:
        """Losses of all layers on the outputs of the patched layers before them, and gradients through the model."""
        distances: dict[Mechanism, list[Callable[[Tensor], Tensor]]] = {mechanism: [] for mechanism in self.sites}

        def remember(mechanism: Mechanism, args: tuple, masks: dict[str, Any], exact: Tensor, output: Tensor) -> None:
            distances[mechanism].append(_distance(exact, valid_queries(exact, masks)))

        def compare(mechanism: Mechanism, args: tuple, output: Tensor) -> None:
            self.losses[mechanism] = self.losses.get(mechanism, 0) + distances[mechanism].pop(0)(output)

        run_with_softmax(self.model, batch, remember)
        handles = [mechanism.register_forward_hook(compare) for mechanism in self.sites]
        try:
            with torch.enable_grad():
                run_batch(self.model, batch)
                torch.stack(list(self.losses.values())).mean().backward()
        finally:
            for handle in handles:
                handle.remove()
        self.losses = {mechanism: loss.detach() for mechanism, loss in self.losses.items()}

    def save(self, path: Path, before: AttentionError) -> None:
        """Save the state atomically."""
        state = {
            "settings": self.settings,
            "error before training": _rounded(before.overall),
            "step": self.step,
            "heads": self.heads,
            "recent": self.recent,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "parameters": [p.detach() for p in self.parameters],
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
        """Load the state if there is one."""
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            now = {"settings": self.settings, "error before training": _rounded(before.overall)}
            for what, value in now.items():
                if state[what] != value:
                    raise ValueError(
                        f"{path} belongs to another conversion: its {what} was {state[what]}, now it is {value}. Pass "
                        "the same model, batches and options, or another checkpoint."
                    )
            self.step, self.seconds = state["step"], state["seconds"]
            self.recent, self.rounds = state["recent"], state["rounds"]
            if state["heads"]:
                self.keep_exact(state["heads"])
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.data.copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])
        except (UnpicklingError, RuntimeError, OSError, EOFError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged or was written by another version ({type(error).__name__}). Delete it to start "
                "the conversion again, or pass another checkpoint."
            ) from error


def rate_factor(step: int, steps: int) -> float:
    """Fraction of the peak learning rate at a step, counted from 0: linear warm-up, plateau, linear decay.

    >>> [round(rate_factor(step, 100), 2) for step in (0, 4, 5, 60, 80, 99)]
    [0.2, 1.0, 1.0, 1.0, 0.5, 0.03]
    """
    return min(1.0, (step + 1) / math.ceil(WARMUP * steps), (steps - step) / (DECAY * steps))


def _distance(exact: Tensor, valid: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the loss of a layer's output: squared error over the energy of the exact output, mean over heads."""
    total = energy(exact, valid, torch.float32)
    sum_over_processes([total])
    total = total.clamp(min=torch.finfo(total.dtype).tiny)
    return lambda output: (energy(output.float() - exact.float(), valid, torch.float32) / total).mean()


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.2g}") for value in values]
