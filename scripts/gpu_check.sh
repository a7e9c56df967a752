#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under ten minutes: builds, runs the tests marked cuda, runs a part of them
# under compute-sanitizer, then the benchmark. Leaves gpu_check.md, gpu_check.json and the benchmark's bench_cuda.md and
# bench_cuda.json. Fails where a stage fails, and runs the others all the same.
#
#   scripts/gpu_check.sh [DIRECTORY [CHECKOUT]]
#
#   DIRECTORY    where the reports go; default scripts/results
#   CHECKOUT     of TransformerEngine, outside this repository: its kernels are compiled while the tests run, and the
#                benchmark runs them beside ours
#
# It installs nothing: PYTHON (default python3) needs a CUDA build of torch, cupy, NVRTC, pytest and hypothesis.
# What is missing of mpi4py, mpiexec and compute-sanitizer is skipped, and the report says so.
cd "$(dirname "$0")/.." || exit 1
set -uo pipefail
PYTHON=${PYTHON:-python3}
RESULTS=${1:-scripts/results}
CHECKOUT=${2:-}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$RESULTS"
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT
DEVICE_TESTS=(-m cuda tests/kernels tests/nn/test_cuda_layers.py)
DEADLINE=590  # seconds for all stages together
RESERVED=200  # of these, for the benchmark
FAILED=0
JSON=""
MARKDOWN="$RESULTS/gpu_check.md"

# record NAME RESULT SECONDS SUMMARY
record() {
    printf '%-26s%-9s%4d s   %s\n' "$1" "$2" "$3" "$4"
    printf '| %s | %s | %d | %s |\n' "$1" "$2" "$3" "$4" >>"$MARKDOWN"
    JSON+="${JSON:+, }{\"stage\": \"$1\", \"result\": \"$2\", \"seconds\": $3, \"summary\": \"$4\"}"
}

# stage NAME LIMIT COMMAND...   at most LIMIT seconds; its last summary line goes into the reports
stage() {
    local name=$1 limit=$2 started=$SECONDS log="$LOGS/$1" summary result=ok
    shift 2
    ((limit < DEADLINE - RESERVED - SECONDS)) || limit=$((DEADLINE - RESERVED - SECONDS))
    if ((limit < 1)); then
        record "$name" FAILED 0 "no time left"
        FAILED=1
        return
    fi
    timeout "$limit" "$@" >"$log" 2>&1 </dev/null || result=FAILED
    summary=$(grep -Eo '([0-9]+ (failed|passed|skipped|deselected|error)[^=]*|ERROR SUMMARY: .*)' "$log" | tail -n 1 |
        tr -d '"\\|' || true)
    record "$name" "$result" $((SECONDS - started)) "$summary"
    if [ "$result" != ok ]; then
        FAILED=1
        tail -n 60 "$log"
    fi
}

build() {
    cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release && cmake --build build/native --parallel &&
        cmake --install build/native --prefix .
}
export -f build

# The machine's own pytest: it may lack plugins that pyproject.toml configures, and its torch may warn of anything.
PYTEST=("$PYTHON" -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib -o filterwarnings=default)

GPU=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)') || exit 1
{
    printf '# gpu_check on %s\n\n`scripts/gpu_check.sh`, commit %s.\n\n' "$GPU" \
        "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    printf '| stage | result | seconds | |\n|---|---|---|---|\n'
} >"$MARKDOWN"

BENCHMARK=("$PYTHON" scripts/bench_cuda.py --rounds 5 --output "$RESULTS/bench_cuda")
if [ -n "$CHECKOUT" ]; then
    BENCHMARK+=(--transformer-engine "$CHECKOUT")
    CAPABILITY=$("$PYTHON" -c 'import torch; print(*torch.cuda.get_device_capability(), sep=".")')
    timeout "$((DEADLINE - RESERVED))" nice "$PYTHON" scripts/build_transformer_engine.py "$CHECKOUT" \
        --capability "$CAPABILITY" >"$LOGS/transformer_engine" 2>&1 </dev/null &
    COMPILING=$!
fi

stage build 60 bash -c build
stage tests 160 "${PYTEST[@]}" "${DEVICE_TESTS[@]}"
if command -v compute-sanitizer >/dev/null; then
    # Without torch's pool every tensor has an allocation of its own, whose bounds the tool knows.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck initcheck synccheck; do
        stage "$tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 "${PYTEST[@]}" "${DEVICE_TESTS[@]}" \
            -k sanitized
    done
    unset PYTORCH_NO_CUDA_MEMORY_CACHING
else
    record compute-sanitizer skipped 0 "not installed"
fi
if [ -n "$CHECKOUT" ]; then
    waited=$SECONDS result=ok
    wait "$COMPILING" || result=FAILED FAILED=1
    record transformer_engine "$result" $((SECONDS - waited)) \
        "compiled beside the tests: $(tail -n 1 "$LOGS/transformer_engine" | tr -d '"\\|')"
fi
RESERVED=0
stage benchmark 200 "${BENCHMARK[@]}"

printf '{"gpu": "%s", "stages": [%s]}\n' "$GPU" "$JSON" >"$RESULTS/gpu_check.json"
printf 'reports in %s, %d s\n' "$RESULTS" "$SECONDS"
exit "$FAILED"
