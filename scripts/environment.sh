# Sourced by the other scripts, from the repository's root: named stages, and an environment with zerocast built in it.
#
#   stage NAME COMMAND...           runs the command quietly; prints NAME, the result and the time, and on failure
#                                   everything that the command said, and ends the script; on a terminal it says
#                                   how far the command is
#   environment DIRECTORY EXTRAS    makes or updates a virtual environment, installs zerocast[EXTRAS] editable into it
#                                   under constraints.txt, and puts its programs first on PATH
#   environment_of NAME DIRECTORY COMMAND...
#                                   makes a virtual environment, puts it first on PATH, and fills it by the command
#   without_skips ARGUMENT...       runs pytest's integration tests, or those of another -m, and fails where one of them
#                                   is skipped, too
#   remove_siblings_of_torch        uninstalls torchaudio, torchcodec and torchvision
#
# PYTHON names the interpreter that an environment is made from; default python3.

set -euo pipefail
export NO_COLOR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
unset FORCE_COLOR CLICOLOR_FORCE PYTHONPATH PYTHONHOME

stage() {
    local name=$1 started=$SECONDS log summary
    shift
    log=$(mktemp)
    printf '%-34s' "$name"
    local progress= status=0
    if [ -t 1 ]; then
        show_progress "$name" "$log" &
        progress=$!
    fi
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ -n "$progress" ]; then
        kill "$progress"
        wait "$progress" 2>/dev/null || true
    fi
    if [ "$status" = 0 ]; then
        summary=$(grep -Eo '[0-9]+ passed.*' "$log" | tail -n 1 || true)
        printf 'ok %5d s%s\n' $((SECONDS - started)) "${summary:+   ${summary%% in *}}"
        grep -E '^[0-9.]+s (call|setup)' "$log" || true  # the slowest tests, where a stage lists them
        rm -f "$log"
    else
        printf 'FAILED after %d s\n\n' $((SECONDS - started))
        cat "$log"
        rm -f "$log"
        printf '\nFAILED: %s\n' "$name"
        exit 1
    fi
}

# Beside the stage's name, each second: the compiler's last "[3/40]", or the tests' last "[ 41%]".
show_progress() {
    while kill -0 $$ && sleep 1; do
        printf '\r%-34s%s\r%-34s' "$1" "$(grep -Eo '\[ *[0-9]+(/[0-9]+|%)\]' "$2" | tail -n 1)" "$1"
    done
}

without_skips() {
    local said
    said=$(python -m pytest -q -m integration "$@" 2>&1) || {
        printf '%s\n' "$said"
        return 1
    }
    printf '%s\n' "$said"
    ! grep -Eq '[0-9]+ skipped' <<<"$said"
}

environment() {
    enter_environment "environment" "$1"
    stage "packages" install_packages
    stage "build" install_zerocast "$2"
}

environment_of() {
    enter_environment "environment of $1" "$2"
    stage "$1" "${@:3}"
}

enter_environment() {
    stage "$1" make_environment "$2"
    PATH=$(cd "$2/bin" && pwd):$PATH
    export PATH
}

make_environment() {
    local directory=$1 python=${PYTHON:-python3}
    if [ -x "$directory/bin/pip" ]; then
        return
    fi
    if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))'; then
        echo "zerocast needs Python 3.10 to 3.14; $python is $("$python" --version 2>&1). Set PYTHON to one of those."
        return 1
    fi
    if "$python" -c 'import ensurepip'; then
        "$python" -m venv "$directory"
    else  # a distribution that packages venv apart: the system's pip can fill an environment that has none
        "$python" -m venv --without-pip "$directory" &&
            "$python" -m pip --python "$directory/bin/python" install --quiet pip || {
            echo "$python has neither ensurepip nor pip. On Debian: apt-get install python3-venv"
            return 1
        }
    fi
}

# Requirements first and zerocast after, without isolation: the build then finds its tools in the environment, at the
# pinned versions, and keeps its folder, so that doing this again takes seconds. DeepSpeed comes as source alone, and is
# built with setuptools. Nothing is byte-compiled: of 12,000 modules a few thousand are ever imported, and are
# compiled then.
install_packages() {
    python -m pip install --quiet --no-compile -c constraints.txt scikit-build-core cmake ninja "setuptools>=70.1"
}

install_zerocast() {
    python -m pip install --verbose --no-compile -c constraints.txt --no-build-isolation --editable ".[$1]"
}

# What vLLM requires of them is of another release than its torch, and transformers imports what it finds.
remove_siblings_of_torch() {
    python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
}
