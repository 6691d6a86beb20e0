"""`python -m hf_rfattn` runs the command line, for environments where the `hf-rfattn` script is not on the PATH."""

from .cli import app

if __name__ == "__main__":
    app()
