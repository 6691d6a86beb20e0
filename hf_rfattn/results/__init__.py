"""Result documents: written by recipes and benchmarks, and read by tables, reports, plots, cards and the README.

- `documents.py`: fields that all documents share (commit, versions, hardware, seed), atomic writes, removal of paths.
- `schema.py`: validation of the documents that cards and comparisons read.
- `report.py`: reports as lists of blocks, rendered as Markdown, HTML or in the terminal; formatting of numbers.
- `plots.py`: line plots in one style. It imports matplotlib, so it is not imported here.
- `fingerprint.py`: digests of checkpoints.

This subpackage uses no other part of the package.
"""

from .documents import (
    SCHEMA_VERSION,
    hardware,
    load_average,
    machine,
    name_of,
    new_folder,
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
    Image,
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
    control_of,
    parse_result,
    read_results,
)
