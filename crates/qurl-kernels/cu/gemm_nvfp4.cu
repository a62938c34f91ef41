// The variants of the GEMM with weights in E2M1 with scales in E4M3: see gemm_hopper.cuh.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "gemm_hopper.cuh"

#ifdef TUNE
TUNE(KERNEL)
#else
KERNEL(nvfp4, NVFP4, 16, 2, 1, STREAM)
KERNEL(nvfp4, NVFP4, 64, 2, 1, STREAM)
KERNEL(nvfp4, NVFP4, 64, 2, 2, STREAM)
KERNEL(nvfp4, NVFP4, 128, 2, 2, STREAM)
KERNEL(nvfp4, NVFP4, 64, 2, 1, VIRTUAL)
KERNEL(nvfp4, NVFP4, 128, 2, 1, VIRTUAL)
#endif
#endif
