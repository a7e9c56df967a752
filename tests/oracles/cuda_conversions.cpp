// What CUDA's own headers convert a float to, on the host: an oracle, and no part of zerocast.
//
// Reads float32 values from standard input and writes four bytes for each: its E2M1, E4M3 and E5M2
// codes, saturating, and its E8M0 code, rounded up.
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <cstdio>

int main() {
    float x;
    while (std::fread(&x, sizeof x, 1, stdin) == 1) {
        const unsigned char codes[] = {
            __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest),
            __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3),
            __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2),
            __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf),
        };
        std::fwrite(codes, sizeof codes, 1, stdout);
    }
}
