// The variants of the GEMM with weights in E4M3: see gemm_hopper.cuh.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "gemm_hopper.cuh"

#ifdef TUNE
TUNE(KERNEL)
#else
KERNEL(fp8, FP8, 16, 2, 1, STREAM)
KERNEL(fp8, FP8, 64, 2, 1, STREAM)
KERNEL(fp8, FP8, 128, 2, 1, STREAM)
KERNEL(fp8, FP8, 256, 2, 2, STREAM)
KERNEL(fp8, FP8, 64, 1, 1, VIRTUAL)
KERNEL(fp8, FP8, 128, 1, 1, VIRTUAL)
KERNEL(fp8, FP8, 128, 2, 1, VIRTUAL)
KERNEL(fp8, FP8, 128, 2, 2, VIRTUAL)
KERNEL(fp8, FP8, 128, 1, 2, SPLIT)
KERNEL(fp8, FP8, 128, 1, 4, SPLIT)
#endif
#endif
