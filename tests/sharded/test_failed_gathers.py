"""A gather under FSDP2 that failed: masters are what they were, and a forward that all ranks repeat
uses the codes of whole casts, or is an error again.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

import zerocast
from tests.sharded.sharded import assert_unsharded_casts, bank, batch, reshard, whole_masters
from tests.support.claims import assert_same_tensors
from tests.support.ranks import on_gloo
from zerocast.comm import Communicator
from zerocast.sharded import all_gather, master_weight, verify_gathers


def planted(*_: object, **__: object) -> None:
    """What fails on one rank."""
    raise OSError("planted")


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the cast": lambda p: p.setattr(master_weight, "codes_to_send", planted),
    "before the codes are stored": lambda p: p.setattr(
        all_gather.LowBitAllGather, "gathered_weight", planted
    ),
    "half stored": lambda p: p.setattr(all_gather, "rebuild_derived", planted),
}


@on_gloo(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_failed_on_every_rank_is_repeated(comm: Communicator, fault: str) -> None:
    """After an error in the hooks of a weight, masters are what they were, and codes those of one
    cast of them.
    """
    model = bank(rows=(37,))
    before = whole_masters(model)
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.raises(OSError, match="planted"):
            model(batch(comm))
    reshard(model)
    assert_same_tensors(whole_masters(model), before)
    model(batch(comm)).backward()
    reshard(model)
    assert_unsharded_casts(model)


@on_gloo(2)
@pytest.mark.parametrize("fault", ["before the codes are stored", "half stored"])
def test_masters_of_a_step_that_failed_on_one_rank_are_whole(
    comm: Communicator, fault: str
) -> None:
    """On both, whatever the other rank has gathered meanwhile."""
    model = bank(rows=(37,))
    before = whole_masters(model)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            FAULTS[fault](patch)
            with pytest.raises(OSError, match="planted"):
                model(batch(comm))
        else:
            model(batch(comm))
    assert_same_tensors(whole_masters(model), before)


@on_gloo(2)
def test_a_weight_that_was_refused_is_compared_again(comm: Communicator, tmp_path: Path) -> None:
    """By the next gather of the same cast, until ranks hold the same."""
    model = bank(rows=(37,))
    verify_gathers(model, "hash")
    rebuild = all_gather.rebuild_derived

    def wrong(weights: list) -> None:
        weights[0].buffers["rowwise_data"][0, 3] ^= 0x10
        rebuild(weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        if comm.rank == 1:
            patch.setattr(all_gather, "rebuild_derived", wrong)
        for _ in range(2):
            with pytest.raises(zerocast.VerificationError, match="rank 1 holds"):
                model(batch(comm))
            reshard(model)
    model(batch(comm)).backward()
    reshard(model)
    assert_unsharded_casts(model)
