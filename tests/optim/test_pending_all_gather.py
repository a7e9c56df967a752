"""Codes that are on their way are waited for by whoever uses them first, whatever the use."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import zerocast
from tests.optim.overlapping import (
    ALL_TOGETHER,
    Model,
    backward,
    optimizer_of,
    pending,
    train,
)
from tests.support.claims import assert_same_tensors, stored
from tests.support.late_gathers import TakesAway
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import through_a_file
from zerocast.comm import SingleRank
from zerocast.optim.pending_all_gather import PendingAllGather


def on_their_way(recipe="nvfp4", **options):
    """A model after a step, its optimizer, and the communicator that holds its codes."""
    comm = TakesAway(SingleRank())
    model = Model(recipe)
    optimizer = optimizer_of(model, comm, **options)
    train(model, optimizer, range(1))
    comm.waits = 0
    return model, optimizer, comm


def without_overlap(recipe="nvfp4"):
    """The model after a step that waited for its gathers."""
    return on_their_way(recipe, overlap_all_gather=False)[0]


def moved(weight):
    """To another buffer."""
    zerocast.replace_raw_data(weight, torch.zeros(weight.rowwise_data.numel(), dtype=torch.uint8))
    return weight.dequantize()


def shared(weight):
    """With child processes."""
    return weight.share_memory_().dequantize()


def without_rowwise(weight):
    """What only rowwise codes are read with is dropped."""
    weight.update_usage(rowwise_usage=False)
    return weight.dequantize()


INPUT = torch.ones(2, 64).bfloat16()

USES = {
    "a function without the module": lambda w: torch.nn.functional.linear(INPUT, w),
    "an operand": lambda w: w + 1,
    "a view": lambda w: w[3],
    "dequantize": lambda w: w.dequantize(),
    "float": lambda w: w.double(),
    "a list": lambda w: torch.tensor(w.tolist()),
    "numpy": lambda w: torch.tensor(w.float().numpy(force=True)),
    "copied from": lambda w: torch.empty(w.shape).copy_(w),
    "codes": lambda w: w.rowwise_data.clone(),
    "columnwise codes": lambda w: w.columnwise_data.clone(),
    "columnwise scales": lambda w: w.columnwise_scale_inv.clone(),
    "data": lambda w: w.data.dequantize(),
    "clone": lambda w: w.clone().columnwise_data,
    "deepcopy": lambda w: copy.deepcopy(w).columnwise_data,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)).columnwise_data,
    "torch.save": lambda w: through_a_file(w, weights_only=False).columnwise_data,
    "copied into": lambda w: w.copy_(torch.ones(w.shape)).columnwise_data.clone(),
    "copied into another": lambda w: torch.zeros_like(w).copy_(w),
    "replace_raw_data": moved,
    "share_memory_": shared,
    "update_usage": without_rowwise,
}


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_weight_waits_for_its_bucket(use, recipe):
    """The use gives what it gives where nothing is on its way, leaves the weight the same, and
    waits for one bucket.
    """

    def run(overlap):
        model, optimizer, _ = on_their_way(recipe, overlap_all_gather=overlap)
        with torch.no_grad():
            result = USES[use](model.layers[1][1].weight)
        if overlap:
            assert pending(optimizer) == "xx.x"
        return {"result": result} | stored(model)

    assert_same_tensors(run(True), run(False))


@pytest.mark.parametrize("step", ["cast", "all_gather", "post_all_gather_processing"])
def test_another_plan_waits(step):
    """One that was made before the codes were sent, and has their addresses."""

    def run(overlap):
        model, optimizer, _ = on_their_way(overlap_all_gather=overlap)
        weight = model.layers[1][1].weight
        plan = zerocast.CastPlan([weight], [torch.ones(weight.numel())], [0], SingleRank())
        train(model, optimizer, range(1))
        getattr(plan, step)()
        if overlap:
            assert pending(optimizer) == "xx.x"
        plan.all_gather()
        return stored(model)

    assert_same_tensors(run(True), run(False))


def test_looking_at_a_weight_waits_for_nothing():
    """Shape, dtype, device, recipe, repr, an alias, a state dict, a gradient: no byte is read."""
    model, optimizer, _ = on_their_way()
    for name, weight in model.state_dict().items():
        assert repr(weight.detach()), name
        assert weight.numel() == weight.shape.numel()
        assert weight.device.type == "cpu"
    model.zero_grad()
    model.requires_grad_(True)
    assert pending(optimizer) == "xxxx"


def test_plain_weights_have_arrived_when_a_step_returns():
    """Nobody sees their use."""
    model, optimizer, _ = on_their_way()
    quantized = {n for n, w in model.named_parameters() if isinstance(w, zerocast.QuantizedTensor)}
    late, plain = (
        {name: weight.detach() for name, weight in each.named_parameters() if name not in quantized}
        for each in (model, without_overlap())
    )
    assert_same_tensors(late, plain)
    assert pending(optimizer) == "xxxx"


def test_a_state_dict_right_after_a_step():
    """It is that of a model without overlap, saved to a file, and so is the evaluation."""
    models = on_their_way()[0], without_overlap()
    late, plain = (through_a_file(m.state_dict()) for m in models)
    assert_same_tensors(stored(late), stored(plain))
    late, plain = on_their_way()[0], without_overlap()
    with torch.inference_mode():
        inputs = torch.ones(2, 32).bfloat16()
        assert_same_bytes(late.eval()(inputs), plain.eval()(inputs), "output")
    assert_same_tensors(stored(late), stored(plain))


def test_a_state_dict_is_loaded_into_weights_on_their_way():
    """The codes that arrive do not overwrite what was loaded."""
    model, optimizer, _ = on_their_way()
    other = Model("nvfp4")
    model.load_state_dict(other.state_dict())
    optimizer.wait_for_all_gather()
    assert_same_tensors(stored(model), stored(other))


@pytest.mark.parametrize("recipe", ["nvfp4", "current"])
def test_a_compiled_forward_waits(recipe):
    """The graph decodes the weights itself, in one piece, and gives the same training; a weight is
    waited for where the graph is entered, the first time and later.
    """
    torch._dynamo.reset()

    def run_steps(compiles):
        model, optimizer, comm = on_their_way(recipe)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        for step in range(3):
            inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            output = run(inputs)
            assert pending(optimizer) == "...."
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return stored(model) | {"waits": torch.tensor(comm.waits)}

    assert_same_tensors(run_steps(True), run_steps(False))


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointed_activations(selective):
    """A forward that is run again in the backward gives the same training, also where torch keeps
    results of operations of the first run: what is computed while waiting is none of them.
    """

    def policy(context, func, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE

    def normalize() -> None:  # as layers do, on as many elements
        torch.nn.functional.layer_norm(torch.zeros(8, 64).bfloat16(), (64,))

    options = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def run(overlap):
        model, comm = Model("nvfp4"), TakesAway(SingleRank())
        comm.before_wait = normalize
        optimizer = optimizer_of(model, comm, overlap_all_gather=overlap)
        train(functools.partial(checkpoint, model, **options), optimizer, range(3))
        return stored(model)

    assert_same_tensors(run(True), run(False))


def test_threads_wait_for_each_other():
    """While one thread waits, another that uses a weight of the bucket waits, too."""
    model, _, comm = on_their_way(bucket_size=ALL_TOGETHER)
    expected = stored(without_overlap())
    entered, go_on, seen = threading.Event(), threading.Event(), {}

    def stay() -> None:
        entered.set()
        assert go_on.wait(60)

    comm.before_wait = stay

    def use(name: str) -> None:
        seen[name] = model.get_parameter(f"{name}.weight").rowwise_data.clone()

    threads = [threading.Thread(target=use, args=(name,)) for name in ("first", "layers.1.1")]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(60)
    for name, codes in seen.items():
        assert_same_bytes(codes, expected[f"{name}.weight.rowwise_data"], name)
    assert comm.waits == 1


@pytest.mark.parametrize("where", ["start", "wait"])
def test_a_gather_that_fails_is_an_error_at_every_use(where, monkeypatch):
    """Of a weight in its bucket, and at the next step: what the transport raised, never bytes that
    have not arrived. Other buckets are used as ever.
    """
    model, optimizer, comm = on_their_way()

    def fail(*_: object) -> None:
        raise OSError("a rank is gone")

    if where == "wait":
        comm.before_wait = fail
        with pytest.raises(OSError, match="a rank is gone"):
            model.first.weight.dequantize()
        comm.before_wait = lambda: None
        model.layers[0][1].weight.dequantize()
    else:
        optimizer.wait_for_all_gather()
        late = [bucket for bucket in optimizer._shards.buckets if bucket.pending]
        codes = {flat.data_ptr() for bucket in late for flat in bucket.flats}
        start = comm.start_all_gather_

        def start_others(buffer: torch.Tensor, counts: Any = None) -> Any:
            return fail() if buffer.data_ptr() in codes else start(buffer, counts)

        monkeypatch.setattr(comm, "start_all_gather_", start_others)
        with pytest.raises(OSError, match="a rank is gone"):
            optimizer.step()
        monkeypatch.undo()
    uses = (model.first.weight.dequantize, lambda: backward(model, 0))
    for use in (*uses, *uses, optimizer.step):
        with pytest.raises(OSError, match="a rank is gone"):
            use()


def test_a_wait_that_was_interrupted_is_taken_up_again():
    """After Ctrl-C in a wait the next use waits, and gives the right bytes."""
    model, optimizer, comm = on_their_way(bucket_size=ALL_TOGETHER)

    def interrupt() -> None:
        raise KeyboardInterrupt

    comm.before_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        model.first.weight.dequantize()
    assert pending(optimizer) == "x"
    comm.before_wait = lambda: None
    assert_same_tensors(stored(model), stored(without_overlap()))


def test_weights_outlive_their_optimizer():
    """Nothing of it is kept, and what it has sent arrives."""
    model, optimizer, _ = on_their_way()
    shards = weakref.ref(optimizer._shards)
    del optimizer
    gc.collect()
    assert shards() is None
    assert_same_tensors(stored(model), stored(without_overlap()))


def test_columnwise_copies_that_move_or_go_between_steps():
    """They are rebuilt where they lie, and not where they lay."""

    def run(overlap):
        model, optimizer, _ = on_their_way(overlap_all_gather=overlap, bucket_size=ALL_TOGETHER)
        train(model, optimizer, range(1))
        moved, without = model.first.weight, model.layers[1][1].weight
        old = moved.columnwise_data
        moved.quantized_storage.replace("columnwise_data", old.clone())
        without.update_usage(columnwise_usage=False)
        old.fill_(0x77)
        train(model, optimizer, range(2))
        assert (old == 0x77).all()
        return stored(model)

    assert_same_tensors(run(True), run(False))


def test_another_optimizer_takes_weights_over():
    """It waits for what the first has sent, and its steps for what it has sent itself."""

    def run(overlap):
        model, first, comm = on_their_way(overlap_all_gather=overlap)
        second = optimizer_of(model, comm, overlap_all_gather=overlap, bucket_size=ALL_TOGETHER)
        del first
        train(model, second, range(2))
        return stored(model)

    assert_same_tensors(run(True), run(False))


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_memory_is_given_back_when_nobody_writes_it_any_more(mode):
    """Weights that go while they are on their way are waited for then, each bucket once; no cycle
    keeps them. So it is where they go while torch traces something else.
    """
    model, optimizer, comm = on_their_way()
    del optimizer
    gc.collect()
    gc.disable()
    try:
        storage = weakref.ref(model.first.weight.quantized_storage)
        with mode():
            del model
        assert storage() is None
        assert comm.waits == 4
    finally:
        gc.enable()


# --- CUDA graphs: what a stream that is being captured may do ---


class StorageOnGpu(SimpleNamespace):
    """As far as the host's part goes."""

    device, derived_names, buffers = torch.device("cuda"), (), {}
    writes = SimpleNamespace(watch=lambda version: None)


@pytest.fixture
def capturing(monkeypatch):
    """Says from then on whether the stream is being captured."""

    def say(captures):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)

    return say


def test_a_use_that_a_graph_captures_is_refused_while_codes_are_on_their_way(capturing):
    """Replays would not wait."""
    storage = StorageOnGpu()
    arrival = PendingAllGather([storage])
    capturing(False)
    arrival.begin([lambda: None])
    capturing(True)
    with pytest.raises(zerocast.UnsupportedError, match=r"optimizer\.wait_for_all_gather\(\)"):
        storage.wait_pending()


def test_weights_that_a_graph_uses_arrive_within_the_step(capturing):
    """From the capture on, for its replays are seen by nobody."""
    storage = StorageOnGpu()
    arrival = PendingAllGather([storage])
    capturing(True)
    storage.wait_pending()
    capturing(False)
    waited = []
    arrival.begin([lambda: waited.append(True)])
    assert waited == [True]
    assert not arrival.under_way


def test_a_captured_step_is_refused(capturing):
    """Before anything is sent."""
    arrival = PendingAllGather([StorageOnGpu()])
    capturing(True)
    begun = []
    with pytest.raises(zerocast.UnsupportedError, match="without overlap_all_gather"):
        arrival.begin(begun.append(True) for _ in range(1))
    assert begun == []
