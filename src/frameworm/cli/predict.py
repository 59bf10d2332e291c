"""The verb that says how far a training will scale before anybody rents the machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from frameworm.cli.output import say
from frameworm.errors import ConfigError, EnvironmentSetupError

if TYPE_CHECKING:
    from frameworm.scaling.fabrics import Network
    from frameworm.scaling.predict import Prediction
    from frameworm.scaling.profile import Source
    from frameworm.scaling.simulate import Setting

_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(predict)


def predict(
    run: Optional[Path] = typer.Argument(  # noqa: UP045
        None, help="Folder of a run on one device; or give --case, or --compute-ms and --gradient-mb."
    ),
    world_sizes: str = typer.Option("1,2,4,8", help="Numbers of ranks to predict, such as 1,2,4,8,64."),
    network: Optional[Path] = typer.Option(None, help="A network.json that `frameworm network` measured."),  # noqa: UP045
    bandwidth_gbps: Optional[float] = typer.Option(  # noqa: UP045
        None, help="What one link carries in one direction, in Gbit/s (per node with --gpus-per-node)."
    ),
    latency_us: Optional[float] = typer.Option(None, help="Of one message between neighbours."),  # noqa: UP045
    fabric: Optional[str] = typer.Option(  # noqa: UP045
        None, help="A preset: nvlink4, infiniband-ndr, infiniband-hdr, 100gbe, 25gbe, 10gbe, 1gbe, ..."
    ),
    gpus_per_node: int = typer.Option(1, min=1, help="Ranks of one node; they meet over --inside first."),
    inside: str = typer.Option("nvlink4", help="The preset between the GPUs of one node."),
    links_per_node: int = typer.Option(1, min=1, help="Links of the fabric that one node has."),
    weak: bool = typer.Option(
        False,
        "--weak/--strong",
        help="Strong: the global batch stays and is shared out. Weak: the batch per device stays.",
    ),
    scaling: Optional[str] = typer.Option(None, hidden=True, help="Older spelling of --weak and --strong."),  # noqa: UP045
    strategy: str = typer.Option("ddp", help="ddp, zero1, zero2 or zero3."),
    compression: str = typer.Option("off", help="off, fp16, bf16, int8, int4, topk or powersgd."),
    price_per_gpu_hour: Optional[float] = typer.Option(None, min=0.0, help="For the cost of the training."),  # noqa: UP045
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set parallel.bucket_cap_mb=5"
    ),
    case: Optional[Path] = typer.Option(None, help="JSON file with the figures of a step, instead of a run."),  # noqa: UP045
    compute_ms: Optional[float] = typer.Option(None, help="Step of one device, instead of a run."),  # noqa: UP045
    gradient_mb: Optional[float] = typer.Option(None, help="Gradients of the model, with --compute-ms."),  # noqa: UP045
    measure_codecs: bool = typer.Option(True, help="Time the codecs on this machine if it is the run's kind."),
    out: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Folder for prediction.json, prediction.txt and prediction.svg."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Predict step time, speedup, efficiency and cost on more devices, from a run on one and a network.

    Example: frameworm predict RUN --world-sizes 1,2,4,8,64 --bandwidth-gbps 10 --latency-us 50

    By hand: frameworm predict --compute-ms 135 --gradient-mb 28 --fabric 10gbe --world-sizes 1,4
    """
    scaling = scaling or ("weak" if weak else "strong")
    prediction = make_prediction(
        _sizes(world_sizes),
        run,
        network=network,
        bandwidth_gbps=bandwidth_gbps,
        latency_us=latency_us,
        fabric=fabric,
        gpus_per_node=gpus_per_node,
        inside=inside,
        links_per_node=links_per_node,
        scaling=scaling,
        strategy=strategy,
        compression=compression,
        price_per_gpu_hour=price_per_gpu_hour,
        settings=settings,
        case=case,
        compute_ms=compute_ms,
        gradient_mb=gradient_mb,
        measure_codecs=measure_codecs,
    )
    from frameworm.report.scaling.prediction_text import render_prediction

    text = render_prediction(prediction)
    if out is not None:
        from frameworm.records.atomic import write_atomic
        from frameworm.records.printable import printable
        from frameworm.report.scaling.prediction_chart import render_prediction_svg

        try:
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(out / "prediction.json", json.dumps(prediction.to_dict(), indent=2) + "\n")
            write_atomic(out / "prediction.txt", printable(text))
            write_atomic(out / "prediction.svg", render_prediction_svg(prediction))
        except OSError as error:
            raise EnvironmentSetupError(f"cannot write to {out}: {error.strerror or error}; change --out") from error
        text += f"written to {out}\n"
    say(json.dumps(prediction.to_dict()) if as_json else text, end="\n" if as_json else "")


def make_prediction(
    sizes: Sequence[int],
    run: Path | None = None,
    *,
    network: Path | None = None,
    bandwidth_gbps: float | None = None,
    latency_us: float | None = None,
    fabric: str | None = None,
    gpus_per_node: int = 1,
    inside: str = "nvlink4",
    links_per_node: int = 1,
    scaling: str = "strong",
    strategy: str = "ddp",
    compression: str = "off",
    price_per_gpu_hour: float | None = None,
    settings: Sequence[str] = (),
    case: Path | None = None,
    compute_ms: float | None = None,
    gradient_mb: float | None = None,
    measure_codecs: bool = True,
) -> Prediction:
    """Predict by the options of the verb, which have the same names.

    Raises:
        ConfigError: Options that contradict each other, or are missing.
    """
    source = _source(run, case, compute_ms, gradient_mb)
    between = _network(source, network, bandwidth_gbps, latency_us, fabric, links_per_node)
    if gpus_per_node > 1:
        from frameworm.scaling.fabrics import LinkNetwork, NodesNetwork, find_fabric

        between = NodesNetwork(LinkNetwork(find_fabric(inside)), between, gpus_per_node)
    setting = _setting(run, source, strategy, compression, list(settings), measure_codecs)
    from frameworm.scaling.predict import Predictor

    return Predictor(source, between, setting, scaling, price_per_gpu_hour).predict(list(sizes))


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise ConfigError(f"--world-sizes {text} is not a list of numbers such as 1,2,4,8") from None


def _source(run: Path | None, case: Path | None, compute_ms: float | None, gradient_mb: float | None) -> Source:
    from frameworm.scaling.profile import from_figures, load_case, load_run

    if [run, case, compute_ms].count(None) != 2:
        raise ConfigError("give one of: a run's folder, --case FILE, or --compute-ms with --gradient-mb")
    if run is not None:
        return load_run(run)
    if case is not None:
        return load_case(case)
    if gradient_mb is None:
        raise ConfigError("--compute-ms needs --gradient-mb: the gradients of the whole model, 4 bytes a parameter")
    return from_figures({"compute_ms": compute_ms, "gradient_mb": gradient_mb})


def _network(
    source: Source,
    file: Path | None,
    bandwidth_gbps: float | None,
    latency_us: float | None,
    fabric: str | None,
    links: int,
) -> Network:
    from frameworm.scaling.fabrics import GIGABIT, Link, LinkNetwork, MeasuredNetwork, find_fabric
    from frameworm.scaling.network import NetworkModel
    from frameworm.scaling.profile import network_of

    given = [file, bandwidth_gbps, fabric]
    synchronised = network_of(source)
    if synchronised is not None and given.count(None) == 3:
        return synchronised
    if given.count(None) != 2:
        raise ConfigError("give one of --network FILE, --bandwidth-gbps with --latency-us, or --fabric NAME")
    if file is not None:
        return MeasuredNetwork(NetworkModel.load(file))
    if fabric is not None:
        link = find_fabric(fabric)
        return LinkNetwork(link) if links == 1 else LinkNetwork(link).faster(links)
    assert bandwidth_gbps is not None
    link = Link("given", bandwidth_gbps * GIGABIT * links, (latency_us or 0.0) * 1e-6)
    return LinkNetwork(link)


def _setting(
    run: Path | None, source: Source, strategy: str, compression: str, settings: list[str], measure: bool
) -> Setting:
    from frameworm.scaling.simulate import Setting
    from frameworm.scaling.traffic import METHODS, Codec

    if strategy not in _STRATEGIES:
        raise ConfigError(f"--strategy {strategy} is not one of {', '.join(_STRATEGIES)}")
    if compression not in METHODS:
        raise ConfigError(f"--compression {compression} is not one of {', '.join(METHODS)}")
    if compression != "off" and strategy != "ddp":
        raise ConfigError(f"compression works with ddp, not with {strategy}")
    from frameworm.config.schema import ParallelConfig

    parallel = ParallelConfig()
    if run is not None and (run / "config.yaml").exists():
        from frameworm.config.load import load_config_from_text, show_path
        from frameworm.records.store import RunFolder

        folder = RunFolder(run)
        parallel = load_config_from_text(folder.read_config(), show_path(folder.config), settings).parallel
    elif settings:
        raise ConfigError("--set changes settings of a run's config.yaml, and there is none")
    codecs = _codec_costs(source, parallel.compression_ratio, parallel.powersgd_rank) if measure else {}
    return Setting(
        strategy,
        Codec(compression, codecs, parallel.compression_ratio, parallel.powersgd_rank),
        parallel.bucket_cap_mb,
        parallel.first_bucket_mb,
        busy_host=1.0 if source.on_cpu else 0.0,
    )


def _codec_costs(source: Source, ratio: float, powersgd_rank: int) -> dict[str, float]:
    """Seconds per value of coding and decoding, timed here if this machine is of the run's kind."""
    if source.device is None:
        return {}
    import torch

    if source.on_cpu:
        device = torch.device("cpu")
    elif torch.cuda.is_available():
        device = torch.device("cuda")
    else:
        return {}
    from frameworm.parallel.compression.codec_cost import SQUARE, codec_seconds_per_value

    shapes = [gradient.shape for gradient in source.profile.gradients if gradient.shape] or [SQUARE]
    return codec_seconds_per_value(device, shapes, 2, ratio, powersgd_rank)
