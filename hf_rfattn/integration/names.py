"""The names under which this package is known to transformers."""

NAME = "hf_rfattn"  # of the attention implementation
SPEC = "rfattn"  # the config attribute that says what was patched
CACHE = "rf_cache"  # the keyword that carries a cache layer to the attention function
PART = "rf_part"  # the keyword that carries a part of a sequence to it
CODE = "modeling_hf_rfattn.py"  # the file beside a saved config that loads it with trust_remote_code=True
