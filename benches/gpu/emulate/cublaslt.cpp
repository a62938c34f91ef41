// The functions of libcublasLt that qurl uses (src/cuda/ffi.rs): GEMMs of bf16 whose sums are in f32.
//
// d = alpha a op(b) + beta c, in columns, as the library counts them. The order of its sums is its own, as on
// a GPU.
#include <memory>
#include "driver.h"
#include "numbers.h"

using namespace emu;

namespace {

const int REFUSED = 7;  // CUBLAS_STATUS_INVALID_VALUE
const int TYPE_F32 = 0, TYPE_BF16 = 14, COMPUTE_F32 = 68, TRANSPOSE_B = 4;

struct Layout {
    int type;
    uint64_t rows, columns, leading;

    size_t bytes() const { return leading * columns * (type == TYPE_BF16 ? 2 : 4); }
};
struct Desc {
    bool transposed = false;  // b
};

// Whether the shapes are those of a GEMM.
bool fits(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    uint64_t k = desc.transposed ? b.columns : b.rows, n = desc.transposed ? b.rows : b.columns;
    bool same = c.type == d.type && c.rows == d.rows && c.columns == d.columns && c.leading == d.leading;
    bool operands = a.type == TYPE_BF16 && b.type == TYPE_BF16 && a.columns == k;
    return same && operands && d.rows == a.rows && d.columns == n && a.leading >= a.rows &&
           b.leading >= b.rows && d.leading >= d.rows;
}

struct Gemm {
    Desc desc;
    Layout a, b, d;
    const uint16_t *left, *right;
    const uint8_t* before;
    uint8_t* to;
    float alpha, beta;

    void run() const {
        std::vector<double> sums(d.rows);
        for (uint64_t column = 0; column < d.columns; ++column) {
            std::fill(sums.begin(), sums.end(), 0.0);
            for (uint64_t i = 0; i < a.columns; ++i) {
                uint64_t at = desc.transposed ? i * b.leading + column : column * b.leading + i;
                double x = from_bf16(right[at]);
                for (uint64_t row = 0; row < d.rows; ++row)
                    sums[row] += x * from_bf16(left[i * a.leading + row]);
            }
            for (uint64_t row = 0; row < d.rows; ++row) put(column * d.leading + row, alpha * sums[row]);
        }
    }
    void put(uint64_t at, float x) const {
        if (d.type == TYPE_BF16) {
            uint16_t old = ((const uint16_t*)before)[at];
            ((uint16_t*)to)[at] = to_bf16(beta == 0.0f ? x : x + beta * (float)from_bf16(old));
        } else {
            float old = ((const float*)before)[at];
            ((float*)to)[at] = beta == 0.0f ? x : x + beta * old;
        }
    }
};

}  // namespace

EXPORT int cublasLtCreate(Handle* handle) {
    MAY_CALL(UNSAFE);
    return *handle = (Handle)1, OK;
}
EXPORT int cublasLtDestroy(Handle) { return OK; }
EXPORT int cublasLtMatmulDescCreate(Handle* desc, int compute, int scale) {
    if (compute != COMPUTE_F32 || scale != TYPE_F32) return refuse(REFUSED, "sums that are not in f32");
    return *desc = new Desc, OK;
}
EXPORT int cublasLtMatmulDescDestroy(Handle desc) { return delete (Desc*)desc, OK; }
EXPORT int cublasLtMatmulDescSetAttribute(Handle desc, int attribute, const void* value, size_t size) {
    if (attribute != TRANSPOSE_B || size != 4) return refuse(REFUSED, "attribute %d of a GEMM", attribute);
    return ((Desc*)desc)->transposed = *(const int*)value != 0, OK;
}
EXPORT int cublasLtMatrixLayoutCreate(
    Handle* to, int type, uint64_t rows, uint64_t columns, int64_t leading
) {
    if (type != TYPE_F32 && type != TYPE_BF16) return refuse(REFUSED, "a matrix of type %d", type);
    return *to = new Layout{type, rows, columns, (uint64_t)leading}, OK;
}
EXPORT int cublasLtMatrixLayoutDestroy(Handle layout) { return delete (Layout*)layout, OK; }
EXPORT int cublasLtMatmulPreferenceCreate(Handle* to) { return *to = (Handle)1, OK; }
EXPORT int cublasLtMatmulPreferenceDestroy(Handle) { return OK; }
EXPORT int cublasLtMatmulPreferenceSetAttribute(Handle, int, const void*, size_t) { return OK; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(
    Handle, Handle desc, Handle a, Handle b, Handle c, Handle d, Handle, int, void* result, int* found
) {
    std::memset(result, 0, 96);
    bool fine = fits(*(Desc*)desc, *(Layout*)a, *(Layout*)b, *(Layout*)c, *(Layout*)d);
    return *found = fine, fine ? OK : refuse(REFUSED, "matrices that are no GEMM");
}
EXPORT int cublasLtMatmul(
    Handle, Handle desc, const void* alpha, Address a, Handle a_layout, Address b, Handle b_layout,
    const void* beta, Address c, Handle c_layout, Address d, Handle d_layout, const void*, Address workspace,
    size_t bytes, Handle stream
) {
    Gemm gemm = {*(Desc*)desc, *(Layout*)a_layout, *(Layout*)b_layout, *(Layout*)d_layout,
                 (const uint16_t*)a, (const uint16_t*)b, (const uint8_t*)c, (uint8_t*)d,
                 *(const float*)alpha, *(const float*)beta};
    if (!fits(gemm.desc, gemm.a, gemm.b, *(Layout*)c_layout, gemm.d))
        return refuse(REFUSED, "matrices that are no GEMM");
    // The recommended algorithms read 16 bytes at a time.
    for (Address at : {a, b, c, d})
        if (at % 16) return refuse(REFUSED, "a matrix at %#lx", (unsigned long)at);
    if (!on_device(a, gemm.a.bytes()) || !on_device(b, gemm.b.bytes()) || !on_device(c, gemm.d.bytes()) ||
        !on_device(d, gemm.d.bytes()) || !on_device(workspace, bytes))
        return refuse(REFUSED, "a matrix outside of any allocation");
    return issue(__func__, stream, {[gemm] { gemm.run(); }});
}
