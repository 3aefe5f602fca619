"""`python -m leangrad` is the command `leangrad`."""

from leangrad.cli import app

if __name__ == "__main__":
    app(prog_name="python -m leangrad")
