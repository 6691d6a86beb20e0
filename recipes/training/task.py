"""What a recipe defines about its task; everything else is shared."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_rfattn.results import Metric

from .data import Source
from .options import RunOptions

Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]

Options = TypeVar("Options", bound=RunOptions)


@dataclass
class Prepared:
    """A task with its model and data, ready for the loop.

    `train` and `evaluation` hold model inputs; `examples` what they were made from, for the fingerprint.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Source
    examples: Mapping[str, Dataset]
    train: Dataset
    evaluation: Mapping[str, Dataset]
    collate: Collate
    max_length: int
    facts: dict[str, Any] = field(default_factory=dict)  # for the result file

    def __post_init__(self) -> None:
        """While it is trained, a model keeps no cache, which would keep the whole graph."""
        self.use_cache = getattr(self.model.config, "use_cache", False)
        self.model.config.use_cache = False


class Task(ABC, Generic[Options]):
    """One task. `main_metric`: what the best model is the best of."""

    name: str
    task_type: str  # as the Hub calls it
    main_metric: str

    def __init__(self, options: Options):
        self.options = options

    @abstractmethod
    def prepare(self) -> Prepared:
        """Load and check everything. What the user got wrong is a ValueError."""

    @abstractmethod
    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What evaluation keeps of one batch, a row an example; rows of all batches must fit together."""

    @abstractmethod
    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Metrics of a split from the rows of `predict`, in the order of the data. Runs on the main process alone."""
