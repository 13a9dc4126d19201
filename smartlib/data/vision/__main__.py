"""Extract what profile ``paper`` needs, or say what that takes: ``python -m smartlib.data.vision extract | plan``."""

from __future__ import annotations

import click

from smartlib.data.vision.catalogue import catalogue, jobs, open_source
from smartlib.data.vision.shards import SHARD_ROWS


@click.group(help=__doc__)
def main() -> None:
    """Plan and extract."""


@main.command("plan")
def plan_command() -> None:
    """What would be downloaded, under which licences, how long it takes here, and what is there already."""
    from smartlib.data.vision.planning import report

    for line in report():
        click.echo(line)


@main.command("extract")
@click.option("--dataset", help="Only this data set of the catalogue.")
@click.option("--model", help="Only this network, such as resnet50.")
@click.option(
    "--precision", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@click.option("--batch-size", type=int, default=128, show_default=True)
@click.option("--shard-rows", type=int, default=SHARD_ROWS, show_default=True, help="Images that a kill loses at most.")
@click.option("--device", default="auto", show_default=True)
@click.option("--compiled", is_flag=True, help="Use torch.compile.")
@click.option("--on-corrupt", type=click.Choice(["error", "skip"]), default="error", show_default=True)
@click.option("--offline", is_flag=True, help="Download nothing.")
def extract_command(dataset: str | None, model: str | None, offline: bool, **options) -> None:
    """Logits of all data sets that are there or can be had, by all networks; what is finished is not done again.

    A data set or network that cannot be had is named and left out; the exit status is 1 where nothing is left.
    """
    from smartlib.data.vision.extraction import extract
    from smartlib.data.vision.models import load_network
    from smartlib.data.vision.sources import CorruptImageError, Stream

    try:
        wanted = list(jobs(dataset, model))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    left_out, done, finished = {}, None, 0
    for job in wanted:
        try:
            if done is None or done[:2] != (job.dataset, job.condition):
                done = (job.dataset, job.condition, open_source(job.dataset, job.condition, download=not offline))
            source = done[2]
            entry = catalogue()["data sets"][job.dataset]
            about = {
                "dataset": entry.get("title", job.dataset), "licence": entry.get("licence", "not stated"),
                "model": job.model, "model_licence": job.network.get("licence", "not stated"),
                "source": "stream" if isinstance(source, Stream) else entry["layout"],
            }  # fmt: skip
            folder = extract(source, load_network(job.network), job.folder, about=about, **options)
        except CorruptImageError as error:
            raise click.ClickException(str(error)) from error
        except (ConnectionError, PermissionError, ImportError, ValueError) as error:
            left_out[str(job)] = str(error)
        else:
            finished += 1
            click.echo(f"{job}: {folder}")
    for name, why in left_out.items():
        click.echo(f"left out: {name}: {why}", err=True)
    if not finished:
        raise click.ClickException("nothing was extracted; `make plan PROFILE=paper` says what is needed")


@main.command("bench")
def bench_command() -> None:
    """Images per second of an extraction beside those of the bare network, as a ratio."""
    import torch

    from smartlib.data.vision.planning import measure_extraction

    n_images, model, batch_size = (50_000, "resnet50", 256) if torch.cuda.is_available() else (600, "resnet50", 32)
    whole, bare = measure_extraction(n_images, model, batch_size)
    click.echo(
        f"{n_images:,} images by {model}: {whole:.1f} images/s, bare network {bare:.1f}; ratio {whole / bare:.2f}"
    )


if __name__ == "__main__":
    main()
