// The variants of the product with bf16 weights: see gemm_hopper.cuh.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "gemm_hopper.cuh"

#ifdef TUNE
TUNE(KERNEL)
#else
KERNEL(bf16, BF16, 16, 2, 1, STREAM)
KERNEL(bf16, BF16, 64, 2, 1, STREAM)
KERNEL(bf16, BF16, 128, 2, 1, STREAM)
KERNEL(bf16, BF16, 256, 2, 2, STREAM)
KERNEL(bf16, BF16, 64, 1, 1, VIRTUAL)
KERNEL(bf16, BF16, 128, 1, 1, VIRTUAL)
KERNEL(bf16, BF16, 128, 2, 1, VIRTUAL)
KERNEL(bf16, BF16, 128, 2, 2, VIRTUAL)
KERNEL(bf16, BF16, 192, 2, 2, VIRTUAL)
KERNEL(bf16, BF16, 128, 1, 2, SPLIT)
KERNEL(bf16, BF16, 128, 1, 4, SPLIT)
KERNEL(bf16, BF16, 256, 2, 3, SPLIT)
KERNEL(bf16, BF16, 256, 2, 4, SPLIT)
#endif
#endif
