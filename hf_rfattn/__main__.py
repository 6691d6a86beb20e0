"""`python -m hf_rfattn`: the command line, where the script is not on the path."""

from .cli import app

if __name__ == "__main__":
    app()
