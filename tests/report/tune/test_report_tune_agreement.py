"""How a proof's agreement is shown: the class of the change, what was compared, and every layer's errors."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from test_report_browser import EVIL, POLICY, in_browser, measure, open_page

from frameworm.guard.agreement import Agreement, Draws, OutputErrors, StateErrors
from frameworm.guard.gain import Window
from frameworm.guard.proof import Evidence, Learning, Proof, StepEvidence, prove
from frameworm.report.tune.agreement import layer_rows, relative
from frameworm.report.tune.page import MOST_LAYERS, render_tune
from frameworm.report.tune.text import waterfall

BF16 = 2.0**-8
WINDOWS = [Window(side, time_s) for _ in range(8) for side, time_s in (("before", 1.0), ("after", 0.8))]
JUNK: tuple[Any, ...] = (None, "word", 3, -1.5, float("nan"), float("inf"), [], {}, [None], True, "gradient of ")


def output(name: str, error: float, explained: float, shift: float = 0.0, size: float = 1.0) -> OutputErrors:
    return OutputErrors(name, 1000, size, 0.1 * explained, explained, 0.0, error, shift)


# In the order of a model. The head is closest to its limit, and the first layer has the smallest error.
OUTPUTS = [
    output("gradient of scale", 0.012, 0.013),
    *(output(f"gradient of layers.{layer}.linear.weight", 0.001 + 0.001 * layer, 0.01) for layer in range(9)),
    output("gradient of layers.8.linear.bias", 0.002, 0.02),
    output("change of norm.running_mean", 3e-5, 4e-5),
    output("gradient of head.weight", 0.018, 0.012, shift=0.0002),
    output("gradient of before_norm.bias", 0.9, 1.0, size=1e-20),
    output("loss", 0.0001, 0.0004),
]


def proof_of(
    outputs: list[OutputErrors],
    *,
    states: int = 8,
    wobble: float = 0.0005,
    **more: Any,
) -> dict[str, Any]:
    """A proof as `tune.json` holds it; shifts differ from state to state by a little."""
    draw = random.Random(0)
    compared = [
        StateErrors(step, [item._replace(shift=item.shift + draw.uniform(-wobble, wobble)) for item in outputs])
        for step in range(states)
    ]
    given = {"reference": "fp64", "unit": BF16, "changes_precision": True, **more}
    learning = Learning([StepEvidence(1.0 / (step + 1), step, 100) for step in range(states)])
    proof = prove(WINDOWS, Evidence(learning, learning, Agreement(compared, **given)))
    found: dict[str, Any] = json.loads(json.dumps(proof.to_json()))
    return found


def searched(proof: dict[str, Any], label: str = "gpu.mixed_precision=bf16") -> dict[str, Any]:
    """A search whose only change has this proof."""
    change = {"knob": "precision", "changes": {"gpu.mixed_precision": "bf16"}}
    accepted = {**change, "speedup": proof["speedup"], "mathematics": "rounding"}
    return {
        "name": "a",
        "attempts": [{**change, "label": label, "status": proof["verdict"], "reason": "", "proof": proof}],
        "accepted": [accepted] if proof["verdict"] == "accepted" else [],
        "changes": {"gpu.mixed_precision": {"before": "off", "after": "bf16"}},
        "speedup": proof["speedup"],
    }


def rows_of(page: str) -> list[list[str]]:
    """The cells of every table row, without markup."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in rows]


def test_layers_are_listed_worst_first_beside_what_rounding_explains() -> None:
    rows = rows_of(render_tune(searched(proof_of(OUTPUTS))))
    head = next(number for number, row in enumerate(rows) if row and row[0] == "head")
    layer, name, error, explained, limit, _, bias = rows[head]
    assert (layer, name, error, explained) == ("head", "gradient of weight", "1.8%", "1.2%")
    assert 2 * 1.2 < float(limit.rstrip("%")) < 5
    assert re.fullmatch(r"\+0\.0[0-4]% ± 0\.0[1-9]%", bias)
    visible = [row[0] for row in rows[head : head + MOST_LAYERS]]
    assert visible[:4] == ["head", "1 output below its rounding noise", "(top level)", "layers.8.linear"]
    # Everything again in the folded table, with a layer's further outputs under its name.
    places = [number for number, row in enumerate(rows) if row and row[0] == "layers.8.linear"]
    assert [row[1] for row in rows[places[-1] : places[-1] + 2]] == ["gradient of weight", "gradient of bias"]
    assert rows[places[-1] + 1][0] == ""
    assert [row for row in rows if row and row[:2] == ["norm", "buffer running_mean"]]
    assert [row for row in rows if row and row[0] == "loss"]
    assert f"All {len(OUTPUTS)} outputs of 14 layers" in render_tune(searched(proof_of(OUTPUTS)))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {},
            ["precision: should compute the same, in another precision", "the same step in fp64", "bf16, which rounds"],
        ),
        ({"changes_precision": False}, ["rounding: should compute the same in the same precision"]),
        ({"unit": 2.0**-24, "reference": "fp32"}, ["the same step in fp32, eager", "precision fp32, which rounds"]),
        ({"unit": 2.0**-11}, ["coarsest precision TF32 or fp16, which rounds by up to 0.049%"]),
        ({"draws": Draws(24, (1.0, 0.1, 0.5), (1.0, 0.1, 0.5))}, ["24 steps of each side with dropout and other"]),
        ({"updates": {"a": 0.25, "b": 0.1}}, ["updates of 2 parameters", "errors at most 0.25 times what rounding"]),
        ({"repeats": 0.002}, ["not deterministic: repeats differ by 0.2%"]),
    ],
)
def test_what_was_compared_is_told(more: dict[str, Any], told: list[str]) -> None:
    result = searched(proof_of(OUTPUTS, **more))
    page, text = " ".join(render_tune(result).split()), " ".join(waterfall(result, width=400).split())
    for words in ("8 states with the same samples; dropout off", *told):
        assert words in page
        assert words in text
    for words, key in (("random draws as in", "draws"), ("plain optimizer, errors", "updates"), ("repeats", "repeats")):
        assert (words in text) == (key in more)


def test_another_precision_is_not_called_rounding_only() -> None:
    page, same = (render_tune(searched(proof_of(OUTPUTS, changes_precision=other))) for other in (True, False))
    assert "<td>another precision</td>" in page
    assert "<td>rounding only</td>" in same


def test_what_speaks_against_a_change_stands_out() -> None:
    wrong = [
        *OUTPUTS,
        output("gradient of broken.weight", 0.3, 0.01),
        output("gradient of long.weight", 0.01, 0.01, 0.02),
    ]
    proof = proof_of(wrong)
    assert proof["verdict"] == "rejected"
    first, second, *others = layer_rows(proof)
    problems = {item.layer: item.worst.problem for item in (first, second)}
    assert set(problems) == {"broken", "long"}
    assert problems["broken"].endswith("times what rounding explains")
    assert problems["long"].endswith("too long on average")
    assert not [row for item in others for row in item.outputs if row.problem]
    page = render_tune(searched(proof))
    assert '<td class="missed">30%</td>' in page
    assert '<td class="missed">1.8%</td>' not in page
    # A bias is told from an error: the gradient that is too long has no more error than rounding explains.
    assert re.search(r'<td>1%</td>.*<td class="missed">\+[12]\.\d\d% ± 0\.0\d%</td>', page)


def test_outputs_below_their_noise_are_multiples_of_it() -> None:
    row = next(item for item in layer_rows(proof_of(OUTPUTS)) if "below" in item.layer).worst
    assert (row.error, row.explained, row.bias) == ("0.9x rounding", "", "not judged")
    assert row.used == pytest.approx(0.9 * row.expected)


def test_outputs_that_are_not_finite_say_so() -> None:
    proof = proof_of(OUTPUTS)
    proof["outputs"][0][1] = proof["outputs"][0][3] = None  # as the tuner stores what is not finite
    first = layer_rows(proof)[0].worst
    assert first.error == "not finite"
    assert first.problem.endswith("is not finite")
    assert 'class="missed">not finite' in render_tune(searched(proof))


def test_the_terminal_shows_the_worst_layers_and_where_the_others_are() -> None:
    lines = waterfall(searched(proof_of(OUTPUTS))).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.split() == ["layer", "error", "rounding", "bias"])
    assert lines[begin + 1].split()[:3] == ["head", "1.8%", "1.2%"]
    assert "the 10 others are in report.html" in " ".join(" ".join(lines).split())
    few = " ".join(waterfall(searched(proof_of(OUTPUTS[-3:]))).split())
    assert "others are in" not in few


@pytest.mark.parametrize("width", [50, 80, 120])
def test_lines_fit(width: int) -> None:
    named = [item._replace(name=item.name.replace("layers", "model.encoder.very_long_name.layers")) for item in OUTPUTS]
    text = waterfall(searched(proof_of(named)), width=width)
    assert max(len(line) for line in text.splitlines()) <= width


def test_a_comparison_from_the_same_states_shows_no_loss_curves() -> None:
    proof = proof_of(OUTPUTS)
    assert proof["losses_before"]
    assert "Loss before and after" not in render_tune(searched(proof))


def test_an_approximation_says_what_decides() -> None:
    learning = Learning([StepEvidence(1.0 / (step + 1), step, 100) for step in range(8)], frozenset("a"))
    proof = prove(WINDOWS, Evidence(learning, learning), numerics_effect="more", consent=True).to_json()
    page, text = render_tune(searched(proof)), " ".join(waterfall(searched(proof)).split())
    for shown in (page, text):
        assert "approximation: computes other gradients, so a quality check decides" in shown
        assert "dropout off" not in shown
    assert "rounding explains</th>" not in page
    assert "Loss before and after" in page


def older() -> dict[str, Any]:
    """A proof as it was stored when loss curves were compared."""
    proof = proof_of(OUTPUTS)
    for name in ("outputs", "change", "compared"):
        del proof[name]
    losses = [2.0 - 0.1 * step for step in range(10)]
    checks = [
        {"name": "gain", "passed": True, "detail": "1.25 x"},
        {"name": "loss", "passed": True, "detail": "agrees in 10 steps"},
    ]
    return {**proof, "losses_before": losses, "losses_after": losses, "allowed_drift": [0.01] * 10, "checks": checks}


def test_files_of_older_versions_show_their_curves() -> None:
    page = render_tune(searched(older()))
    assert page.count("<polyline") == 4
    assert "what rounding explains</span>" in page
    assert "loss</span>: agrees in 10 steps" in page
    assert "Compared:" not in page
    assert "loss: agrees in 10 steps" in waterfall(searched(older()))
    proof = Proof.from_json(older())
    assert (proof.outputs, proof.change, proof.compared) == ([], None, None)


def test_a_proof_is_read_back_as_it_was() -> None:
    stored = proof_of(OUTPUTS, draws=Draws(24, (1.0, 0.1, 0.5), (1.0, 0.1, 0.5)))
    proof = Proof.from_json(stored)
    assert proof.compared is not None
    assert (proof.compared.states, proof.compared.draws) == (8, 24)
    assert json.loads(json.dumps(proof.to_json())) == stored


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.34e-7, "2.3e-07"),
        (0.00049, "0.049%"),
        (0.0134, "1.3%"),
        (0.5, "50%"),
        (2.0, "200%"),
        (3.2e5, "3.2e+05 times"),
        (float("nan"), "not finite"),
    ],
)
def test_relative_errors_are_written_as_people_do(value: float, text: str) -> None:
    assert relative(value) == text


@pytest.mark.slow
def test_missing_and_wrong_values_never_stop_a_report() -> None:
    draw = random.Random(0)
    for _ in range(300):
        proof = proof_of(OUTPUTS, states=4)
        for _ in range(4):
            row = draw.choice(proof["outputs"])
            if isinstance(row, list) and row:
                row[draw.randrange(len(row))] = draw.choice(JUNK)
            proof["compared"][draw.choice(list(proof["compared"]))] = draw.choice(JUNK)
            proof["outputs"][draw.randrange(len(proof["outputs"]))] = draw.choice([*JUNK, row])
        proof[draw.choice(["change", "outputs", "compared", "checks"])] = draw.choice(JUNK)
        result = searched(proof)
        assert "</html>" in render_tune(result)
        assert waterfall(result)


@in_browser
def test_nothing_is_cut_off_however_long_a_layer_is_called(tmp_path: Path) -> None:
    named = [
        item._replace(name=item.name.replace("layers", "model.encoder." + "very_long_name" * 6)) for item in OUTPUTS
    ]
    pages = [
        render_tune(searched(proof_of(outputs))).replace("<details>", "<details open>") for outputs in (OUTPUTS, named)
    ]
    for data in measure(tmp_path, *((page, width) for page in pages for width in (1200, 360))):
        assert data["page"] <= data["width"]
        assert data["cut"] == []


@in_browser
def test_no_name_of_a_layer_can_run(tmp_path: Path) -> None:
    named = [item._replace(name=f"gradient of {EVIL}.{EVIL}") for item in OUTPUTS[:2]]
    proof = {**proof_of(named), "change": EVIL}
    proof["compared"]["reference"] = EVIL
    opened = open_page(POLICY.sub("", render_tune(searched(proof))), tmp_path)
    assert opened.console == []
    assert "<script" not in opened.dom
    assert "<img" not in opened.dom
