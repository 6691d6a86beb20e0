"""Result documents: written by recipes and benchmarks, and read by tables, reports, plots, cards and the README.

- `documents.py`: fields that all documents share (commit, versions, hardware, seed), atomic writes, removal of
  paths, and fingerprints of checkpoints.
- `schema.py`: validation of the documents that cards and comparisons read.
- `report.py`: reports as lists of blocks, rendered as Markdown, HTML or in the terminal; formatting of numbers.
- `messages.py`: errors as one line on the terminal.
- `plots.py`: line plots in one style. It imports matplotlib, so it is not imported here.

This subpackage uses no other part of the package, except how to install it (`install.py`).
"""
