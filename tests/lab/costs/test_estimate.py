"""Estimates of models by name, and ``python -m zerocast estimate``, which prints them."""

import json
import re
from pathlib import Path

import pytest
import torch

import zerocast
from zerocast.cast.amax_buffers import STEP_WORDS
from zerocast.cli import main
from zerocast.errors import InputError
from zerocast.lab import costs
from zerocast.lab.costs.models import Llama

PAGE = Path(__file__).parents[3] / "docs" / "costs.md"
SMALL = Llama(256, 2, 512, kv_heads=1, vocabulary=384)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model of two layers."""
    monkeypatch.setitem(costs.MODELS, "small", SMALL)
    return "small"


def test_the_page_of_the_docs_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/costs.md prints the estimate of the 405B model on 1,024 ranks, to the letter."""
    found = re.search(
        r"<!-- python -m zerocast (.+) -->\n```\n(.+)\n```\n<!-- end -->", PAGE.read_text(), re.S
    )
    assert found
    assert main(found[1].split()) == 0
    assert capsys.readouterr().out.strip() == found[2]


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
        ("deepseek-671b", 671_026_404_352),
    ],
)
def test_named_models_have_the_published_sizes(name: str, elements: int) -> None:
    """All parameters of each, as its model card counts them; and none has memory."""
    weights = list(costs.model_of(name).parameters())
    assert sum(map(torch.Tensor.numel, weights)) == elements
    assert all(weight.is_meta and weight.dtype == torch.bfloat16 for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "deepseek"])
def test_a_config_json_gives_the_same_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names and shapes of a named model are those that transformers gives the configuration of
    its sizes; and of a dense one, what tensor parallelism leaves of them.
    """
    deepseek = costs.models.DeepSeek(layers=4)
    monkeypatch.setitem(costs.MODELS, "small", SMALL)
    monkeypatch.setitem(costs.MODELS, "deepseek", deepseek)
    config = {
        "small": {
            "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
            "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1,
            "vocab_size": 384,
        },
        "deepseek": {"model_type": "deepseek_v3", "num_hidden_layers": 4},
    }[name]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = [costs.model_of(each) for each in (name, tmp_path)]
    for tp in (1, 2) if name == "small" else (1,):
        comm = costs.one_of_many.OneOfMany(0, tp, "cuda")
        ours, theirs = (
            {n: tuple(weight.shape) for n, weight in costs.params_of(model, comm)}
            for model in models
        )
        assert ours == theirs


def test_what_the_command_prints(small: str, capsys) -> None:
    """JSON for two numbers of ranks: NVFP4 sends fewer bytes for weights than FP8, and FP8 than
    BF16, which makes no cast.
    """
    assert main(["estimate", small, "--dp", "2,8", "--tp", "2", "--json"]) == 0
    for dp, estimates in zip((2, 8), json.loads(capsys.readouterr().out), strict=True):
        assert [each["dp"] for each in estimates.values()] == [dp] * 3
        gathered = [
            sum(t["sent_bytes"] for t in each["traffic"] if t["what"] in ("codes", "plain weights"))
            for each in (estimates["nvfp4"], estimates["FP8"], estimates["BF16"])
        ]
        assert gathered == sorted(gathered)
        assert estimates["nvfp4"]["launches"]
        assert not estimates["BF16"]["launches"]
        assert estimates["nvfp4"]["tp_traffic"]


def test_an_exchange_of_all_amaxes_sends_more(small: str) -> None:
    """The full exchange reduces an int32 a block, two of the step, and gathers no scales."""
    full, boundary = (
        costs.estimate_model(small, "nvfp4", 4, options=costs.StepOptions(exchange=exchange))
        for exchange in ("full", "boundary")
    )
    assert "scales" in boundary.sent_bytes
    assert "scales" not in full.sent_bytes
    blocks = sum(
        weight.quantized_storage.amax_slots
        for _, weight in _quantized(small)
        if isinstance(weight, zerocast.QuantizedTensor)
    )
    assert full.traffic["amaxes", "all_reduce"].payload_bytes == 4 * (blocks + STEP_WORDS)


def _quantized(name: str) -> costs.models.Params:
    model = costs.model_of(name)
    costs.quantize_model(model, "nvfp4")
    return costs.params_of(model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "a model must be one of llama-8b"),
        (["small", "--dp", "0"], "dp must be an integer from 1"),
        (["small", "--dp", "2", "--rank", "2"], "rank must be an integer from 0 to 1"),
        (["small", "--tp", "3"], "must begin and end between blocks"),
        (["small", "--filter", "nothing"], "nothing"),
        (["small", "--bucket-size", "0", "--dp", "2"], "bucket_size must be a positive number"),
        (["small", "--backward-passes", "0"], "backward_passes must be an integer from 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, small: str, capsys) -> None:
    """Each is refused in words, with exit code 2."""
    assert main(["estimate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_options_and_the_model_stand_in_any_order(small: str, capsys) -> None:
    """The model first, last, or between options of several values; and an option's value that is no
    number is told.
    """
    printed = []
    for arguments in (
        [small, "--dp", "2,8", "--filter", "lm_head,q_proj"],
        ["--dp", "2,8", "--filter", "lm_head,q_proj", small],
        ["--filter", "lm_head,q_proj", small, "--dp", "2,8"],
    ):
        assert main(["estimate", *arguments]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].count("data-parallel ranks") == 2
    assert printed == printed[:1] * 3
    with pytest.raises(SystemExit):
        main(["estimate", "--dp", small, small])
    assert f"--dp: must be numbers such as 8,64, got {small!r}" in capsys.readouterr().err


def test_weights_with_memory_are_refused() -> None:
    """An estimate never touches a model that is there."""
    with pytest.raises(InputError, match="weights on the meta device"):
        costs.estimate([("w", torch.zeros(4, 4))], dp=2)
    with pytest.raises(InputError, match="at least one weight"):
        costs.estimate([], dp=2)
