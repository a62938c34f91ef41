// The variants of the GEMM with weights in 4-bit integers: see gemm_hopper.cuh.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "gemm_hopper.cuh"

#ifdef TUNE
TUNE(KERNEL)
#else
KERNEL(int4, INT4, 16, 2, 1, STREAM)
KERNEL(int4, INT4, 64, 2, 1, STREAM)
KERNEL(int4, INT4, 64, 2, 2, STREAM)
KERNEL(int4, INT4, 128, 2, 2, STREAM)
KERNEL(int4, INT4, 64, 2, 1, VIRTUAL)
KERNEL(int4, INT4, 96, 2, 1, VIRTUAL)
#endif
#endif
