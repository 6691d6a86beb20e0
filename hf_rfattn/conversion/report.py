"""What attention transfer has reached, by layer."""

from dataclasses import dataclass
from typing import Any

from ..integration import AttentionError


@dataclass(frozen=True)
class Conversion:
    """What attention transfer has reached: errors before and after, and the steps that each layer was trained.

    Prints as a table, becomes a dict with `to_dict()`.
    """

    before: AttentionError
    after: AttentionError
    steps: dict[str, int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        return {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        names, after = self.after.layers, self.after
        width, kind = (max(map(len, words)) for words in (["layer", *names], ["attention", *after.mechanisms]))
        lines = [
            f"{'layer':<{width}}  {'attention':<{kind}}  {'average':>7}  {'before':>7}  {'after':>7}  "
            f"{'worst head':>10}  {'steps':>5}"
        ]
        for i, name in enumerate(names):
            lines.append(
                f"{name:<{width}}  {after.mechanisms[i]:<{kind}}  {after.average[i]:>7.3f}  "
                f"{self.before.overall[i]:>7.3f}  {after.overall[i]:>7.3f}  {max(after.heads[i]):>10.3f}  "
                f"{self.steps.get(name, 0):>5}"
            )
        lines.append("errors: relative to softmax, on its own q, k, v; average: what no attention at all would give.")
        return "\n".join(lines)
