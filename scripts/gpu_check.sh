#!/usr/bin/env bash
# Everything that needs a GPU, in stages that run one by one or together, each within a limit of its own:
#
#   compile      all kernels for this GPU, by all cores, into the user's cache                              60 s
#   train        FSDP2 over NCCL trains 187 M parameters: NVFP4, FP8, MXFP8, BF16, eager and compiled       600 s
#   zero         ZeroOptimizer: alone, ranks that share the GPU, a CUDA graph, a checkpoint, an export      400 s
#   qat          QAT and QAD beside casting after training, at the same size                                300 s
#   peers        the same work by torch, torch.compile and torchao; and by TransformerEngine's kernels      500 s
#   kernels      the steps of casts, and variants that no GPU has run; their bytes by hash                120 s
#   smoke        a little of every recipe, function and norm has the reference's bytes                      90 s
#   tests        the tests marked cuda: graphs, threads and streams first, then equality                    300 s
#   speed        the benchmark's table: llama-like, expert-like and narrow weights, all recipes             270 s
#   sanitizers   compute-sanitizer over a plan of every recipe, our kernels alone                           400 s
#   counters     Nsight Compute's counters of the steps of COUNTED, and where their warps wait              120 s
#
#   scripts/gpu_check.sh [--rehearse] [--again] [--plan] [--checkout CHECKOUT] DIRECTORY [STAGE...]
#
#   DIRECTORY     where results go: rows.jsonl and bench_cuda.jsonl, a line of JSON for everything that was found, written
#                 as it is found; STAGE.log, all that a stage printed; gpu_check.md and bench_cuda.md, pages of it
#   STAGE         default: all, in this order
#   --checkout    of TransformerEngine, outside this repository: stage peers compiles its kernels and runs them
#   --rehearse    needs no GPU: the stages' small ends, on the emulation of the tests
#   --plan        says how long the stages take, and does nothing; without it, too, this is said first
#   --again       does rows of these stages anew
#
# Rows that DIRECTORY has are not done again, so what was cut off goes on where it ended. What is estimated, and why in
# this order: gpu_queue.py. The build of the CPU library is not a stage: without it the references are slower. It
# installs nothing: PYTHON (default python3) needs a CUDA build of torch, cupy, NVRTC, pytest and hypothesis; zero mpi
# needs mpi4py and mpiexec, peers may have torchao.
cd "$(dirname "$0")/.." || exit 1
set -uo pipefail
PYTHON=${PYTHON:-python3}
REHEARSE=() CHECKOUT="" AGAIN=() PLAN=0
while [[ ${1:-} == --* ]]; do
    case $1 in
    --rehearse) REHEARSE=(--rehearse) ;;
    --again) AGAIN=(--again) ;;
    --plan) PLAN=1 ;;
    --checkout) CHECKOUT=${2:-} && shift ;;
    *) echo "unknown option $1" >&2 && exit 2 ;;
    esac
    shift
done
RESULTS=${1:?"usage: scripts/gpu_check.sh [--rehearse] [--again] [--plan] [--checkout CHECKOUT] DIRECTORY [STAGE...]"}
shift
STAGES=("$@")
((${#STAGES[@]})) || STAGES=(compile train zero qat peers kernels smoke tests speed sanitizers counters)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$RESULTS"
PAGE="$RESULTS/gpu_check.md"
FAILED=0

# The machine's own pytest: it may lack plugins that pyproject.toml configures, and its torch may warn of anything.
PYTEST=("$PYTHON" -m pytest -v --durations=20 -p no:cacheprovider -o addopts=--import-mode=importlib
    -o filterwarnings=default -m cuda)
# Where pytest can, processes share the GPU; with one thread each, or their references crowd the cores.
MANY=()
"$PYTHON" -c "import xdist" 2>/dev/null && MANY=(-n 8) && export OMP_NUM_THREADS=1
BENCH=("$PYTHON" scripts/bench_cuda.py --output "$RESULTS/bench_cuda" "${REHEARSE[@]}")

# within STAGE LIMIT COMMAND...   at most LIMIT seconds; what it prints is added to the stage's log
within() {
    local log="$RESULTS/$1.log" limit=$2
    shift 2
    printf '$ %s\n' "$*" >>"$log"
    timeout -k 5 "$limit" "$@" >>"$log" 2>&1 </dev/null
}

stage_compile() { within compile 60 "$PYTHON" scripts/gpu_smoke.py compile --output "$RESULTS/rows.jsonl" "${REHEARSE[@]}"; }

# queued STAGE LIMIT   the rows of a stage of gpu_queue.py
queued() { within "$1" "$2" "$PYTHON" scripts/gpu_queue.py do "$RESULTS" "$1" "${REHEARSE[@]}"; }

stage_train() { queued train 600; }

stage_zero() { queued zero 400; }

stage_qat() { queued qat 300; }

stage_kernels() { queued kernels 120; }

stage_smoke() { within smoke 90 "$PYTHON" scripts/gpu_smoke.py smoke --output "$RESULTS/rows.jsonl" "${REHEARSE[@]}"; }

stage_speed() {
    local few=()
    ((${#REHEARSE[@]})) && few=(--recipes nvfp4 --sets llama --rounds 1)
    within speed 270 "${BENCH[@]}" --parts speed --rounds 5 "${few[@]}"
}

stage_tests() {
    within tests 90 "${PYTEST[@]}" tests/kernels/test_cuda_device.py -k "graph or thread or stream or wait"
    local first=$?
    within tests 210 "${PYTEST[@]}" "${MANY[@]}" tests/kernels tests/nn/test_cuda_layers.py \
        -k "not (test_cuda_device and (graph or thread or stream or wait))" && ((first == 0 || first == 5))
}

# sanitize TOOL LIMIT TEST OPTION...   the tool over a test; the log says what did not end
sanitize() {
    local tool=$1 limit=$2 test=$3 status
    shift 3
    # Without torch's pool every tensor has an allocation of its own, whose bounds the tool knows.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 within sanitizers "$limit" compute-sanitizer --tool "$tool" "$@" \
        "${PYTEST[@]}" "tests/kernels/test_cuda_plans.py::$test"
    status=$?
    if ((status == 124 || status == 137)); then
        echo "unfinished after $limit s: $tool of $test" >>"$RESULTS/sanitizers.log"
    fi
    return $status
}

stage_sanitizers() {
    local log="$RESULTS/sanitizers.log" options option tool recipe from found end failed=0 ours=(--error-exitcode 9)
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed" >>"$log" && return; }
    options=$(compute-sanitizer --help 2>/dev/null)
    for option in --kernel-name --kernel-regex; do  # the second one is the name of older versions
        [[ $options == *"$option "* ]] && ours+=("$option" kns=zerocast) && break
    done
    for tool in memcheck synccheck; do
        sanitize "$tool" 100 "test_sanitized[device]" "${ours[@]}" || failed=1
    done
    # Memory counts as written where a kernel that is checked wrote it, so all are, and of what the tool reports ours is
    # what a kernel of ours has read.
    from=$(wc -l <"$log")
    sanitize initcheck 100 "test_sanitized[device]" --print-limit 0 || failed=1
    found=$(tail -n "+$((from + 1))" "$log" | grep -A 1 "Uninitialized" | grep -c "at .*zerocast")
    echo "initcheck ERROR SUMMARY: $found errors of zerocast's kernels" >>"$log"
    ((found == 0)) || failed=1
    # It needs far longer than the others, and may hang: small cases, each in a process of its own.
    end=$((SECONDS + 100))
    for recipe in nvfp4 mxfp8 block current rowwise delayed nvfp4-4over6; do
        if ((end - SECONDS < 5)); then
            echo "unfinished, no time left: racecheck of $recipe" >>"$log"
            continue
        fi
        sanitize racecheck $((end - SECONDS < 30 ? end - SECONDS : 30)) "test_sanitized_alone[device-$recipe]" \
            "${ours[@]}" || failed=1
    done
    found=$(grep -c "^unfinished" "$log")
    ((found == 0)) || { failed=1 && echo "$found runs not ended: lines that begin with unfinished say which" >>"$log"; }
    return $failed
}

COUNTED=(nvfp4:amax nvfp4:cast nvfp4:transpose nvfp4_stochastic:cast "nvfp4_4over6:select and cast" fp8:cast
    "fp8_blockwise:one pass" "mxfp8:one pass" mxfp8:scale)

stage_counters() {
    local report="$RESULTS/counters.ncu-rep" once=("$PYTHON" scripts/bench_cuda.py "${REHEARSE[@]}" --once "${COUNTED[@]}")
    if ((${#REHEARSE[@]})); then
        within counters 120 "${once[@]}"
        return
    fi
    command -v ncu >/dev/null || { echo "ncu is not installed" >>"$RESULTS/counters.log" && return; }
    within counters 120 ncu --profile-from-start off --clock-control none --set full -f -o "$report" "${once[@]}" ||
        return 1
    ncu --import "$report" --page details >"$RESULTS/counters.txt"
    ncu --import "$report" --page source --csv >"$RESULTS/counters.csv"
}

stage_peers() {
    local beside=() few=(--rounds 5)
    ((${#REHEARSE[@]})) && few=(--rounds 1)
    if [ -n "$CHECKOUT" ]; then
        local capability
        capability=$("$PYTHON" -c 'import torch; print(*torch.cuda.get_device_capability(), sep=".")')
        within peers 300 "$PYTHON" scripts/build_transformer_engine.py "$CHECKOUT" --capability "$capability"
        beside=(--transformer-engine "$CHECKOUT")
    fi
    within peers 200 "${BENCH[@]}" --parts others "${few[@]}" "${beside[@]}"
}

TODO=$("$PYTHON" scripts/gpu_queue.py plan "$RESULTS" "${STAGES[@]}" "${AGAIN[@]}") || exit 2
echo "$TODO"
((PLAN)) && exit
if [ ! -e "$PAGE" ]; then
    printf '# gpu_check\n\n`scripts/gpu_check.sh`, commit %s.\n\n| stage | result | seconds | |\n|---|---|---|---|\n' \
        "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" >"$PAGE"
fi
for stage in "${STAGES[@]}"; do
    declare -F "stage_$stage" >/dev/null || { echo "unknown stage $stage" >&2 && exit 2; }
    [[ $TODO =~ (^|$'\n')"$stage "[^$'\n']*done ]] && continue
    started=$SECONDS result=ok
    "stage_$stage" || { result=FAILED FAILED=1 && tail -n 40 "$RESULTS/$stage.log"; }
    summary=$(grep -Eo '([0-9]+ (failed|passed|skipped|deselected|error)[^=]*|ERROR SUMMARY: .*|.* not installed|.* not ended)' \
        "$RESULTS/$stage.log" | tail -n 1 | tr -d '"\\|')
    printf '%-12s%-8s%4d s   %s\n' "$stage" "$result" $((SECONDS - started)) "$summary"
    printf '| %s | %s | %d | %s |\n' "$stage" "$result" $((SECONDS - started)) "$summary" >>"$PAGE"
    "$PYTHON" scripts/gpu_queue.py note "$RESULTS" "$stage" "${REHEARSE[@]}" \
        --ended "$result" $((SECONDS - started)) "$summary"
done
exit "$FAILED"
