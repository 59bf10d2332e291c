"""Turns the options of `frameworm predict` into a prediction: which run, which network, which settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from frameworm.config.load import load_config_from_text, show_path
from frameworm.config.schema import ParallelConfig
from frameworm.errors import ConfigError
from frameworm.records.store import RunFolder
from frameworm.scaling.fabrics import (
    GIGABIT,
    Link,
    LinkNetwork,
    MeasuredNetwork,
    Network,
    NodesNetwork,
    find_fabric,
)
from frameworm.scaling.network import NetworkModel
from frameworm.scaling.predict import Prediction, Predictor
from frameworm.scaling.profile import Source, from_figures, load_case, load_run, network_of
from frameworm.scaling.simulate import Setting
from frameworm.scaling.traffic import METHODS, Codec

# Maps a source, topk's ratio and powersgd's rank to each codec's seconds per value.
CodecCosts = Callable[[Source, float, int], dict[str, float]]
_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


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
    codec_costs: CodecCosts | None = None,
) -> Prediction:
    """Predict from the options of `frameworm predict`, which have the same names.

    Args:
        codec_costs: Times the codecs on this machine; None: coding costs nothing.

    Raises:
        ConfigError: Options are missing or contradict each other.
    """
    source = _source(run, case, compute_ms, gradient_mb)
    between = _network(source, network, bandwidth_gbps, latency_us, fabric, links_per_node)
    if gpus_per_node > 1:
        between = NodesNetwork(LinkNetwork(find_fabric(inside)), between, gpus_per_node)
    setting = _setting(run, source, strategy, compression, list(settings), codec_costs)
    return Predictor(source, between, setting, scaling, price_per_gpu_hour).predict(list(sizes))


def _source(run: Path | None, case: Path | None, compute_ms: float | None, gradient_mb: float | None) -> Source:

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
    run: Path | None, source: Source, strategy: str, compression: str, settings: list[str], costs: CodecCosts | None
) -> Setting:

    if strategy not in _STRATEGIES:
        raise ConfigError(f"--strategy {strategy} is not one of {', '.join(_STRATEGIES)}")
    if compression not in METHODS:
        raise ConfigError(f"--compression {compression} is not one of {', '.join(METHODS)}")
    if compression != "off" and strategy != "ddp":
        raise ConfigError(f"compression works with ddp, not with {strategy}")
    parallel = ParallelConfig()
    if run is not None and (run / "config.yaml").exists():
        folder = RunFolder(run)
        parallel = load_config_from_text(folder.read_config(), show_path(folder.config), settings).parallel
    elif settings:
        raise ConfigError("--set changes settings of a run's config.yaml, and there is none")
    ratio, rank = parallel.compression_ratio, parallel.powersgd_rank
    codecs = {} if costs is None else costs(source, ratio, rank)
    return Setting(
        strategy,
        Codec(compression, codecs, ratio, rank),
        parallel.bucket_cap_mb,
        parallel.first_bucket_mb,
        busy_host=1.0 if source.on_cpu else 0.0,
    )
