"""Error of each mechanism by layer and head of a pretrained model, without training.

Errors are those of `attention_error`, ‖ô - o‖ / ‖o‖ on the queries, keys and values of the unpatched model; "average"
is the error without any attention. The study also reports, for each head, the entropy of its attention (1 is uniform),
the mean norm of its scaled queries and keys, its near field (the share of attention within `bandwidth` tokens) and its
`edges` (the share to the first and last token). A head is near-field if its near field is at least one half, otherwise
far-field.
"""

import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure

from .. import attention_error, calibrate, unpatch_model
from ..bench.loading import patch_quietly
from ..mechanisms import mechanism_names, resolve_config
from ..results.plots import BASELINE
from ..results.report import Table
from . import Advance, Result, Study, rows_with
from .pretrained import Captured, capture, describe, load, read_text

NEAR, FAR = "near", "far"
KINDS = {  # statistics of each head
    "near_field": "near field: attention within {} tokens (N: near-field head)",
    "edges": "attention to the first and last token",
    "entropy": "entropy of attention (1: uniform)",
    "norm": "norm of scaled queries and keys",
}
COLORS: dict[str, Any] = {"cmap": "cividis", "vmin": 0, "aspect": "auto", "interpolation": "nearest"}


@dataclass(frozen=True)
class HeadsStudy(Study):
    """`model`: a folder, a name on the Hub, or "demo". `text_file`: by default a text in the package. `extend`: repeat
    the learned positions of a model that has fewer than `tokens`. `exact_keys`: of multipole, and of bands to compare.
    """

    model: str | None = None
    text_file: str | None = None
    tokens: int = 512
    features: tuple[int, ...] = (64, 256)
    bandwidth: int = 16
    band: int = 64
    exact_keys: tuple[int, ...] = (64, 128)
    extend: bool = False
    seed: int = 0

    name: ClassVar[str] = "heads"
    full_settings: ClassVar[dict[str, Any]] = {"features": (64, 256, 1024)}

    @property
    def estimators(self) -> dict[str, dict[str, Any]]:
        """All registered mechanisms with each number of features, and variants that are closer to softmax."""
        found: dict[str, dict[str, Any]] = {BASELINE: {"mechanism": BASELINE}}
        for name in mechanism_names():
            config = resolve_config(name)
            if hasattr(config, "num_features"):
                for M in self.features:
                    found[f"{name}, M = {M:,}"] = {"mechanism": name, "num_features": M}
                    if name == "favor+":
                        found[f"favor++, M = {M:,}"] = {"mechanism": name, "num_features": M, "variance": "optimal"}
            elif hasattr(config, "bandwidth"):
                found[f"{name}, default"] = {"mechanism": name}
            elif name not in (BASELINE, "multipole"):
                found[name] = {"mechanism": name}
        raw = {"mechanism": "rff", "num_features": self.features[0], "normalize_qk": False}
        found[f"rff of raw q and k, M = {self.features[0]:,}"] = raw
        found[f"band {self.band}"] = {"mechanism": "band", "bandwidth": self.band, "global_tokens": 0}
        far = [{"mechanism": "favor+", "num_features": self.features[0]}]
        joint = {"mechanism": "fmm", "bandwidth": self.band, "normalizer": "joint", "far": far, "global_tokens": 0}
        found[f"fmm {self.band}, joint, M = {self.features[0]:,}"] = joint
        found[f"fmm {self.band}, joint, edges exact"] = {**joint, "global_tokens": 1}
        for keys in self.exact_keys:
            edges = {"bandwidth": keys // 2, "global_tokens": 1}
            found[f"band {keys // 2}, edges exact"] = {"mechanism": "band", **edges}
            found[f"fmm {keys // 2}, joint, edges exact"] = {**joint, **edges}
            found[f"multipole, {keys} exact keys"] = {"mechanism": "multipole", "exact_keys": keys}
        return found

    def measure(self, advance: Advance) -> Result:
        text = read_text(self.text_file)
        model, batch = load(self.model, text, self.tokens, self.extend)
        result: Result = {"model": describe(self.model, model, text), "tokens": int(batch["input_ids"].numel())}
        advance("entropy and norms")
        layers = enumerate(capture(model, batch))
        result["heads"] = [head for i, layer in layers for head in head_statistics(i, layer, self.bandwidth)]
        result |= {"rows": [], "layers": {}}
        for label, options in self.estimators.items():
            advance(f"error of {label}")
            patch_quietly(model, resolve_config(options), self.seed)
            if options.get("variance") == "optimal":
                calibrate(model, batch)
            error = attention_error(model, batch)
            result["layers"][label] = [round(value, 4) for value in error.overall]
            for layer, values in enumerate(error.heads):
                for head, value in enumerate(values):
                    row = {"estimator": label, "layer": layer, "head": head, "error": round(value, 4)}
                    result["rows"].append(row)
        unpatch_model(model)
        return result

    @staticmethod
    def table(result: Result) -> Table:
        """Mean error over layers and error of the worst layer."""
        rows = [[label, f"{statistics.fmean(e):.3f}", f"{max(e):.3f}"] for label, e in result["layers"].items()]
        title = f"Relative error of attention outputs before training, {result['tokens']} tokens"
        return Table(title, ["attention", "mean over layers", "worst layer"], rows)

    @staticmethod
    def figures(result: Result) -> dict[str, Figure]:
        return {"heads_error": _error_figure(result), "heads_kinds": _kinds_figure(result)}


def head_statistics(number: int, layer: Captured, bandwidth: int) -> list[dict[str, Any]]:
    """Statistics of each head, one row per head."""
    weights = layer.weights()
    position = torch.arange(weights.shape[-1])
    band = (position[:, None] - position[None]).abs() <= bandwidth
    visible = layer.allowed.sum(-1)
    queries = visible > 1  # the entropy of a query with one visible key is undefined
    entropy = -torch.special.xlogy(weights, weights).sum(-1)[:, queries] / visible[queries].log()
    near = (weights * band).sum(-1).mean(-1)
    edges = weights[:, :, [0, -1]].sum(-1).mean(-1)
    norms = (layer.x.norm(dim=-1).mean(-1), layer.y.norm(dim=-1).mean(-1))
    columns = {"near_field": near, "edges": edges, "entropy": entropy.mean(-1), "query_norm": norms[0]}
    columns |= {"key_norm": norms[1], "norm": (norms[0] * norms[1]).sqrt()}
    return [
        {"layer": number, "head": head, "kind": NEAR if near[head] >= 0.5 else FAR}
        | {name: round(float(values[head]), 4) for name, values in columns.items()}
        for head in range(len(weights))
    ]


def _error_figure(result: Result) -> Figure:
    """Errors of mechanisms, by layer as numbers and by head as colours."""
    labels, overall = list(result["layers"]), list(result["layers"].values())
    per_head = [[row["error"] for row in rows_with(result["rows"], estimator=label)] for label in labels]
    layers, heads = len(overall[0]), len(per_head[0]) // len(overall[0])
    figure = Figure(figsize=(13, 0.29 * len(labels) + 1.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(0.45 * layers, 8))
    left.imshow(overall, vmax=1.2, **COLORS)
    for i, line in enumerate(overall):
        for j, value in enumerate(line):
            _write(left, j, i, f"{value:.3g}", value >= 0.6, 7)
    image = right.imshow(per_head, vmax=1.2, **COLORS)
    left.set_yticks(range(len(labels)), labels)
    left.set_xticks(range(layers))
    left.set(title="by layer", xlabel="layer")
    right.set_xticks([heads * (layer + 0.5) - 0.5 for layer in range(layers)], range(layers))
    right.set(title="by head", xlabel=f"layer ({heads} heads each)")
    figure.colorbar(image, ax=right, label="relative error", extend="max", pad=0.01)
    figure.suptitle(f"Error against softmax before training: {result['model']['name']}, {result['tokens']} tokens")
    return figure


def _kinds_figure(result: Result) -> Figure:
    """Layer by head: near field, edges, entropy and norm."""
    rows = [rows_with(result["heads"], layer=layer) for layer in range(1 + result["heads"][-1]["layer"])]
    figure = Figure(figsize=(11, max(4.6, 0.62 * len(rows) + 1.8)), layout="constrained")
    for axes, (value, title) in zip(figure.subplots(2, 2).flat, KINDS.items(), strict=True):
        grid = [[head[value] for head in line] for line in rows]
        image = axes.imshow(grid, vmax=None if value == "norm" else 1, **COLORS)
        if value == "near_field":
            for head in rows_with(result["heads"], kind=NEAR):
                _write(axes, head["head"], head["layer"], "N", head[value] > 0.6, 9)
        axes.set_title(title.format(result["settings"]["bandwidth"]), fontsize=10)
        axes.set(xlabel="head", ylabel="layer", xticks=range(len(rows[0])), yticks=range(len(rows)))
        figure.colorbar(image, ax=axes)
    figure.suptitle(f"Heads of {result['model']['name']} on {result['tokens']} tokens")
    return figure


def _write(axes: Any, x: int, y: int, text: str, bright: bool, size: int) -> None:
    """Write a text into a cell of an image, in black or white."""
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color="black" if bright else "white")
