"""How `auto` chooses: with a clock of our own, and methods that take as long as we say."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from frameworm.parallel.compression.auto import (
    RECHECK_STEPS,
    MethodChoice,
    Outlook,
    choose_method,
    choose_racers,
)

STEPS = 200


class World:
    """Steps that take as long as their method takes."""

    def __init__(self, step_s: dict[str, float], sending_s: dict[str, float], hidden_s: float = 0.0) -> None:
        self.now = 0.0
        self.method = "off"
        self.step_s = step_s
        self.used: list[str] = []
        self.looks = 0
        self._outlook = Outlook(sending_s, hidden_s, 1.0, 50.0)

    def use(self, method: str) -> None:
        self.method = method

    def look(self) -> Outlook:
        self.looks += 1
        self.now += 3.0  # probing is no part of a step
        return self._outlook

    def choice(
        self, agree: Callable[[list[float]], list[float]] = lambda seconds: seconds, approximate: bool = True
    ) -> MethodChoice:
        return MethodChoice(
            self,
            torch.device("cpu"),
            self.look,
            allow_approximate=approximate,
            agree=agree,
            clock=lambda: self.now,
        )

    def run(self, choice: MethodChoice, steps: int = STEPS) -> None:
        for step in range(steps):
            self.used.append(self.method)
            self.now += self.step_s[self.method] + (0.5 if step % 20 == 19 else 0.0)  # a validation now and then
            choice.after_step()


SLOW_LINK = {"off": 3.7, "bf16": 1.9, "int8": 0.97, "int4": 0.5, "topk": 0.12, "powersgd": 0.1}


def test_a_slow_link_takes_what_sends_least() -> None:
    world = World({name: 0.065 + seconds for name, seconds in SLOW_LINK.items()}, SLOW_LINK)
    choice = world.choice()
    world.run(choice)
    assert choice.chosen == world.method == "powersgd"
    assert world.looks == 1
    assert world.used.count("off") < 10  # hopeless: not raced again
    assert world.used[-100:] == ["powersgd"] * 100
    assert choice.candidates()[0].method == "powersgd"
    assert choice.candidates()[0].measured_s == pytest.approx(0.165)
    assert {item.method for item in choice.candidates()} == set(SLOW_LINK)


def test_without_leave_auto_only_rounds() -> None:
    world = World({name: 0.065 + seconds for name, seconds in SLOW_LINK.items()}, SLOW_LINK)
    choice = world.choice(approximate=False)
    world.run(choice)
    assert choice.chosen == "int4"
    assert set(world.used) == {"off", "bf16", "int8", "int4"}


def test_a_fast_link_stays_plain() -> None:
    sending = {"off": 0.01, "bf16": 0.008, "int8": 0.03, "int4": 0.04, "topk": 0.05, "powersgd": 0.06}
    world = World({name: 0.065 + seconds for name, seconds in sending.items()} | {"off": 0.0735}, sending)
    choice = world.choice()
    world.run(choice)
    assert choice.chosen == world.method == "off"


def test_a_gain_within_noise_is_not_taken() -> None:
    assert choose_method({"off": 1.0, "bf16": 0.97}) == "off"
    assert choose_method({"off": 1.0, "bf16": 0.95}) == "bf16"
    assert choose_method({"off": 1.0, "bf16": 0.95, "int4": 0.94}) == "int4"
    assert choose_method({"bf16": 0.97}) == "bf16"


def test_noise_does_not_pass_for_a_gain() -> None:
    """Steps that vary by 30% whoever sends them: plain nearly always stays."""
    sending = {"off": 0.1, "bf16": 0.05, "int8": 0.08}
    draw = random.Random(0)
    taken = []
    for _ in range(40):
        world = World(dict.fromkeys(sending, 0.2), sending)
        choice = world.choice()
        for _ in range(60):
            world.now += draw.uniform(0.17, 0.23)
            choice.after_step()
        taken.append(choice.chosen)
    assert taken.count("off") >= 30


def test_the_race_corrects_a_wrong_outlook() -> None:
    sending = {"off": 0.4, "bf16": 0.2, "int8": 0.1, "int4": 0.05, "topk": 0.5, "powersgd": 0.6}
    world = World({"off": 0.46, "bf16": 0.25, "int8": 0.3, "int4": 0.35, "topk": 1.0, "powersgd": 1.0}, sending)
    choice = world.choice()
    world.run(choice)
    assert choice.chosen == "bf16"
    assert "topk" not in world.used


def test_hidden_sending_counts_nothing() -> None:
    expected = Outlook({"off": 0.4, "bf16": 0.2, "int4": 0.1}, hidden_s=0.25).expect(off_s=1.0)
    assert expected == pytest.approx({"off": 1.0, "bf16": 0.85, "int4": 0.85})
    assert choose_racers(expected) == ["bf16", "int4"]


def test_what_became_slower_is_given_up() -> None:
    sending = {"off": 0.2, "bf16": 0.1, "int8": 0.15}
    world = World({"off": 0.3, "bf16": 0.2, "int8": 0.25}, sending)
    choice = world.choice()
    world.run(choice)
    assert choice.chosen == "bf16"
    world.step_s["bf16"] = 0.6
    world.run(choice, RECHECK_STEPS)
    assert choice.chosen == "int8"


def test_all_ranks_go_by_the_slowest() -> None:
    """This rank sees the plain step as the faster one; another rank does not."""
    sending = {"off": 0.2, "bf16": 0.1}
    world = World({"off": 0.2, "bf16": 0.21}, sending)
    other = {0.2: 0.5}
    choice = world.choice(agree=lambda seconds: [max(item, other.get(round(item, 6), 0.0)) for item in seconds])
    world.run(choice)
    assert choice.chosen == "bf16"


def test_a_resumed_run_does_not_race() -> None:
    world = World({"off": 1.0, "int4": 0.5}, {"off": 0.5, "int4": 0.1})
    choice = world.choice()
    assert choice.adopt("int4")
    world.use("int4")
    world.run(choice)
    assert set(world.used) == {"int4"}
    assert world.looks == 0
    assert not world.choice().adopt("nonsense")
