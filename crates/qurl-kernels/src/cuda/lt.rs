//! cuBLASLt for the large bf16 products on the way back: input gradient and weight gradient, sums in f32.
//!
//! Forward products are the engine's own ([`super::gemm`]): the trainer's log-probabilities have the engine's bits. A plan
//! (descriptors and the algorithm that the library recommends) is made once per shape. The library counts columns first; with
//! operands swapped its column-major result is our row-major one.

use super::ffi::{self, CublasLt, DevicePtr, Handle, LtAlgorithm, LtHeuristic};
use super::gpu::Gpu;
use super::memory::Slot;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

const COMPUTE_F32: c_int = 68;
const TYPE_F32: c_int = 0;
const TYPE_BF16: c_int = 14;
const DESC_TRANSPOSE_B: c_int = 4;
const PREFERENCE_WORKSPACE: c_int = 1;
const WORKSPACE: usize = 64 << 20;

/// One product `d[m, n] = a op(b) (+ d)` in the library's column-major terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    transpose_b: bool,
    add: bool,
}

struct Plan {
    desc: Handle,
    a: Handle,
    b: Handle,
    d: Handle,
    algorithm: LtAlgorithm,
}

/// The library and its plans.
pub(super) struct Lt {
    library: CublasLt,
    handle: Handle,
    plans: Mutex<HashMap<Shape, Option<Plan>>>,
}

impl Lt {
    /// Opens the library in the current context.
    pub fn open() -> Result<Lt, String> {
        let library = ffi::cublas_lt()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place is valid and a context is current.
        match unsafe { (library.create)(&mut handle) } {
            0 => Ok(Lt { library, handle, plans: Mutex::default() }),
            status => Err(format!("cuBLASLt cannot start (status {status})")),
        }
    }

    /// Whether operands of these row lengths have the alignment that the fast kernels need.
    pub fn takes(n: usize, k: usize) -> bool {
        n.is_multiple_of(8) && k.is_multiple_of(8)
    }

    /// `dx[rows, k] = dy[rows, n] w[n, k]`; whether the library could.
    pub fn input_gradient(
        &self,
        gpu: &Gpu,
        dy: DevicePtr,
        w: DevicePtr,
        rows: usize,
        n: usize,
        k: usize,
        dx: DevicePtr,
    ) -> bool {
        let shape = Shape { m: k, n: rows, k: n, transpose_b: false, add: false };
        self.run(gpu, shape, w, dy, dx)
    }

    /// `dw[n, k] += dy[rows, n]^T x[rows, k]`
    pub fn weight_gradient(
        &self,
        gpu: &Gpu,
        x: DevicePtr,
        dy: DevicePtr,
        rows: usize,
        n: usize,
        k: usize,
        dw: DevicePtr,
    ) -> bool {
        let shape = Shape { m: k, n, k: rows, transpose_b: true, add: true };
        self.run(gpu, shape, x, dy, dw)
    }

    fn run(&self, gpu: &Gpu, shape: Shape, a: DevicePtr, b: DevicePtr, d: DevicePtr) -> bool {
        let workspace = gpu.scratch(Slot::Product, WORKSPACE);
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(plan) = plans.entry(shape).or_insert_with(|| self.plan(shape)) else { return false };
        let sizes = [shape.m, shape.n, shape.k].map(|x| x as u64);
        let flags = [shape.transpose_b, shape.add].map(u64::from);
        if gpu.hashed(&[3, a, b, d, workspace]) {
            gpu.hashed(&sizes);
            gpu.hashed(&flags);
            return true;
        }
        gpu.bind();
        let (one, beta) = (1.0f32, if shape.add { 1.0f32 } else { 0.0 });
        // SAFETY: the descriptors describe the operands; the caller gives addresses of their sizes.
        let status = unsafe {
            (self.library.matmul)(
                self.handle,
                plan.desc,
                (&raw const one).cast(),
                a,
                plan.a,
                b,
                plan.b,
                (&raw const beta).cast(),
                d,
                plan.d,
                d,
                plan.d,
                &plan.algorithm,
                workspace,
                WORKSPACE,
                gpu.stream,
            )
        };
        if status != 0 {
            gpu.fail(format!("cuBLASLt product {shape:?}: status {status}"));
        }
        true
    }

    fn plan(&self, shape: Shape) -> Option<Plan> {
        let lib = &self.library;
        let layout = |rows: usize, columns: usize, ty: c_int| {
            let mut layout = std::ptr::null_mut();
            // SAFETY: the place is valid.
            let status =
                unsafe { (lib.layout_create)(&mut layout, ty, rows as u64, columns as u64, rows as i64) };
            (status == 0).then_some(layout)
        };
        let (b_rows, b_columns) = if shape.transpose_b { (shape.n, shape.k) } else { (shape.k, shape.n) };
        let a = layout(shape.m, shape.k, TYPE_BF16)?;
        let b = layout(b_rows, b_columns, TYPE_BF16)?;
        let d = layout(shape.m, shape.n, TYPE_F32)?;
        let (mut desc, mut preference, mut found) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        let mut result = LtHeuristic::EMPTY;
        // SAFETY: every place is valid; attributes have the sizes that the library documents.
        unsafe {
            if (lib.desc_create)(&mut desc, COMPUTE_F32, TYPE_F32) != 0 {
                return None;
            }
            let set = |attribute: c_int, value: c_int| {
                (lib.desc_set)(desc, attribute, (&raw const value).cast(), size_of::<c_int>());
            };
            set(DESC_TRANSPOSE_B, c_int::from(shape.transpose_b));
            (lib.preference_create)(&mut preference);
            let bytes = WORKSPACE as u64;
            (lib.preference_set)(
                preference,
                PREFERENCE_WORKSPACE,
                (&raw const bytes).cast(),
                size_of::<u64>(),
            );
            let status =
                (lib.heuristic)(self.handle, desc, a, b, d, d, preference, 1, &mut result, &mut found);
            (lib.preference_destroy)(preference);
            if status != 0 || found == 0 || result.state != 0 {
                return None;
            }
        }
        Some(Plan { desc, a, b, d, algorithm: result.algorithm })
    }
}

impl Drop for Lt {
    fn drop(&mut self) {
        let plans = std::mem::take(&mut *self.plans.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: nothing uses the handles any more.
        unsafe {
            for plan in plans.into_values().flatten() {
                [plan.a, plan.b, plan.d].into_iter().for_each(|layout| {
                    (self.library.layout_destroy)(layout);
                });
                (self.library.desc_destroy)(plan.desc);
            }
            (self.library.destroy)(self.handle);
        }
    }
}
