// What the library says about itself before anything is launched.
#define ZEROCAST_EXPORTED extern "C" __attribute__((visibility("default")))

// Raised with every change of a table or of a function's arguments; zerocast/backends/cpu.py
// refuses another number.
ZEROCAST_EXPORTED int zerocast_cpu_interface() { return 27; }

// The instruction sets that this library holds and this machine runs, fastest first, separated by
// spaces.
ZEROCAST_EXPORTED const char* zerocast_cpu_isas() {
#if defined(ZEROCAST_X86)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                  && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
                  && __builtin_cpu_supports("avx512vnni");
    if (avx2 && avx512) return "avx512 avx2 baseline";
    if (avx2) return "avx2 baseline";
#elif defined(__aarch64__)
    return "neon";
#endif
    return "baseline";
}
