"""Result documents: written once by whatever measures, and read by tables, reports, plots, cards and the README.

- `documents.py`: what every document begins with (commit, versions, hardware, seed), files written as a whole, privacy.
- `schema.py`: documents that cards and comparisons read, checked.
- `report.py`: a report is a list of blocks, rendered as Markdown, HTML or in the terminal; numbers as tables show them.
- `plots.py`: the style of plots. Imports matplotlib, so it is not imported here.
- `fingerprint.py`: digests of checkpoints.

This room uses no other room of the package.
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
