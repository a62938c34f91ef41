// The variants of the GEMM with weights in 8-bit integers: see gemm_hopper.cuh and gemm_gated.cuh.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "gemm_gated.cuh"

#ifdef TUNE
TUNE(KERNEL)
#else
KERNEL(int8, INT8, 16, 2, 1, STREAM)
KERNEL(int8, INT8, 64, 2, 1, STREAM)
KERNEL(int8, INT8, 128, 2, 1, STREAM)
KERNEL(int8, INT8, 256, 2, 2, STREAM)
KERNEL(int8, INT8, 64, 1, 1, TILES)
KERNEL(int8, INT8, 128, 1, 1, TILES)
KERNEL(int8, INT8, 128, 2, 1, TILES)
KERNEL(int8, INT8, 256, 2, 2, TILES)
KERNEL(int8, INT8, 128, 1, 2, SPLIT)
KERNEL(int8, INT8, 128, 1, 4, SPLIT)
KERNEL(int8, INT8, 256, 2, 3, SPLIT)
KERNEL(int8, INT8, 256, 2, 4, SPLIT)
GATED(40)
GATED(48)
GATED(56)
GATED(64)
GATED(72)
#endif
#endif
