"""A tuner search as one self-contained HTML file that opens offline, without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from frameworm.report.kit import tables
from frameworm.report.kit.page_templates import load_template
from frameworm.report.run import charts
from frameworm.report.tune import charts as charts_tune
from frameworm.report.tune import tables as tune_tables
from frameworm.report.tune.agreement import LayerRow, change_text, compared_text, layer_rows

MOST_CURVES = 12
MOST_LAYERS = 6
_SIGNS = {True: ("✓", "met"), False: ("✗", "missed")}
_TITLES = {
    "rejected": "Tried and rejected",
    "inconclusive": "Tried, not proved",
    "failed": "Failed",
    "skipped": "Not tried",
}


@dataclass(frozen=True, slots=True)
class ProofView:
    """One proof.

    Attributes:
        label: What was proved.
        verdict: The result.
        change: The class of the change, as text; empty if unknown.
        compared: What both sides were compared on; empty if they were not compared from the same states.
        layers: How well the sides agree, layer by layer, worst first.
        chart: Loss curves, for a proof without a comparison from the same states.
        has_band: Whether the chart shows what rounding explains.
        checks: Sign, class, name and detail of each check.
        seeds: Rows of a quality check.
    """

    label: str
    verdict: str
    change: str
    compared: str
    layers: tuple[LayerRow, ...]
    chart: Markup
    has_band: bool
    checks: tuple[tuple[str, str, str, str], ...]
    seeds: tuple[tuple[str, str, str, str, str], ...]

    @property
    def worst_layers(self) -> tuple[LayerRow, ...]:
        """The layers that are shown at once."""
        return self.layers[:MOST_LAYERS]

    @property
    def output_count(self) -> int:
        """Number of outputs of all layers."""
        return sum(len(layer.outputs) for layer in self.layers)


def render_tune(result: Mapping[str, Any], best: str = "best.yaml") -> str:
    """Render the whole page.

    Args:
        result: The content of `tune.json`; missing parts are omitted or shown as unknown.
        best: Path of the best config, for the command.
    """
    stages = tune_tables.stages(result)
    attempts = tune_tables.attempt_rows(result)
    phases = tune_tables.phases_before_after(result)
    proofs = _proofs(result)
    # Known outcomes come first, in their order; accepted ones are shown above.
    statuses = dict.fromkeys((*tune_tables.STATUSES, *(item.status for item in attempts)))
    del statuses["accepted"]
    return load_template("tune.html.j2").render(
        title=tune_tables.name_of(result),
        headline=tune_tables.headline(result),
        search=tune_tables.spent(result),
        figures=_figures(result),
        changed=len(stages) > 1,
        command=tune_tables.command_of(result, best),
        waterfall=charts_tune.waterfall_chart(stages),
        changes=tune_tables.change_rows(result),
        trade_offs=tune_tables.trade_off_rows(result),
        proofs=proofs[:MOST_CURVES],
        hidden_proofs=max(0, len(proofs) - MOST_CURVES),
        phase_bars=charts_tune.phase_bars(phases),
        phases=[_phase_row(row) for row in phases],
        groups=[
            (status, _TITLES.get(status, status), [item for item in attempts if item.status == status])
            for status in statuses
            if any(item.status == status for item in attempts)
        ],
    )


def _figures(result: Mapping[str, Any]) -> list[tables.Figure]:
    whole = tune_tables.gain_of(result.get("speedup"))
    changed = bool(tune_tables.accepted_of(result))
    before, after = result.get("baseline"), result.get("final")
    speeds = tune_tables.samples_per_s(result)
    run_s = [tune_tables.figure(result.get(name)) for name in ("run_s_before", "run_s_after")]
    found = [
        tables.Figure("speedup", tables.UNKNOWN if whole is None else tune_tables.times(whole)),
        tables.Figure("95% interval", "" if whole is None else tune_tables.ends(whole)),
        tables.Figure("samples/s before", speeds[0]),
        tables.Figure("samples/s after", speeds[1]),
        tables.Figure("whole run before", tables.seconds(run_s[0])),
        tables.Figure("whole run after", tables.seconds(run_s[1])),
        tables.Figure("start-up before", tables.seconds(tune_tables.setup_s(before))),
        tables.Figure("start-up after", tables.seconds(tune_tables.setup_s(after))),
        tables.Figure("pays after", tune_tables.break_even(result) or ""),
        tables.Figure("peak memory, before and after", tune_tables.peak_memory(result) or ""),
        tables.Figure("changes kept", str(len(tune_tables.accepted_of(result)))),
    ]
    if not changed:
        found = [item for item in found if not item.label.endswith("after") and item.label not in _OF_A_CHANGE]
    return [item for item in found if item.value not in ("", tables.UNKNOWN)]


_OF_A_CHANGE = ("speedup", "95% interval")


def _phase_row(row: tune_tables.PhaseBeforeAfter) -> tuple[str, str, str, str, str]:
    difference = ""
    if row.before_s is not None and row.after_s is not None:
        change_s = row.after_s - row.before_s
        difference = ("+" if change_s > 0 else "") + tables.seconds(change_s)
    before, after = ("" if value is None else tables.seconds(value) for value in (row.before_s, row.after_s))
    return charts.phase_class(row.name), row.label, before, after, difference


def _proofs(result: Mapping[str, Any]) -> list[ProofView]:
    """The final proof first, then those of accepted changes, then the others."""
    singles = tune_tables.proofs_of(result)
    singles.sort(key=lambda pair: pair[1].get("verdict") != "accepted")
    whole = tune_tables.mapping(result.get("total"))
    named = [("all changes together", whole)] if whole else []
    return [_proof_view(label, proof) for label, proof in (*named, *singles)]


def _proof_view(label: str, proof: Mapping[str, Any]) -> ProofView:
    checks = []
    for item in tune_tables.sequence(proof.get("checks")):
        given = tune_tables.mapping(item)
        passed = given.get("passed")
        sign, css_class = _SIGNS[passed] if isinstance(passed, bool) else ("?", "unknown")
        checks.append((sign, css_class, tables.plain(given.get("name") or ""), tables.plain(given.get("detail") or "")))
    compared, layers = compared_text(proof), layer_rows(proof)
    # The curves of a comparison from the same states are two independent trainings, which prove nothing.
    free = compared or layers
    chart = Markup("") if free else charts_tune.losses_chart(proof, f"Loss before and after: {label}")
    band = [tune_tables.figure(value) for value in tune_tables.sequence(proof.get("allowed_drift"))]
    return ProofView(
        label,
        tables.plain(proof.get("verdict") or tables.UNKNOWN),
        change_text(proof),
        compared,
        tuple(layers),
        chart,
        bool(chart) and any(value is not None and math.isfinite(value) for value in band),
        tuple(checks),
        tuple(_seed_rows(tune_tables.mapping(proof.get("quality")))),
    )


def _seed_rows(quality: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Validation at the end of each quality check: a number, loss before and after, accuracy before and after."""
    sides = [[tune_tables.mapping(end) for end in tune_tables.sequence(quality.get(name))] for name in _SIDES]
    rows = []
    for number, ends in enumerate(zip(*sides), 1):
        losses = [tables.number(tune_tables.figure(end.get("loss"))) for end in ends]
        shares = [tune_tables.figure(end.get("accuracy")) for end in ends]
        before, after = ("" if share is None else tables.share(share) for share in shares)
        rows.append((str(number), losses[0], losses[1], before, after))
    return rows


_SIDES = ("baseline", "candidate")
