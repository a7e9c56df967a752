"""An audit compares a server's section with what the section of an export would name."""

import pytest

import zerocast
from tests.support.claims import message_of
from tests.support.experts import moe
from zerocast.errors import InputError
from zerocast.refit import Refit

EXPERTS = [f"model.layers.{i}.mlp.experts" for i in range(2)]
GATES = [f"model.layers.{i}.mlp.gate" for i in range(2)]


def refit(dialect: str, **convert) -> Refit:
    """Of a Qwen-MoE whose attention is in codes."""
    model = moe("qwen-moe").bfloat16()
    zerocast.nn.convert(model, "mxfp8", filter_fqns=["lm_head"], **convert)
    optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters())
    return Refit(model, dialect, optimizer=optimizer, from_masters=True)


@pytest.mark.parametrize(
    "dialect", ["deepseek/fp8", "modelopt/mxfp8", "sglang/mxfp8", "compressed-tensors/mxfp8"]
)
def test_a_server_that_would_build_routers_or_experts_quantized_is_refused(dialect):
    """They travel in BF16, which it would load into codes; what it must name is named."""
    own = refit(dialect)
    section, key = own.export().config.section(), own.export().dialect.unquantized_key
    assert own.audit(section)
    for left_out in (*GATES, *EXPERTS):
        kept = [name for name in section[key] if not name.startswith(left_out)]
        message = message_of(InputError, own.audit, section | {key: kept})
        assert f"the server expects quantized {left_out}" in message
        assert f"name it under {key}" in message


def test_patterns_of_other_exporters_are_read():
    """ModelOpt's for a whole block, and a regular expression of compressed-tensors."""
    for dialect, patterns in (
        ("modelopt/mxfp8", ["lm_head", "model.layers.0.mlp*", "model.layers.1.mlp*"]),
        ("compressed-tensors/mxfp8", ["lm_head", r"re:.*\.mlp\..*"]),
    ):
        own = refit(dialect)
        assert own.audit(own.export().config.section() | {"ignore": patterns})


def test_experts_in_codes_that_a_server_leaves_plain_are_refused():
    """By the name of their module, which stands for each of them but with compressed-tensors."""
    own = refit("deepseek/fp8", include=["model.layers.*.mlp.experts"])
    section = own.export().config.section()
    names = [*section["modules_to_not_convert"], EXPERTS[1]]
    message = message_of(InputError, own.audit, section | {"modules_to_not_convert": names})
    assert f"takes as not quantized {EXPERTS[1]}.0.gate_proj, " in message
