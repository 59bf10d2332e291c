"""Secrets are masked by their name, their shape and their having been seen; figures and settings stay readable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frameworm.report.checks.secrets import MASK, Masker, is_secret_name


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "db_password", "--hub-token", "apiKey"),
        *("accessToken", "storage.options.secret", "AZURE_STORAGE_ACCOUNT_KEY", "Authorization", "MY_KEY", "token_2"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "session_cookie", "SSH_PASSPHRASE", "authtoken", "SENTRY_DSN"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("tokens_per_s", "tokenizer", "max_tokens", "token_count", "n_heads", "keys", "monkey", "author", "keyboard"),
        *("data.tokenizer", "padding_waste", "compression", "path", "checkpoint.keep", "signal", "tokenizers_parallel"),
    ],
)
def test_names_that_are_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "loading with token=s3cr3tvalue now",
        "--hub-token s3cr3tvalue --epochs 3",
        "--hub-token=s3cr3tvalue --epochs 3",
        "{'password': 's3cr3tvalue', 'epochs': 3}",
        'api_key: "s3cr3tvalue"  # a comment',
        '{"notes": ["said token=s3cr3tvalue"], "epochs": 3}',
        '{"said": "{\\"token\\": \\"s3cr3tvalue\\"}"}',
        "config: model: {path: x, token: s3cr3tvalue}",
        "FOO=bar;TOKEN=s3cr3tvalue",
        'password = "two words s3cr3tvalue"',
        "Authorization: Bearer s3cr3tvalue",
        "curl -H 'X: Basic s3cr3tvalue=='",
        "opening postgres://me:s3cr3tvalue@db.example/runs failed",
        "GET https://bucket.example/x?X-Amz-Signature=s3cr3tvalue&a=1",
        "s3://s3cr3tvalue@bucket/runs",
        "export HF_TOKEN=s3cr3tvalue",
        "hf_s3cr3tvalueAbCdEfGh",
        "-----BEGIN RSA PRIVATE KEY-----\ns3cr3tvalue\n-----END RSA PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1NiJ9.s3cr3tvalue.abc",
    ],
)
def test_secrets_are_masked_by_their_place_or_shape(text: str) -> None:
    masked = Masker({}).text(text)
    assert "s3cr3tvalue" not in masked
    assert MASK in masked


def test_a_hash_that_stands_alone_is_masked() -> None:
    """A key of W&B has no mark but its length."""
    assert Masker({}).text(f"login {'0123456789abcdef' * 2}") == f"login {MASK}"


def test_what_a_maintainer_needs_stays_readable() -> None:
    text = (
        "2026-01-01 12:00:00 step 500 tokens_per_s=34856 loss=0.163\n"
        "config: data.tokenizer: bytes, model.init_from: /data/ag_news_ddp_4gpu_20ep_optimized_fast/model.safetensors\n"
        "torch 2.13.0+cpu at commit 74cee82d1ceb; see https://pytorch.org/docs/stable/index.html\n"
        "frameworm train --config F --set training.epochs=5 --nproc-per-node 4\n"
    )
    assert Masker({"HOME_KEY": "true"}).text(text) == text


def test_values_seen_under_a_secret_name_are_masked_everywhere() -> None:
    masker = Masker({"WANDB_API_KEY": "plainword", "DB": "mysql://me:hunter22@db/x", "LANG": "C.UTF-8"})
    masker.learn_from({"storage": {"credentials": ["innocent word"]}, "name": "quickstart"})
    masker.learn_from_yaml("a:\n  password: |\n    first line\n    second line\n")
    masker.learn_from_yaml("a: [unclosed")
    masked = masker.text("plainword, hunter22, an innocent word, C.UTF-8 quickstart\nfirst line\nsecond line")
    assert masked == f"{MASK}, {MASK}, an {MASK}, C.UTF-8 quickstart\n{MASK}\n{MASK}"


def test_secrets_with_quotes_are_masked_in_json_too() -> None:
    masker = Masker({"MY_TOKEN": 'quo"te\\\N{SNOWMAN}x'})
    for text in (json.dumps({"said": 'quo"te\\\N{SNOWMAN}x'}), 'quo"te\\\N{SNOWMAN}x'):
        assert "te\\" not in masker.text(text)


@pytest.mark.parametrize("value", ["word", 5, 1.5, True, None, 'with "quotes"', "", {"inner": "x"}, ["a", "b"]])
def test_masked_json_is_json(value: Any) -> None:
    text = json.dumps({"password": value, "tokens_per_s": 12.5})
    data = json.loads(Masker({}).text(text))
    assert data["tokens_per_s"] == 12.5
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != "":
        assert data["password"] == MASK


def test_chosen_variables_are_sorted_and_masked() -> None:
    variables = {"NCCL_DEBUG": "INFO", "B_TOKEN": "abcdefgh", "A": "x abcdefgh", "OTHER": "left out"}
    assert Masker(variables).chosen(variables, ["NCCL_DEBUG", "B_TOKEN", "A", "MISSING"]) == {
        "A": f"x {MASK}",
        "B_TOKEN": MASK,
        "NCCL_DEBUG": "INFO",
    }


@pytest.mark.parametrize("piece", ["a", "aA1", "a.b", "a-", "token ", '"', "=[", "://", "a:[" + "'"])
def test_masking_takes_time_in_proportion_to_the_text(piece: str) -> None:
    text = piece * (200_000 // len(piece))  # hours, if each start looked at all that follows
    Masker({}).text(text)
