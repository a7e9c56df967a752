"""What a linear layer of a stored checkpoint is: weights that only look like one stay in high
precision.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zerocast.export import stored_model
from zerocast.export.checkpoint_conversion import CheckpointConversion
from zerocast.export.chosen_weights import LEFT_BY_ALL

INSIDE = ("text_config", "vision_config", "audio_config", "encoder", "decoder")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


def _stored(folder: Path, model_type: str, **shapes: tuple[int, ...]) -> CheckpointConversion:
    """A conversion of a checkpoint of ones; of a name ``__`` stands for a point."""
    folder.mkdir()
    held = {n.replace("__", "."): torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    save_file(held, folder / "model.safetensors")
    inside = {"architectures": ["Model"], "decoder": {"model_type": model_type}}
    (folder / "config.json").write_text(json.dumps(inside | {"dtype": "bfloat16"}))
    return CheckpointConversion(folder, folder.parent / "t", "compressed-tensors/nvfp4")


def _cast(made: CheckpointConversion) -> set[str]:
    """The names of the weights that are cast."""
    return {each.name for each in made.entries if each.recipe is not None}


def test_what_looks_like_a_linear_layer_is_left(tmp_path):
    """GPT-2's matrices [in, out], by the type of a model inside, with the reason; embeddings by
    their names; layers with such names are named for the server.
    """
    conv1d = {f"h__0__{n}__weight": (64, 64) for n in ("attn__c_attn", "mlp__c_fc", "mlp__c_proj")}
    made = _stored(tmp_path / "gpt2", "gpt2", **conv1d, linear__weight=(64, 64))
    assert _cast(made) == {"linear.weight"}
    reason = "a Conv1D, stored [in, out], for which no dialect has a place"
    assert made.left == dict.fromkeys((n.replace("__", ".") for n in conv1d), reason)
    assert "h.0.attn.c_attn" in str(made._export.config.section())
    made = _stored(tmp_path / "bigcode", "gpt_bigcode", **conv1d)
    assert len(_cast(made)) == 3
    tables = {
        f"{name}__weight": (64, 64)
        for name in ("shared", "block__0__relative_attention_bias", "point_embeddings__0",
                     "patch_embedding", "decoder__segment_emb")
    }  # fmt: skip
    made = _stored(tmp_path / "t5", "t5", **tables, linear__weight=(64, 64))
    assert _cast(made) == {"linear.weight"}
    assert "patch_embedding" in str(made._export.config.section())
    assert "shared" not in str(made._export.config.section())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_every_model_of_transformers_has_its_linear_layers_alone_cast():
    """Of each type that its default configuration makes, no module of another class, by the names
    that modules have, which files may change; I-BERT's own layers are stored as linear ones are.
    """
    transformers = pytest.importorskip("transformers", minversion="5")
    wrong, tried = {}, 0
    for kind in transformers.CONFIG_MAPPING:
        model = _on_meta(transformers, kind)
        if model is None:
            continue
        tried += 1
        types = stored_model._model_types(model.config.to_dict())
        conv1d = not types.isdisjoint(stored_model.CONV1D_MODELS)
        for name, module in model.named_modules():
            last, weight = name.rpartition(".")[2], module._parameters.get("weight")
            if weight is None or weight.dim() != 2 or isinstance(module, torch.nn.Linear):
                continue
            left = last in LEFT_BY_ALL or (conv1d and last in stored_model.CONV1D)
            if not left and not stored_model.is_embedding(name):
                wrong.setdefault(kind, []).append(f"{name}, a {type(module).__name__}")
    assert tried > 400
    assert wrong.keys() == {"ibert"}, wrong


def _on_meta(transformers: Any, kind: str) -> Any:
    """A model of this type on the meta device, of two layers where it has such a number."""
    try:
        config = transformers.CONFIG_MAPPING[kind]()
        for inner in (config, *filter(None, (getattr(config, n, None) for n in INSIDE))):
            for name in LAYERS:
                if isinstance(getattr(inner, name, None), int):
                    setattr(inner, name, min(2, getattr(inner, name)))
    except Exception:
        return None
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        with contextlib.suppress(Exception), torch.device("meta"):
            return getattr(transformers, auto).from_config(config)
    return None
