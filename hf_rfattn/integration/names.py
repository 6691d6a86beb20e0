"""Names that this package uses in transformers."""

NAME = "hf_rfattn"  # attention implementation
SPEC = "rfattn"  # config attribute that records the patch
CACHE = "rf_cache"  # keyword that passes a cache layer to the attention function
PART = "rf_part"  # keyword that passes the part of a sharded sequence to it
CODE = "modeling_hf_rfattn.py"  # file saved with a config, for trust_remote_code=True
