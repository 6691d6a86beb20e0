"""Result documents: written once by whatever measures, and read by tables, reports, plots, cards and the README.

Documents, `documents.py` and `environment.py`:
    new_result(kind, seed=...)      what every document begins with: commit, versions, hardware, load, seed
    write_result, write_whole       a document as JSON, any text: all of it or nothing
    read_result(path)               a document, or a ValueError that names the file
    without_folders, name_of        documents for others do not say where files lie on this machine
    checkpoint_fingerprint          what results and cards name a checkpoint by (`fingerprint.py`)
    hardware, machine, rounded      this machine, a machine in a few words, numbers as documents hold them

Schema, `schema.py`:
    parse_result, read_results      documents that cards and comparisons read, checked: TaskResult, SpeedResult,
                                    TransferResult, each with the whole document in `document`
    Metric                          value, number of examples, scale, direction and chance; `beats_chance`,
                                    `clearly_better`

Reports, `report.py`: a report is a list of blocks, Heading, Paragraph, Bullets, Table and Image.
    as_markdown(blocks)             Markdown
    as_html(title, blocks)          one page with the plots in it
    print_blocks(blocks, console)   the terminal
    write_images(blocks, folder)    the plots as PNG
    number, spread_of, times, si, in_bytes    numbers as tables show them

Plots, `plots.py` (matplotlib is imported when it is):
    line_style, draw_line, draw_rows, rate_line, log_log, mark_crossover, title_and_legend

`controls.py`: control_of, what a row of a table is a control of.
`crossover.py`: measured_crossover and crossover_text, the length from which on one thing is faster than another.

This room uses no other room of the package.
"""

from .controls import CONTROLS, FAR, NEAR, NO_ATTENTION, control_of
from .crossover import crossover_text, measured_crossover
from .documents import (
    SCHEMA_VERSION,
    name_of,
    new_result,
    read_result,
    rounded,
    without_folders,
    write_result,
    write_whole,
)
from .environment import hardware, load_average, machine
from .fingerprint import RESULTS, checkpoint_fingerprint, results_fingerprint, weight_files
from .report import (
    Block,
    Bullets,
    Heading,
    Image,
    Paragraph,
    Table,
    as_html,
    as_markdown,
    number,
    print_blocks,
    spread_of,
    times,
    write_images,
)
from .schema import (
    SOFTMAX,
    STAGES,
    Metric,
    Result,
    SpeedResult,
    TaskResult,
    TransferResult,
    parse_result,
    read_results,
)
from .units import in_bytes, si

__all__ = [
    "CONTROLS", "FAR", "NEAR", "NO_ATTENTION", "RESULTS", "SCHEMA_VERSION", "SOFTMAX", "STAGES", "Block", "Bullets",
    "Heading", "Image", "Metric", "Paragraph", "Result", "SpeedResult", "Table", "TaskResult", "TransferResult",
    "as_html", "as_markdown", "checkpoint_fingerprint", "control_of", "crossover_text", "hardware", "in_bytes",
    "load_average", "machine", "measured_crossover", "name_of", "new_result", "number", "parse_result",
    "print_blocks", "read_result", "read_results", "results_fingerprint", "rounded", "si", "spread_of", "times",
    "weight_files", "without_folders", "write_images", "write_result", "write_whole",
]  # fmt: skip
