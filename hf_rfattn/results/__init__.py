"""Result documents: written once by whatever measures, and read by tables, reports, plots, cards and the README.

- `documents.py`: documents as JSON, what every document begins with (commit, versions, hardware, seed), privacy.
- `schema.py`: documents that cards and comparisons read, checked.
- `report.py`: a report is a list of blocks, rendered as Markdown, HTML or in the terminal; numbers as tables show them.
- `plots.py`: the style of plots. Imports matplotlib, so it is not imported here.
- `fingerprint.py`, `folders.py`: digests of checkpoints, folders written as a whole.

This room uses no other room of the package.
"""

from .documents import (
    SCHEMA_VERSION,
    hardware,
    load_average,
    machine,
    name_of,
    new_result,
    read_result,
    rounded,
    without_folders,
    write_result,
    write_whole,
)
from .fingerprint import RESULTS, checkpoint_fingerprint, results_fingerprint, weight_files
from .report import (
    DASH,
    Block,
    Bullets,
    Heading,
    Image,
    Paragraph,
    Table,
    as_html,
    as_markdown,
    crossover_text,
    in_bytes,
    measured_crossover,
    number,
    print_blocks,
    si,
    times,
    write_images,
)
from .schema import (
    CONTROLS,
    FAR,
    NEAR,
    NO_ATTENTION,
    SOFTMAX,
    STAGES,
    Metric,
    Result,
    SpeedResult,
    TaskResult,
    TransferResult,
    control_of,
    parse_result,
    read_results,
)

__all__ = [
    "CONTROLS", "DASH", "FAR", "NEAR", "NO_ATTENTION", "RESULTS", "SCHEMA_VERSION", "SOFTMAX", "STAGES", "Block",
    "Bullets", "Heading", "Image", "Metric", "Paragraph", "Result", "SpeedResult", "Table", "TaskResult",
    "TransferResult", "as_html", "as_markdown", "checkpoint_fingerprint", "control_of", "crossover_text", "hardware",
    "in_bytes", "load_average", "machine", "measured_crossover", "name_of", "new_result", "number", "parse_result",
    "print_blocks", "read_result", "read_results", "results_fingerprint", "rounded", "si", "times", "weight_files",
    "without_folders", "write_images", "write_result", "write_whole",
]  # fmt: skip
