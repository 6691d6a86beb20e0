"""Attention transfer: trains mechanisms to imitate the softmax attention they replace, on unlabelled text.

Softmax outputs o replace the mechanism's outputs ô, so every layer sees the queries, keys and values of the original
model. Each mechanism minimises Σ_h ‖ô_h - o_h‖² / ‖o_h‖² over its own parameters: all layers train simultaneously and
independently, with one forward pass of the model per step and one autograd graph per mechanism. In the last steps
(`end_to_end`), layers see the outputs of the patched layers before them, and the sum of all errors is minimised.

Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry", ICLR 2024.
"""

import itertools
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..integration import AttentionError, attention_error, calibrate, patch_model, unpatch_model
from ..integration.error import EXPLANATION, optimal_maps
from ..integration.inputs import Data
from ..integration.patching import UNTRAINED, Attention
from ..integration.text_table import text_table
from .batches import TrainingBatches
from .heads import Heads, decisive_heads, linear_layers, usual_share
from .processes import check_alike, from_first, process_rank
from .transfer import STATE, Transfer


@dataclass(frozen=True)
class Conversion:
    """Result of attention transfer: errors before and after, training steps of each layer, time in seconds, and the
    numbers of the heads that keep exact softmax by layer number.

    Prints as a table; `to_dict()` converts it to a dict.
    """

    before: AttentionError
    after: AttentionError
    steps: dict[str, int]
    seconds: float
    exact_heads: Heads

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of plain lists, numbers and strings."""
        return asdict(self)

    def __str__(self) -> str:
        after = self.after
        rows = []
        for i, name in enumerate(after.layers):
            errors = (after.average[i], self.before.overall[i], after.overall[i], max(after.heads[i]))
            rows.append((name, after.mechanisms[i], *(f"{error:.3f}" for error in errors), self.steps.get(name, 0)))
        numbers = ("average", "before", "after", "worst head", "steps")
        columns = {"layer": "<", "attention": "<", **dict.fromkeys(numbers, ">")}
        return f"{text_table(columns, rows)}\n{EXPLANATION}"


def convert(
    model: nn.Module,
    attention: Attention | None,
    batches: Data,
    *,
    steps: int = 400,
    rounds: int = 4,
    learning_rate: float = 0.05,
    end_to_end: float = 0.4,
    exact_heads: float | None = None,
    parts: float = 0.0,
    measure: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    max_length: int = 512,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    save_every: int = 100,
    progress: bool = True,
    **patching: Any,
) -> Conversion:
    """Patch a model and train its mechanisms to imitate the softmax attention they replace. Other weights are frozen.

    `attention` and `patching`: arguments of `patch_model`; `attention=None` uses the patch of a patched model.
    `batches`: batches as a tokenizer returns them, one per step and repeated as needed, or a single batch; or one or
    several texts. Texts need a `tokenizer`, which encodes `batch_size` of them at a time, truncated to `max_length`
    tokens. No labels are needed. `steps`: training steps. `learning_rate`: peak learning rate of Adam, with linear
    warm-up and decay. `seed`: random seed of the projections and the order of texts.

    `end_to_end`: fraction of the steps, at the end, in which every layer sees the outputs of the patched layers before
    it and gradients flow through the whole model, so that layers compensate each other's errors. 0 saves memory.
    `rounds`: maximum number of repetitions of the end-to-end steps, each with its own warm-up and decay. Training stops
    after a round that reduces the error by less than 3 %.
    `exact_heads`: fraction of all heads, those that matter most to the output before the end-to-end steps, that keep
    exact softmax: see `keep_exact_heads`. By default one in eight in encoders with a linear mechanism, which recovers
    most of the lost score, and none in other models. 0 keeps the cost linear.
    `parts`: weight of an additional loss with which the linear parts of a mechanism (the far fields of fmm) imitate
    softmax on their own. `measure`: a batch on which errors are measured; by default the first of `batches`, which is
    then left out of training if there are others.

    `checkpoint`: folder to which the training state is saved every `save_every` steps. The same call resumes from it
    with the next batch, so pass the same batches in the same order (a shuffling DataLoader needs a seeded `generator`).
    `progress`: show a progress bar.

    If torch.distributed is initialized, every process passes its own batches, and gradients are summed over all of
    them. All other arguments must be equal on all processes; errors are measured on the batch of the first process.
    Parameters are trained in float32 whatever the dtype of the model. `requires_grad` and training mode are restored
    afterwards. If an error is raised, the new patch is removed; after Ctrl-C, the model keeps what it has learned.

    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    >>> model = BertModel(tiny)
    >>> batches = [{"input_ids": torch.randint(0, 1000, (2, 16))} for _ in range(3)]
    >>> report = convert(model, "hedgehog", batches, steps=2, progress=False)
    >>> report.steps
    {'encoder.layer.0.attention.self': 2}
    """
    if measure is not None and not isinstance(measure, Mapping):
        raise ValueError(f"measure must be one batch as a tokenizer returns it, not {type(measure).__name__}.")
    for name, value in {"steps": steps, "rounds": rounds, "save_every": save_every, "batch_size": batch_size}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}.")
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be above 0, not {learning_rate!r}.")
    if not 0 <= end_to_end <= 1:
        raise ValueError(f"end_to_end must be a fraction of the steps between 0 and 1, not {end_to_end!r}.")
    if exact_heads is not None and not 0 <= exact_heads < 1:
        raise ValueError(f"exact_heads must be a fraction of all heads, from 0 to below 1, not {exact_heads!r}.")
    data = TrainingBatches(batches, tokenizer, batch_size, max_length, seed)
    if attention is None and patching:
        raise ValueError(f"attention=None keeps the patch of the model, so {', '.join(patching)} would be ignored.")
    if attention is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", UNTRAINED)
            patch_model(model, attention, seed=seed, **patching)
    try:
        if measure is None:
            measure = data.take_first()
        measure = from_first({k: v.cpu() if isinstance(v, Tensor) else v for k, v in measure.items()})
        if attention is not None and optimal_maps(model):
            calibrate(model, measure)
        before = attention_error(model, measure)
        if exact_heads is None:
            exact_heads = usual_share(model)
        elif exact_heads:
            linear_layers(model)  # raises ValueError before the training, not after most of it
        transfer = Transfer(model, steps, rounds, learning_rate, end_to_end, parts, exact_heads, seed)
        state = None if checkpoint is None else Path(checkpoint) / STATE
        saved = None if checkpoint is None else save_every
        tensors = [x for mechanism in transfer.names for x in mechanism.state_dict().values()]
        sums = [float(x.double().sum()) for x in tensors]
        check_alike(seed=seed, settings=transfer.settings, mechanisms=sums, save_every=saved)
        hidden = not progress or process_rank() > 0
        with transfer.layers_in_float32(), tqdm(total=transfer.most, desc="attention transfer", disable=hidden) as bar:
            if state is not None:
                transfer.load(state, before)
            check_alike(steps_in_the_checkpoint=transfer.step)
            ahead = itertools.islice(data, transfer.step, None)
            started = time.perf_counter() - transfer.seconds
            while True:
                if exact_heads and transfer.step >= transfer.apart and not transfer.heads:
                    transfer.keep_exact(from_first(decisive_heads(model, [measure], exact_heads)))
                if transfer.finished():
                    break
                error = transfer.train(next(ahead))
                transfer.seconds = time.perf_counter() - started
                bar.set_postfix_str(f"error {error:.3f}", refresh=False)
                bar.update(transfer.step - bar.n)
                due = transfer.step % save_every == 0 or transfer.finished()
                if state is not None and due and process_rank() == 0:
                    transfer.save(state, before)
    except Exception:
        if attention is not None:
            unpatch_model(model)
        raise
    return Conversion(
        before=before,
        after=attention_error(model, measure),
        steps=dict.fromkeys(transfer.names.values(), transfer.step),
        seconds=transfer.seconds,
        exact_heads=transfer.heads,
    )
