"""`hf-rfattn card DIR` and `hf-rfattn publish DIR --repo me/name`."""

from pathlib import Path
from typing import Annotated

import typer

from .command_line import errors_without_traceback

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a patched model, saved by save_pretrained.")]


def card(
    folder: Folder,
    results: Annotated[Path | None, typer.Option(help="Folder of result files to copy into DIR/results first.")] = None,
    repo: Annotated[str | None, typer.Option(metavar="ME/NAME", help="Repository it will be published to.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Name of the base model on the Hub, if no result file names it.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="License of the base model, if no result file names it.")] = None,
) -> None:
    """Write the model card (README.md) of a patched model.

    The card is made from the checkpoint in DIR and the result files in DIR/results.
    """
    with errors_without_traceback():
        from ..hub.cards import CheckpointFolder, write_card
        from ..results.documents import RESULTS, write_result
        from ..results.schema import read_results

        inside = CheckpointFolder(folder).path / RESULTS
        if results is not None:
            read = read_results(results)
            if not read:
                raise ValueError(f"{results} contains no result files; give a folder with the JSON files of recipes.")
            if results.resolve() != inside.resolve():
                for result in read:
                    write_result(dict(result.document), inside / result.file)
        path = write_card(folder, repo_id=repo, base_model=base_model, license=license)
    measured = len(list(inside.glob("*.json")))
    typer.echo(
        f"Written: {path}, from {measured} result file{'s' if measured > 1 else ''}"
        if measured
        else f"Written: {path}, without results: there are no result files in {inside}"
    )


def publish(
    folder: Folder,
    repo: Annotated[str, typer.Option(metavar="ME/NAME", help="Repository; created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; created if it does not exist.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and list the files, but upload nothing.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Also upload this file of DIR; can be repeated.")
    ] = None,
) -> None:
    """Upload a patched model, its card and results to the Hub.

    Uploads, in one commit, the files that belong to a model and those named by --include. Log in first with
    `hf auth login`, or set HF_TOKEN.
    """
    with errors_without_traceback():
        import transformers

        from ..hub.publish import make_plan
        from ..hub.publish import publish as send
        from ..results.report import in_bytes

        transformers.logging.set_verbosity_error()
        plan = make_plan(folder, repo, revision, include or ())
        for name, size in plan.files.items():
            typer.echo(f"{in_bytes(size):>12}  {name}")
        typer.echo(f"{in_bytes(plan.size):>12}  {len(plan.files)} files, to {plan.address}")
        if plan.left_out:
            typer.echo(f"Left out: {', '.join(plan.left_out)} (--include FILE uploads one)")
        try:
            options = {"private": private, "revision": revision, "dry_run": dry_run, "include": include or ()}
            address = send(folder, repo, **options, tell=typer.echo)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Run the same command again to resume; uploaded files are skipped.") from None
    typer.echo("All checks passed; nothing was uploaded." if dry_run else f"Published: {address}")
