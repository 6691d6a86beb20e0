"""`hf-rfattn card DIR` and `hf-rfattn publish DIR --repo me/name`. What they need is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer

from .errors import INTERRUPTED, errors_without_traceback

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="What save_pretrained of a patched model has written.")]


def card(
    folder: Folder,
    results: Annotated[
        Path | None, typer.Option(help="Folder of result files; they are copied into DIR/results first.")
    ] = None,
    repo: Annotated[str | None, typer.Option(metavar="ME/NAME", help="Where it will be published.")] = None,
    base_model: Annotated[str | None, typer.Option(help="On the Hub; needed only where no result names it.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the base model, where no result names it.")] = None,
) -> None:
    """Write a model card (README.md) from the checkpoint in DIR and the result files in DIR/results."""
    with errors_without_traceback():
        from ..hub.cards import write_card
        from ..hub.folder import CheckpointFolder
        from ..results import RESULTS, read_results, write_result

        inside = CheckpointFolder(folder).path / RESULTS
        if results is not None:
            read = read_results(results)
            if not read:
                raise ValueError(f"{results} holds no result file.")
            if results.resolve() != inside.resolve():
                for result in read:
                    write_result(dict(result.document), inside / result.file)
        path = write_card(folder, repo_id=repo, base_model=base_model, license=license)
    measured = len(list(inside.glob("*.json")))
    typer.echo(
        f"Written: {path}, from {measured} result files" if measured else f"Written: {path}; it claims no result"
    )


def publish(
    folder: Folder,
    repo: Annotated[str, typer.Option(metavar="ME/NAME", help="Of the repository; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="If it is made, make it private.")] = False,
    revision: Annotated[str | None, typer.Option(help="A branch; made if it is not there.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show what would be sent; send nothing.")
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Send this file of DIR too."),
    ] = None,
) -> None:
    """Send a patched checkpoint with its card and results to the Hub, in one commit.

    Only files that belong to a model and those named by --include are sent. The token is that of `hf auth login` or
    HF_TOKEN.
    """
    with errors_without_traceback():
        import transformers

        from ..hub.publish import make_plan
        from ..hub.publish import publish as send
        from ..results import in_bytes

        transformers.logging.set_verbosity_error()
        plan = make_plan(folder, repo, revision, include or ())
        for name, size in plan.files.items():
            typer.echo(f"{in_bytes(size):>12}  {name}")
        typer.echo(f"{in_bytes(plan.size):>12}  {len(plan.files)} files, to {plan.address}")
        if plan.left_out:
            typer.echo(f"Left out: {', '.join(plan.left_out)} (--include FILE sends one)")
        try:
            options = {"private": private, "revision": revision, "dry_run": dry_run, "include": include or ()}
            address = send(folder, repo, **options, tell=typer.echo)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            typer.echo("Interrupted. Run again to go on: what is already uploaded is not sent twice.")
            raise typer.Exit(INTERRUPTED) from None
    typer.echo("Everything is in order; nothing was sent." if dry_run else f"Published: {address}")
