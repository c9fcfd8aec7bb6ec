"""``python -m verify``: prove the rules of docs/certificate.md on compiled kernels."""

from __future__ import annotations

import typer

from .command import certify

app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command()(certify)

if __name__ == "__main__":
    app()
